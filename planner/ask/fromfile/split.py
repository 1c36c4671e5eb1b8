"""The engine that has the group sizes of a file: a framework's data-parallel engine splits nothing else, another of the
same framework does.

Not here: which keys hold the sizes (a module a format), or what an engine splits (planner/spec/engines.py).
"""

from __future__ import annotations

from planner.ask.fromfile.sheet import Sheet
from planner.spec.engines import ENGINES

BESIDE = {
    "fsdp2": ("transformers-tp",),
    "deepspeed": ("deepspeed-autotp", "deepspeed-ulysses"),
}
"""Engines of the same framework that split more than data: Accelerate's FSDP2 beside Transformers' plans of tensors and
experts, DeepSpeed's AutoTP and its Ulysses."""

AXES = ("tp", "cp", "pp", "ep")


def settle(sheet: Sheet) -> None:
    """Where group sizes were read: the engine that has them, where the framework has one; sizes say the strategy."""
    wanted = {axis for axis in AXES if (sheet.says(axis) or 1) > 1}
    if not wanted:
        return
    for name in sheet.says("engine") or ():
        for other in BESIDE.get(name, ()):
            methods = (None, *ENGINES[other].cp_methods) if "cp" in wanted else (sheet.says("cp_method"),)
            if wanted <= set(ENGINES[other].splits) and sheet.says("cp_method") in methods:
                sheet.means("engine", (other,), note=f"{name} beside {' and '.join(sorted(wanted))}")
                sheet.merge("strategy", "engine")
                return
