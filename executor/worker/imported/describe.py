"""A model's description, of its own code run on fake tensors: which layers there are, a small model of the same code,
and what is recorded of it.

Not here: one recording (record.py), or the programs of units (programs.py).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby, takewhile
from typing import Any

import torch
from torch import nn

from executor.worker.imported.lengths import RecordedLengths, lengths_of, recordings
from executor.worker.imported.record import NotDescribed, fake_device, is_linear, layers_of
from executor.worker.model.layers import of_layers, without_padding
from planner.spec.described import (
    DEVICES_RECORDED,
    Attend,
    Described,
    DescribedUnit,
    DescribedWeight,
    OtherProduct,
    Program,
)

VARIANTS: dict[str, tuple[torch.dtype, bool]] = {
    "mixed": (torch.float32, True),
    "pure": (torch.bfloat16, False),
    "fp32": (torch.float32, False),
    "adapted": (torch.bfloat16, True),
}
"""Format of the weights, and whether autocast is at work."""
DEVICES = DEVICES_RECORDED
LEFT_OUT = ("auto_map", "attn_implementation", "_attn_implementation", "experts_implementation", "_name_or_path")
"""Keys of a config.json that name code, or where to fetch it."""
MOST_LAYERS = 2000
SHORT = 2
"""Layers of the last kind in the small model, after all of the first kind: one, and one after it."""


def config_of(raw: dict[str, Any]) -> Any:
    """Transformers' configuration of a decoded config.json. What would choose code, or fetch it, is left out."""
    from transformers import AutoConfig

    kind = raw.get("model_type")
    try:
        return AutoConfig.for_model(**{key: value for key, value in raw.items() if key not in LEFT_OUT})
    except Exception as error:
        raise NotDescribed(f"Transformers cannot read its configuration ({kind}): {first_line(error)}") from None


def describe(raw: dict[str, Any], devices: Sequence[str] = DEVICES) -> Described:
    """The description of a config.json's causal language model."""
    import transformers

    if raw.get("quantization_config") is not None:
        raise NotDescribed("its weights are quantized, and those of the model before it was are needed")
    config = config_of(raw)
    count = getattr(config.get_text_config(), "num_hidden_layers", None)
    if not isinstance(count, int) or not 0 < count <= MOST_LAYERS:
        raise NotDescribed(f"num_hidden_layers is {count}, and must be 1 to {MOST_LAYERS}")
    with torch.device("meta"):
        whole = built(config, torch.bfloat16)
    path, layers = layers_of(whole)
    kinds = kinds_of(layers)
    few = of_layers(config_of(raw), kinds[0] + SHORT if len(kinds) > 1 else min(SHORT + 1, kinds[0]))
    places = {"layer": (kinds[0] if len(kinds) > 1 else min(1, kinds[0] - 1))}
    if len(kinds) > 1:
        places["dense"] = min(1, kinds[0] - 1)
    programs: dict[str, dict[str, Program]] = {unit: {} for unit in ("embed", "tail", *places)}
    names = names_of(whole, path, places)
    weights = {unit: weights_of(whole, names[unit]) for unit in programs}
    if is_tied(whole):
        weights["embed"] = ()
    found: dict[str, tuple[tuple[Attend, ...], tuple[OtherProduct, ...]]] = {}
    lengths: RecordedLengths | None = None
    for device in devices:
        for variant, (dtype, autocast) in VARIANTS.items():
            with fake_device(cuda=device == "cuda"):
                model = built(few, dtype)
                lengths = lengths or lengths_of(model)
                runs = recordings(model, lengths, autocast=autocast)
            for unit in programs:
                key = (unit if unit in ("embed", "tail") else "layer", places.get(unit, 0))
                made, programs[unit][f"{variant}-{device}"] = runs.program(key, names[unit])
                experts = any(one.use == "expert" for one in weights[unit])
                found.setdefault(unit, made.products(experts=experts))
    units = {
        unit: DescribedUnit(
            weights=weights[unit],
            programs=programs[unit],
            attention=found[unit][0],
            products=found[unit][1],
        )
        for unit in programs
    }
    return Described(
        config=raw,
        transformers=transformers.__version__,
        units=units,
        layer_class=type(layers[0]).__name__,
        dense_layers=kinds[0] if len(kinds) > 1 else 0,
        multiple_of=1 if lengths is None else lengths.multiple,
        shortest=1 if lengths is None else lengths.shortest,
    )


