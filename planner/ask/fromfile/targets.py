"""Modules that a file adapts, under the names that the model's linear modules have here.

peft takes names, or ends of dotted paths, of which some may be of other models, or one pattern over whole paths. Not
here: which modules a model has (planner/inventory/units.py), or any key.
"""

from __future__ import annotations

import re

import msgspec

from planner.ask.fromfile.sheet import OptionLine
from planner.inventory import lora_targets
from planner.spec import ModelSpec
from planner.spec.described import TOWER
from planner.spec.options import ALL_LINEAR

PATTERN = re.compile(r"[\w.\\^]*layers\\?\.\[\\d\]\+\\?\.(?:\(\w+\\?\.\)\?)?\(([\w|]+)\)\\?\.\(([\w|]+)\)(\w*)\$?")
"""The pattern that files have: each layer, which a wrapper of its own may hold, some of its blocks, and some names of
a common end."""
IN_MLP = ("gate_proj", "up_proj", "down_proj")


def is_pattern(value: str) -> bool:
    """Whether modules are named by a pattern over whole paths."""
    return any(mark in value for mark in "([\\")


def reach_towers(value: str, model: ModelSpec) -> bool:
    """Whether some of these names are those of matrices in a model's towers, too."""
    described = model.described
    if described is None or not described.towers or is_pattern(value):
        return False
    paths = [f".{one.name}" for one in described.units[TOWER].weights if len(one.shape) == 2]
    return value == ALL_LINEAR or any(path.endswith(f".{name}") for path in paths for name in _spelt_out(value))


def of_model(line: OptionLine, model: ModelSpec) -> OptionLine:
    """The modules that are there, as peft finds them (0.21, tuners/tuners_utils.py, check_target_module_exists). A list
    of which none is there stays as it is, and is refused where the model's options are read."""
    legal, named = lora_targets(model), _spelt_out(str(line.value))
    found = [name for name in dict.fromkeys(one.rpartition(".")[2] for one in named) if name in legal]
    if line.value == ALL_LINEAR or not found or line.value == ",".join(found):
        return line
    others = [one for one in named if one.rpartition(".")[2] not in legal]
    note = f"{model.name} has no {', '.join(others)}" if others else "as its modules are called"
    return msgspec.structs.replace(line, value=",".join(found), note="; ".join(filter(None, (line.note, note))))


def _spelt_out(value: str) -> tuple[str, ...]:
    """The names of a list, or those that a pattern of the usual shape stands for."""
    if (pattern := PATTERN.fullmatch(value)) is None:
        return tuple(name.strip() for name in value.split(","))
    blocks, heads, end = pattern[1].split("|"), pattern[2].split("|"), pattern[3]
    names = (f"{head}{end}" for head in heads)
    return tuple(name for name in names if ("mlp" if name in IN_MLP else "self_attn") in blocks)
