"""Low-rank adapters, and copies of modules that are trained whole beside them (peft's modules_to_save): put into a
model, saved as peft saves them, and merged into the weights that they were trained on.

Not here: 4-bit weights (quantized.py), or what the planner makes of either.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from planner.spec.job import Lora
from planner.spec.plan import Plan

MAGNITUDE = ".lora_magnitude_vector."
"""In the name of a matrix's magnitudes."""
NamedWeight: TypeAlias = tuple[str, Callable[[torch.Tensor], torch.Tensor]]
"""A weight's ordinary name, and its numbers once they are asked for (values.Value)."""
WEIGHTS = "adapter_model.safetensors"
"""What `peft.PeftModel.from_pretrained` looks for in a folder, beside its configuration."""
COPY = ".modules_to_save."
"""In the name of a weight of a trained copy, in peft's and in the ordinary one."""


def add_adapters(model: nn.Module, plan: Plan, dtype: torch.dtype) -> None:
    """Adapters on the targets and trained copies of the plan's modules, everything else frozen; adapters in `dtype`, or
    in fp32 where the plan upcasts them, copies as the module is."""
    from peft import inject_adapter_in_model

    lora = plan.job.adapters or Lora()
    # Injected, not wrapped: the model keeps its class, so every engine finds its layers and its head as without LoRA.
    inject_adapter_in_model(_config(plan), model)
    # peft upcasts in get_peft_model only, and injection skips it.
    held = torch.float32 if lora.upcast_adapters else dtype
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.to(held)


def _config(plan: Plan, **more: Any) -> Any:
    from peft import LoraConfig

    lora, described = plan.job.adapters or Lora(), plan.model.described
    if described is not None and described.towers:  # whose modules have the names of a layer's
        more["exclude_modules"] = rf"({'|'.join(map(re.escape, described.towers))})\..*"
    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.targets),
        lora_dropout=lora.dropout,
        use_dora=lora.dora,
        modules_to_save=list(lora.modules_to_save) or None,
        bias="none",
        **more,
    )


def ordinary_name(name: str) -> str:
    """Transformers' name of a weight that carries an adapter or has a copy; an adapter is `<module>.lora_A.weight`, a
    copy `<module>.modules_to_save.weight`."""
    return name.replace(".base_layer.", ".").replace(".original_module.", ".").replace(".default.", ".")


def is_adapter(name: str) -> bool:
    """Whether a weight's name is an adapter's."""
    return ".lora_" in name


def saved_name(name: str) -> str | None:
    """The name of a weight in a folder of adapters: an adapter, or the copy of a module, which has the module's own
    name. None for a weight of the base."""
    ordinary = ordinary_name(name)
    return ordinary.replace(COPY, ".") if COPY in ordinary else ordinary if is_adapter(name) else None


def is_magnitude(name: str) -> bool:
    """Whether a weight's name is that of a matrix's magnitudes (DoRA)."""
    return MAGNITUDE in name


def with_copies(values: Iterable[NamedWeight], model: nn.Module) -> Iterator[NamedWeight]:
    """A model's weights one after the other, each with its trained copy, which begins with the same numbers in memory
    of its own, and with its magnitudes: adapters begin as nothing beside it."""
    names = {ordinary_name(name) for name, _ in model.named_parameters()}
    copies = {name.replace(COPY, "."): name for name in names if COPY in name}
    turned = {
        f"{name}.weight": bool(module.fan_in_fan_out)
        for name, module in model.named_modules()
        if f"{name}{MAGNITUDE}weight" in names
    }
    for name, value in values:
        yield name, value
        if name in copies:
            yield copies[name], partial(_again, value)
        if name in turned:
            magnitude = name.removesuffix(".weight") + MAGNITUDE + "weight"
            yield magnitude, partial(_row_norms, value, 0 if turned[name] else 1)


def _row_norms(value: Callable[[torch.Tensor], torch.Tensor], columns: int, target: torch.Tensor) -> torch.Tensor:
    """The length of each row of a matrix, whose `columns` are that dimension."""
    norms: torch.Tensor = torch.linalg.norm(value(torch.empty(0, dtype=target.dtype, device="meta")), dim=columns)
    return norms


def _again(value: Callable[[torch.Tensor], torch.Tensor], target: torch.Tensor) -> torch.Tensor:
    made = value(target)
    return made if isinstance(target, DTensor) else made.clone()  # a shard is filled in place


def save_adapters(folder: Path, plan: Plan, adapters: Mapping[str, torch.Tensor]) -> None:
    """The folder that `peft.PeftModel.from_pretrained(base, folder)` loads, of adapters by their ordinary names."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    base = plan.job.recipe.checkpoint
    config = _config(plan, task_type="CAUSAL_LM", base_model_name_or_path=base, inference_mode=True)
    config.save_pretrained(str(folder))
    partial = folder / f"{WEIGHTS}.partial"
    save_file({f"base_model.model.{name}": held for name, held in adapters.items()}, partial, metadata={"format": "pt"})
    partial.replace(folder / WEIGHTS)


def merged(model: nn.Module, folder: Path) -> nn.Module:
    """The base model with the adapters of a folder added to its weights (alpha / rank * B A), and no adapters left.

    The model is changed. Its weights should be whole: merging into 4-bit ones rounds the sum anew.
    """
    from peft import PeftModel

    adapted: Any = PeftModel.from_pretrained(cast("Any", model), str(folder))
    whole: nn.Module = adapted.merge_and_unload()
    return whole