def built(config: Any, dtype: torch.dtype) -> Any:
    """The causal language model of a configuration, whose weights nothing fills."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    without_padding(config)
    try:
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
    except Exception as error:
        raise NotDescribed(f"Transformers cannot build it: {first_line(error)}") from None
    model.tie_weights()
    model.config.use_cache = False
    return model.train()


def kinds_of(layers: nn.ModuleList) -> list[int]:
    """How many layers of each kind stand one after the other, by their modules' classes and their weights' shapes."""
    runs = [(key, len(list(group))) for key, group in groupby(map(_signature, layers))]
    if len(runs) > 2 or (len(runs) == 2 and runs[1][1] < SHORT):
        raise NotDescribed(
            f"its layers are of {len({key for key, _ in runs})} kinds by turns, which is not described yet"
        )
    return [count for _, count in runs]


def _signature(layer: nn.Module) -> tuple[Any, ...]:
    modules = tuple(type(module).__name__ for module in layer.modules())
    return modules, tuple((name, tuple(weight.shape)) for name, weight in layer.named_parameters())


def names_of(model: Any, path: str, places: dict[str, int]) -> dict[str, dict[str, str]]:
    """By unit, the names of its weights in the small model and in the unit."""
    tied = is_tied(model)
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    order = [name for name, _ in model.named_parameters()]
    before = set(takewhile(lambda name: not name.startswith(f"{path}."), order))
    found: dict[str, dict[str, str]] = {unit: {} for unit in ("embed", "tail", *places)}
    for name in order:
        own = name.removesuffix(".weight").removeprefix(prefix)
        if not name.startswith(f"{path}."):
            found["embed" if name in before and not tied else "tail"][name] = own
    for unit, index in places.items():
        start = f"{path}.{index}."
        for name, _ in layers_of(model)[1][index].named_parameters():
            found[unit][start + name] = name.removesuffix(".weight")
    if tied:
        names = {id(module): name for name, module in model.named_modules()}
        table = names[id(model.get_input_embeddings())]
        found["tail"][f"{names[id(model.get_output_embeddings())]}.weight"] = found["tail"][f"{table}.weight"]
        found["embed"] = dict(found["tail"])
    return found


def is_tied(model: Any) -> bool:
    """Whether the head's weight is the token table."""
    head = model.get_output_embeddings()
    return head is not None and head.weight is model.get_input_embeddings().weight


def weights_of(model: Any, names: dict[str, str]) -> tuple[DescribedWeight, ...]:
    """The weights of a unit with their shapes and uses."""
    modules = dict(model.named_modules())
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    plan = getattr(model, "_tp_plan", None) or {}
    found = []
    for name, own in names.items():
        if name not in shapes:
            continue  # another name of the tied table
        module, _, _ = name.rpartition(".")
        use = "other"
        if is_linear(modules[module]) or modules[module] is model.get_input_embeddings():
            use = "linear"
        elif _is_experts(modules[module], shapes[name]):
            use = "expert"
        found.append(
            DescribedWeight(
                name=own,
                shape=shapes[name],
                use=use,
                split=_split(plan, name),
                transposed=type(modules[module]).__name__ == "Conv1D",
            )
        )
    return tuple(found)


def _is_experts(module: nn.Module, shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and hasattr(module, "num_experts") and shape[0] == module.num_experts


def _split(plan: dict[str, str], name: str) -> int | None:
    pattern = re.sub(r"\.\d+\.", ".*.", name.removesuffix(".weight"))
    style = plan.get(pattern) or plan.get(name)
    return {"colwise": 0, "rowwise": 1, "colwise_gather_output": 0}.get(style or "")


def first_line(error: BaseException) -> str:
    """What an exception of a stranger's code says, in a few words."""
    first = (str(error).splitlines() or [""])[0].partition(". ")[0]
    return f"{type(error).__name__}: {first[:160]}"
