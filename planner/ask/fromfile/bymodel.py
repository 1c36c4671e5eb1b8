"""Keys that mean something by the model: adapted modules, parts that some models have, and what no description of an
imported model has, of which the file's figure is a bound.

Not here: what any key sets (a module a format), or the rules that refuse an option (planner/parallelism).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from planner.ask.fromfile import axolotl, axolotl_model, targets
from planner.ask.fromfile.functions import FUSED_ADAPTERS, of_functions
from planner.ask.fromfile.sheet import Ignored, Memory, OptionLine
from planner.inventory import default_lora, lora_targets, savable_modules
from planner.inventory.compute import LIGER_FAMILIES
from planner.inventory.standins import has_liger
from planner.spec import ModelSpec
from planner.spec.described import Described, changes_logits, numbers_of
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

Account = tuple[list[OptionLine], tuple[Ignored, ...]]


def asks(lines: Sequence[OptionLine], ignored: Sequence[Ignored]) -> bool:
    """Whether the account has a key that means something by the model."""
    return any(line.option in OPTIONS for line in lines) or any(_means(one) for one in ignored)


def _means(one: Ignored) -> bool:
    known = (ROUNDED, *FUSED_ADAPTERS)
    return one.by in SEEN or one.key in known or axolotl_model.means(one)


def meant(lines: list[OptionLine], ignored: tuple[Ignored, ...], model: ModelSpec, kind: str) -> Account:
    """The account of a file of this kind as this model has it."""
    if model.described is not None:
        lines = [_at_length(line, model, model.described) if line.option == "seq_len" else line for line in lines]
    lines = [_targets(line, model, kind) if line.option == "lora_targets" else line for line in lines]
    lines = _saved(lines, model)
    if kind == axolotl.NAME:
        lines, ignored = axolotl_model.of_model(lines, ignored, model)
    on = [one.key for one in ignored if one.key in FUSED_ADAPTERS and one.memory == "less"]
    adapted = adapted_modules(lines, model)
    kept = [of_functions(one, on, model, adapted) if one.key in on else _of_part(one, model) for one in ignored]
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
    if kind not in WITH_TOWERS or not line.keys or not targets.reach_towers(str(line.value), model):
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


def adapted_modules(lines: Sequence[OptionLine], model: ModelSpec) -> tuple[str, ...]:
    """The modules that carry adapters where the method is one of them."""
    said = next((line.value for line in lines if line.option == "lora_targets"), None)
    if said is None:
        return default_lora(model).targets
    return lora_targets(model) if said == ALL_LINEAR else tuple(str(said).split(","))


def _of_part(one: Ignored, model: ModelSpec) -> Ignored:
    """A key of a part that this model has not, or that changes nothing of its sizes."""
    towers = model.described is not None and model.described.towers
    if one.by in SEEN and not towers:
        return Ignored(one.key, one.value, f"{model.name} reads text alone", "none")
    if one.key == ROUNDED and one.memory == "more" and model.vocab % 32 == 0:
        return Ignored(one.key, one.value, f"{model.name} has {model.vocab:,} rows, a multiple of 32", "none")
    return one


def _unmodelled(line: OptionLine, lines: Sequence[OptionLine], model: ModelSpec) -> tuple[str, Memory] | None:
    """Why this model is planned without an option, and what that does to memory; None where it is planned with it."""
    if line.option == "liger" and not _takes_liger(line, lines, model):
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
    if line.option == "loss" and line.value != "whole" and changes_logits(model.described, line.value):
        return f"not modelled: {model.name} changes its logits before the loss; all are estimated", "less"
    return None


def _takes_liger(line: OptionLine, lines: Sequence[OptionLine], model: ModelSpec) -> bool:
    """Whether what Liger-Kernel replaces in a model is known, of an imported one in the number format of the file."""
    if model.described is None:
        return model.family in LIGER_FAMILIES
    told = {line.option: line.value for line in lines}
    adapters, autocast = told.get("method", "full") != "full", not told.get("zero_stage")
    numbers = numbers_of(told.get("precision", ""), autocast=autocast, adapters=adapters)
    return has_liger(model, str(line.value).split(","), numbers)


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
