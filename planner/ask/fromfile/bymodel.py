"""Keys that mean something by the model: adapted modules, parts that some models have, and what no description of an
imported model has, of which the file's figure is a bound.

Not here: what any key sets (a module a format), or the rules that refuse an option (planner/parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from planner.ask.fromfile import targets
from planner.ask.fromfile.sheet import Ignored, Memory, OptionLine, Understood
from planner.inventory import default_lora, lora_targets, savable_modules
from planner.inventory.compute import LIGER_FAMILIES
from planner.spec import ModelSpec, presets
from planner.spec.described import Described, changes_logits
from planner.spec.options import ALL_LINEAR

OPTIONS = ("lora_targets", "modules_to_save", "attention", "liger", "packing", "loss", "compile", "seq_len")
"""Options that mean something by the model."""

FUSED = ("sdpa", "flash2", "flash3", "flash4", "flex")
"""Codes of attention that keep the result and a number a row."""
NO_MASK = ("flash2", "flash3", "flash4", "flex")
"""Those that keep packed documents apart without a mask of all pairs."""

WITH_TOWERS = ("Axolotl", "TRL")
"""Formats whose names of adapted modules mean a tower's too: peft takes every module whose path ends so, where
LLaMA-Factory and ms-swift leave towers out (freeze_vision_tower, freeze_vit)."""

SEEN = (("image_tokens",), ("towers",))
"""The options that answer for what is beside the text."""

ROUNDED = "resize_token_embeddings_to_32x"
"""Axolotl's key of a table with a multiple of 32 rows (067b021, loaders/model.py, _resize_token_embeddings)."""

AXOLOTL = "axolotl"
"""The version of a runtime that has its functions of adapters."""
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_LINEAR = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj")
FUSED_ADAPTERS = {
    "lora_mlp_kernel": ((_MLP, _MLP),),
    "lora_qkv_kernel": ((_ATTENTION, _ATTENTION[:3]), *((_LINEAR, (name,)) for name in _LINEAR[:4])),
    "lora_o_kernel": ((_ATTENTION, _ATTENTION[3:]), (_LINEAR, _LINEAR[4:])),
}
"""Axolotl's keys of adapters' functions: the modules that a layer must have, and those that must be adapted (067b021,
monkeypatch/lora_kernels.py, apply_lora_kernel_patches)."""

Account = tuple[list[OptionLine], tuple[Ignored, ...]]


def asks(lines: Sequence[OptionLine], ignored: Sequence[Ignored]) -> bool:
    """Whether the account has a key that means something by the model."""
    return any(line.option in OPTIONS for line in lines) or any(_means(one) for one in ignored)


def _means(one: Ignored) -> bool:
    return bool(one.norm) or one.by in SEEN or one.key == ROUNDED or one.key in FUSED_ADAPTERS


def meant(lines: list[OptionLine], ignored: tuple[Ignored, ...], model: ModelSpec, kind: str) -> Account:
    """The account of a file of this kind as this model has it."""
    if model.described is not None:
        lines = [_at_length(line, model, model.described) if line.option == "seq_len" else line for line in lines]
    lines = [_targets(line, model, kind) if line.option == "lora_targets" else line for line in lines]
    lines = _saved(lines, model)
    adapted = _adapted(lines, model)
    kept = [_of_part(one, model, adapted) for one in ignored]
    found = []
    for line in lines:
        if (less := _unmodelled(line, lines, model)) is None:
            found.append(line)
        else:
            why, memory = less
            value = line.value if line.option == "attention" else True
            kept += [Ignored(key, value, why, "not modelled", memory) for key in line.keys]
    return found, tuple(kept)


def _targets(line: OptionLine, model: ModelSpec, kind: str) -> OptionLine:
    found = targets.of_model(line, model)
    towers = model.described is not None and model.described.towers
    if not towers or kind not in WITH_TOWERS or not line.keys or targets.is_pattern(str(line.value)):
        return found
    note = "not modelled: modules of its tower are adapted too"
    return msgspec.structs.replace(found, note="; ".join(filter(None, (found.note, note))), memory="more")


def _saved(lines: list[OptionLine], model: ModelSpec) -> list[OptionLine]:
    """Modules that are trained whole, by their paths, of which peft takes any end (0.21, tuners/tuners_utils.py). Where
    one table is both of them peft trains two copies, as if it were two (utils/other.py, ModulesToSaveWrapper)."""
    saved = next((line for line in lines if line.option == "modules_to_save"), None)
    if saved is None:
        return lines
    apart = msgspec.structs.replace(model, tied=False) if model.tied and model.described is None else model
    names = [name.strip() for name in str(saved.value).split(",")]
    paths = [next((path for path in savable_modules(apart) if _ends(path, name)), name) for name in names]
    if apart is model:
        return [msgspec.structs.replace(line, value=",".join(paths)) if line is saved else line for line in lines]
    if set(paths) != set(savable_modules(apart)) or not any(line.option == "model" for line in lines):
        return lines
    note = "not modelled: under both copies there is one frozen table; two are counted"
    changed: dict[str, dict[str, Any]] = {
        "modules_to_save": {"value": ",".join(paths), "note": note, "memory": "less"},
        "model": {"value": apart},
    }
    return [msgspec.structs.replace(line, **changed.get(line.option, {})) for line in lines]


