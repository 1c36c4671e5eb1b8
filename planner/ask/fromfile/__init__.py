"""People's own training configurations, read as options of the planner: Accelerate, DeepSpeed, torchtitan, Axolotl,
LLaMA-Factory, Megatron-LM and its Bridge, NeMo Automodel, ms-swift, TRL and Trainer.

`read` finds out which it is and says what every key means; `merge.merged` joins that with the command line.
Not here: what the options do (planner/ask/options.py).
"""

from __future__ import annotations

import os
from pathlib import Path
from types import ModuleType
from typing import Any

from planner.ask.fromfile import (
    accelerate,
    automodel,
    axolotl,
    commandline,
    deepspeed,
    files,
    llamafactory,
    llamafactory_v1,
    megatron,
    megatron_bridge,
    swift,
    torchrun,
    torchtitan,
    trl,
)
from planner.ask.fromfile.classes import classes
from planner.ask.fromfile.sheet import Sheet, Understood
from planner.basics.errors import PlannerError

LAUNCHERS: tuple[ModuleType, ...] = (torchrun, accelerate, deepspeed)
"""Formats that say nothing of what is trained: one of the others may be beside them, whose word on OF_THE_SCRIPT is the
last (transformers 5.23.0, training_args.py, sets Accelerate's mixed precision)."""
FORMATS: tuple[ModuleType, ...] = (
    *LAUNCHERS, torchtitan, automodel, axolotl, llamafactory, llamafactory_v1, megatron, megatron_bridge,
    swift, trl,
)  # fmt: skip
"""Each has NAME, KEYS (its table of keys/), detect and read: a new format is one module of that shape in this list."""
OF_THE_SCRIPT = ("precision",)


def read(path: str | os.PathLike[str], *beside: str | os.PathLike[str]) -> Understood:
    """A configuration, of one file or several that are used together (a launcher's and a recipe): every key is in the
    lines, or among the ignored. Files that contradict each other, or two recipes, are refused (PlannerError)."""
    given = [one for name in (path, *beside) for one in _tables(name)]
    kinds = [format_of(name, data) for name, data in given]
    order = sorted(range(len(given)), key=lambda place: FORMATS.index(kinds[place]))
    scripts = [place for place in order if kinds[place] not in LAUNCHERS]
    if len(scripts) > 1:
        first, second = (given[place][0] for place in scripts[:2])
        raise PlannerError("from", second, f"says what is trained, and so does {first}", "Give one of the two")
    *others, main = order
    sheet = Sheet(kinds[main].NAME, given[main][0], given[main][1])
    for place in others:
        sheet.include(_alone(kinds[place], *given[place]), Path(given[place][0]).name, mine=OF_THE_SCRIPT)
    return _closed(kinds[main], sheet)


def _alone(kind: ModuleType, name: str, data: dict[str, Any]) -> Understood:
    return _closed(kind, Sheet(kind.NAME, name, data))


def _closed(kind: ModuleType, sheet: Sheet) -> Understood:
    kind.read(sheet)
    if sheet.says("offload_optimizer"):  # the step is the host's, in its own way
        sheet.merge("optimizer_implementation", "optimizer")
    return sheet.close(classes(kind.KEYS))


def _tables(name: str | os.PathLike[str]) -> list[tuple[str, dict[str, Any]]]:
    """What is given as tables, each with its name: of a file one, of a command line the launcher's and the script's."""
    if isinstance(name, str) and commandline.is_one(name):
        return commandline.tables(name)
    if Path(name).suffix.lower() == commandline.SUFFIX:
        return commandline.tables(commandline.of_script(name))
    return [(str(name), files.load(name))]


def format_of(name: str, data: dict[str, Any]) -> ModuleType:
    """The format of a table (PlannerError for none, or several)."""
    able = [one for one in FORMATS if one.detect(data)]
    known = ", ".join(one.NAME for one in FORMATS)
    if not able:
        raise PlannerError("from", name, "is not a configuration known here", f"Known: {known}")
    if len(able) > 1:
        names = " and ".join(one.NAME for one in able)
        raise PlannerError("from", name, f"has keys of {names}", "Give a file of one of them")
    return able[0]
