"""Low-rank adapters: put into a model, saved as peft saves them, and merged into the weights that they were trained on.

Not here: 4-bit weights (quantized.py), or what the planner makes of either.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from planner.spec import TrainingJob
from planner.spec.job import Lora

WEIGHTS = "adapter_model.safetensors"
"""What `peft.PeftModel.from_pretrained` looks for in a folder, beside its configuration."""


def add_adapters(model: nn.Module, job: TrainingJob, dtype: torch.dtype) -> None:
    """Adapters on the targets, everything else frozen; in `dtype`, or in fp32 where the plan upcasts them."""
    from peft import inject_adapter_in_model

    lora = job.adapters or Lora()
    # Injected, not wrapped: the model keeps its class, so every engine finds its layers and its head as without LoRA.
    inject_adapter_in_model(_config(lora), model)
    # peft upcasts in get_peft_model only, and injection skips it.
    held = torch.float32 if lora.upcast_adapters else dtype
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            parameter.data = parameter.data.to(held)


def _config(lora: Lora, **more: Any) -> Any:
    from peft import LoraConfig

    return LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,
        target_modules=list(lora.targets),
        lora_dropout=lora.dropout,
        bias="none",
        **more,
    )


def ordinary_name(name: str) -> str:
    """What Transformers calls a weight that carries an adapter; an adapter is `<module>.lora_A.weight`."""
    return name.replace(".base_layer.", ".").replace(".default.", ".")


def is_adapter(name: str) -> bool:
    """Whether a weight's name is an adapter's."""
    return ".lora_" in name


def save_adapters(folder: Path, job: TrainingJob, adapters: Mapping[str, torch.Tensor]) -> None:
    """The folder that `peft.PeftModel.from_pretrained(base, folder)` loads, of adapters by their ordinary names."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    base = job.recipe.checkpoint
    config = _config(job.adapters or Lora(), task_type="CAUSAL_LM", base_model_name_or_path=base, inference_mode=True)
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
