"""The nearest legal sizes of a layout, and how values are printed.

Not here: which sizes are legal (rules.py, technique_rules.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isqrt
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.parallelism.case import Case


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    small = [candidate for candidate in range(1, isqrt(number) + 1) if number % candidate == 0]
    return sorted({*small, *(number // candidate for candidate in small)})


def nearest(value: int, legal: list[int]) -> int:
    """The legal value closest to the given one."""
    return min(legal, key=lambda candidate: (abs(candidate - value), candidate))


def one_of(values: Sequence[object]) -> str:
    """Legal values as people read them."""
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last


def groups_text(case: Case) -> str:
    """The product of the groups: the data-parallel ones, and by name what else is split."""
    layout = case.layout
    split = [f"{axis} {getattr(layout, axis)}" for axis in ("pp", "cp", "tp") if getattr(layout, axis) != 1]
    return " x ".join([f"{layout.dp_replicate} x {layout.dp_shard}", *split])


def groups_fix(case: Case) -> str:
    """The nearest group sizes that multiply to the GPUs."""
    layout, gpus = case.layout, case.cluster.gpus
    others = layout.pp * layout.cp * layout.tp
    if gpus % (others * layout.dp_replicate) == 0:
        return f"With dp_replicate={layout.dp_replicate} use dp_shard={gpus // (others * layout.dp_replicate)}"
    if gpus % others == 0:
        return f"dp_replicate must be one of {', '.join(map(str, divisors(gpus // others)))}"
    named = " x ".join(axis for axis in ("pp", "cp", "tp") if getattr(layout, axis) != 1)
    return f"{named} must be one of {', '.join(map(str, divisors(gpus)))}, nearest {nearest(others, divisors(gpus))}"


def batch_fix(case: Case) -> str:
    """The nearest batch that the data-parallel ranks divide."""
    step = int(case.layout.data_parallel)
    batch = case.job.global_batch_size or 0
    if batch % step == 0:
        return f"micro_batch_size x grad_accum must be {batch // step}"
    return f"Use global_batch_size={max(step, round(batch / step) * step)} (a multiple of {step})"
