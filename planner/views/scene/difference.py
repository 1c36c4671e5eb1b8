"""Several layouts side by side as lanes on one scale: bytes on the card by term, and the parts of a step.

Not here: which inputs differ (studies/compare.py), or a bar (cells/, svg/).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planner.decide.answers import Estimate
from planner.spec.plan import Plan
from planner.views.scene import Lane, stacked
from planner.views.scene.memory import memory_of, memory_of_plan

PARTS = {"compute_s": "compute", "exposed_comm_s": "waiting for communication", "bubble_s": "idle in the pipeline",
         "optimizer_s": "optimizer"}  # fmt: skip
"""Of a step, by their fields (figures/steptime.py)."""
STEP = "step"


class Difference(msgspec.Struct, frozen=True):
    """`memory` in bytes and `time` in seconds, a lane for each layout that has the figure, in their order.

    `capacity_bytes` is the card's memory where all have the same.
    """

    memory: tuple[Lane, ...]
    time: tuple[Lane, ...]
    capacity_bytes: float | None


def difference_of(sides: Sequence[tuple[str, Estimate | Plan]]) -> Difference:
    """The layouts, each under its name. A step of a plan is one rectangle: a plan keeps no parts of it."""
    memory, time = [], []
    for name, side in sides:
        found = memory_of(side) if isinstance(side, Estimate) else memory_of_plan(side)
        if found is not None:
            memory.append(msgspec.structs.replace(found.card, name=name))
        lane = step_lane(name, side)
        if lane.rectangles:
            time.append(lane)
    cards = {(side.case if isinstance(side, Estimate) else side).cluster.gpu.memory_bytes for _, side in sides}
    return Difference(tuple(memory), tuple(time), cards.pop() if len(cards) == 1 else None)


def step_lane(name: str, side: Estimate | Plan) -> Lane:
    """A step as its parts; empty where no time is predicted."""
    if isinstance(side, Plan):
        return stacked(name, [(STEP, side.prediction.step_s or 0.0, "estimate.time.step_s")])
    if side.time.step_s is None:
        return Lane(name, ())
    parts = ((word, float(getattr(side.time, field) or 0.0), f"estimate.time.{field}") for field, word in PARTS.items())
    return stacked(name, parts)
