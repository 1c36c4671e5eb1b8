"""The engine that has the group sizes of a file: a framework's data-parallel engine splits nothing else, another of the
same framework does.

Not here: which keys hold the sizes (a module a format), or what an engine splits and which engines are beside it
(planner/spec/engines.py).
"""

from __future__ import annotations

from planner.ask.fromfile.sheet import Sheet
from planner.spec.engines import ENGINES

AXES = ("tp", "cp", "pp", "ep")


def settle(sheet: Sheet) -> None:
    """Where group sizes were read: the engine that has them, where the framework has one; sizes say the strategy."""
    wanted = {axis for axis in AXES if (sheet.says(axis) or 1) > 1}
    if not wanted:
        return
    for name in sheet.says("engine") or ():
        for other in ENGINES[name].beside:
            methods = (None, *ENGINES[other].cp_methods) if "cp" in wanted else (sheet.says("cp_method"),)
            if wanted <= set(ENGINES[other].splits) and sheet.says("cp_method") in methods:
                sheet.means("engine", (other,), note=f"{name} beside {' and '.join(sorted(wanted))}")
                sheet.merge("strategy", "engine")
                return