def _ends(path: str, name: str) -> bool:
    return path == name or path.endswith(f".{name}")


def _adapted(lines: Sequence[OptionLine], model: ModelSpec) -> tuple[str, ...]:
    """The modules that carry adapters where the method is one of them."""
    said = next((line.value for line in lines if line.option == "lora_targets"), None)
    if said is None:
        return default_lora(model).targets
    return lora_targets(model) if said == ALL_LINEAR else tuple(str(said).split(","))


def _of_part(one: Ignored, model: ModelSpec, adapted: Sequence[str]) -> Ignored:
    """A key of a part that this model has not, or that changes nothing of its sizes."""
    if one.key in FUSED_ADAPTERS and one.memory == "less" and not _takes(one.key, model, adapted):
        return Ignored(one.key, one.value, f"{model.name} has no such modules with adapters", "none")
    towers = model.described is not None and model.described.towers
    if one.by in SEEN and not towers:
        return Ignored(one.key, one.value, f"{model.name} reads text alone", "none")
    if one.norm and model.described is None and one.norm != model.norm:
        return Ignored(one.key, one.value, f"{model.name} has no such part", "none")
    if one.key == ROUNDED and one.memory == "more" and model.vocab % 32 == 0:
        return Ignored(one.key, one.value, f"{model.name} has {model.vocab:,} rows, a multiple of 32", "none")
    return one


def _takes(key: str, model: ModelSpec, adapted: Sequence[str]) -> bool:
    """Whether a function of adapters finds its modules in a model, with adapters on all of them."""
    there, on = set(lora_targets(model)), set(adapted)
    return any(there.issuperset(has) and on.issuperset(taken) for has, taken in FUSED_ADAPTERS[key])


def with_functions(found: Understood, model: ModelSpec) -> Understood:
    """The version of the runtime that has Axolotl's functions of adapters, where all that find their modules are on and
    the model is one of the families that are written out."""
    lines, on = list(found.lines), [one for one in found.ignored if one.key in FUSED_ADAPTERS and one.memory == "less"]
    adapted = _adapted(lines, model)
    off = {key for key in FUSED_ADAPTERS if _takes(key, model, adapted)} - {one.key for one in on}
    place = next((place for place, line in enumerate(lines) if line.option == "runtime"), None)
    if place is None or off or not on or model.described is not None or found.options.get("dora"):
        return found
    name = f"{lines[place].value}@{AXOLOTL}"
    if name not in presets.runtime_names():
        return found
    keys = (*lines[place].keys, *(one.key for one in on))
    lines[place] = msgspec.structs.replace(lines[place], keys=keys, value=name)
    ignored = tuple(one for one in found.ignored if one not in on)
    return msgspec.structs.replace(found, lines=tuple(lines), ignored=ignored)


def _unmodelled(line: OptionLine, lines: Sequence[OptionLine], model: ModelSpec) -> tuple[str, Memory] | None:
    """Why this model is planned without an option, and what that does to memory; None where it is planned with it."""
    if line.option == "liger" and (model.described is not None or model.family not in LIGER_FAMILIES):
        return "not modelled: fused kernels keep less", "less"
    if model.described is None:
        return None
    if line.option == "attention":
        return _attention(line, model)
    if line.option == "compile":
        return "not modelled: compiled code fuses operations, and keeps less", "less"
    if line.option == "packing" and line.value == "packed":
        masks: Memory = "same" if any(one.option == "attention" and one.value in NO_MASK for one in lines) else "more"
        return "not modelled: attention of a full row, not of each document", masks
    if line.option == "loss" and line.value != "whole" and changes_logits(model.described):
        return f"not modelled: {model.name} changes its logits before the loss; all are estimated", "less"
    return None


def _attention(line: OptionLine, model: ModelSpec) -> tuple[str, Memory] | None:
    if line.value in FUSED:
        return f"{model.name} is planned with the attention that Transformers chooses, which keeps as much", "same"
    return ("not modelled: attention scores kept in memory", "more") if line.value == "eager" else None


def _at_length(line: OptionLine, model: ModelSpec, described: Described) -> OptionLine:
    """The next length that an imported model is described at, where the file's own is none."""
    step = described.multiple_of
    length = -(-max(line.value, described.shortest) // step) * step
    if length == line.value or (described.longest and length > described.longest):
        return line
    note = f"not modelled: {model.name} is described at multiples of {step}, of which {length} is the next"
    return msgspec.structs.replace(line, value=length, note="; ".join(filter(None, (line.note, note))), memory="less")
