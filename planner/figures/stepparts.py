"""What the seconds of a step are a sum of: the pipeline's passes, and what is waited for beside them.

Values alone, of one layout or of columns: steptime.py makes them, and adds them up; timeline.py lays them on an axis.
"""

from __future__ import annotations

import msgspec

from planner.basics.arith import Number
from planner.figures.comm import Traffic
from planner.figures.passes import Passes
from planner.figures.work import Work
from planner.parallelism.case import Case
from planner.parallelism.offload import Transfer

PHASES = ("forward", "backward", "optimizer")


class Wait(msgspec.Struct, frozen=True):
    """All calls of one kind in a step: their seconds, and those that no compute hides whatever else runs (`alone_s`,
    to be added in this order). `share` is the share of the step's micro-batches that they take part in."""

    call: Traffic
    share: Number
    seconds: Number
    alone_s: tuple[Number, ...]


class PhaseWaits(msgspec.Struct, frozen=True):
    """One phase's collectives outside of passes. `together_s` is waited for where all of them would hide beside
    compute and have no room there; None where there is no compute that they could hide beside."""

    calls: tuple[Wait, ...]
    together_s: Number | None

    @property
    def waited_s(self) -> Number:
        """Seconds that the phase is longer for them."""
        waited: Number = 0.0
        for one in self.calls:
            for alone_s in one.alone_s:
                waited = waited + alone_s
        return waited if self.together_s is None else waited + self.together_s


class Moved(msgspec.Struct, frozen=True):
    """Transfers of one phase over the host's link: their seconds, and those that no compute hides."""

    transfer: Transfer
    seconds: Number
    waited_s: Number


class Waits(msgspec.Struct, frozen=True):
    """What a step waits for beside its passes, by phase, and over the host's link."""

    phases: dict[str, PhaseWaits]
    moved: tuple[Moved, ...]

    @property
    def moved_s(self) -> Number:
        """Seconds that the step is longer for what crosses the host's link."""
        waited: Number = 0.0
        for one in self.moved:
            waited = waited + one.waited_s
        return waited


class Chunks(msgspec.Struct, frozen=True):
    """Seconds of one micro-batch on every chunk of layers in the model's order, and of one send, as the schedule was
    played."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    send_s: float


class Slowest(msgspec.Struct, frozen=True):
    """The pipeline rank whose passes take longest, and their seconds in a step."""

    stage: int
    passes_s: float


class StepParts(msgspec.Struct, frozen=True):
    """What one step time was added up from. `units` are a unit's passes with what they wait for inside, `busy` without.

    `first` is the first stage, whose `waits` and `optimizer_s` the step time counts; `chunks` is None without a
    pipeline, and in columns.
    """

    first: Case
    work: dict[str, Work]
    units: dict[str, Passes]
    busy: dict[str, Passes]
    pipeline_s: Number
    chunks: Chunks | None
    waits: Waits
    optimizer_s: Number
