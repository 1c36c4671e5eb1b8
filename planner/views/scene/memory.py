"""Memory of the fullest rank as lanes of bytes: a lane for each phase's live tensors, and one for what the card shows.

Not here: any figure (figures/memory.py), or a bar (cells/memory.py, svg/lanes.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planner.decide.answers import Estimate
from planner.decide.estimate_json import BUFFERS
from planner.figures.memory import shown_by
from planner.spec.plan import PhaseMemory, Plan
from planner.views.scene import OVERHEAD, Lane, stacked

ON_CARD = "on the card"


class MemoryLanes(msgspec.Struct, frozen=True):
    """`phases` are live bytes by term, a lane a phase; `card` is the fullest phase with the overhead, `peak` its name.

    `capacity_bytes` is the card's memory, None where it is unknown; 90 % of measured runs lie from `low_bytes` to
    `high_bytes`, which a plan does not have.
    """

    phases: tuple[Lane, ...]
    card: Lane
    peak: str
    capacity_bytes: float | None
    low_bytes: float | None = None
    high_bytes: float | None = None

    @property
    def lanes(self) -> tuple[Lane, ...]:
        """All of them, the card's last."""
        return (*self.phases, self.card)

    @property
    def live_bytes(self) -> float:
        """Of the fullest phase."""
        return max(lane.end for lane in self.phases)


def memory_of(one: Estimate) -> MemoryLanes:
    """The memory of an estimate."""
    memory, card = one.memory, one.case.cluster.gpu
    return _memory(memory.phases, memory.device_bytes, card.memory_bytes, one.low_bytes, one.high_bytes)


def memory_of_plan(plan: Plan) -> MemoryLanes | None:
    """The memory that a plan predicts; None where it predicts none."""
    shown = shown_by(plan)
    if shown is None:
        return None
    return _memory(plan.prediction.memory, shown, plan.cluster.gpu.memory_bytes)


def _memory(
    phases: Sequence[PhaseMemory], device_bytes: float, capacity: float | None, *band: float
) -> MemoryLanes:  # fmt: skip
    lanes = tuple(
        stacked(one.phase, ((kind_of(term), size, f"bytes.{one.phase}.{term}") for term, size in one.terms.items()))
        for one in phases
    )
    fullest = max(lanes, key=lambda lane: lane.end)
    parts = [(one.kind, one.size, one.key) for one in fullest.rectangles]
    card = stacked(ON_CARD, [*parts, (OVERHEAD, device_bytes - fullest.end, "estimate.memory.breakdown.overhead")])
    return MemoryLanes(lanes, card, fullest.name, capacity, *band)


def kind_of(term: str) -> str:
    """The term as the bar names it, in which buffers are one."""
    return "buffers" if term in BUFFERS else term
