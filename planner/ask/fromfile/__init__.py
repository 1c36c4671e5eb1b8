"""People's own training configurations, read as options of the planner: Accelerate, DeepSpeed, torchtitan, Axolotl,
LLaMA-Factory.

`read` finds out which it is and says what every key means; `merge.merged` joins that with the command line.
Not here: what the options do (planner/ask/options.py).
"""

from __future__ import annotations

import os
from types import ModuleType

from planner.ask.fromfile import accelerate, axolotl, deepspeed, files, llamafactory, torchtitan
from planner.ask.fromfile.classes import classes
from planner.ask.fromfile.sheet import Sheet, Understood
from planner.basics.errors import PlannerError

FORMATS: tuple[ModuleType, ...] = (accelerate, deepspeed, torchtitan, axolotl, llamafactory)
"""Each has NAME, KEYS (its table of keys/), detect and read: a new format is one module of that shape in this list."""


def read(path: str | os.PathLike[str]) -> Understood:
    """A configuration file: every key of it is in the lines, or among the ignored."""
    data = files.load(path)
    able = [one for one in FORMATS if one.detect(data)]
    known = ", ".join(one.NAME for one in FORMATS)
    if not able:
        raise PlannerError("from", path, "is not a configuration known here", f"Known: {known}")
    if len(able) > 1:
        names = " and ".join(one.NAME for one in able)
        raise PlannerError("from", path, f"has keys of {names}", "Give a file of one of them")
    sheet = Sheet(able[0].NAME, str(path), data)
    able[0].read(sheet)
    if sheet.says("offload_optimizer"):  # the step is the host's, in its own way
        sheet.merge("optimizer_implementation", "optimizer")
    return sheet.close(classes(able[0].KEYS))
