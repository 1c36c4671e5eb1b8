"""What the seconds of a step are a sum of: the pipeline's passes, and what is waited for beside them.

Values alone, of one layout or of columns: steptime.py makes them, and adds them up; timeline.py lays them on an axis.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planner.basics.arith import Number
from planner.figures.comm import Traffic
from planner.figures.passes import Passes
from planner.figures.work import Work
from planner.parallelism.case import Case
from planner.parallelism.offload import Transfer
from planner.parallelism.schedules import rank_of
from planner.spec import Layout

PHASES = ("forward", "backward", "optimizer")


class Wait(msgspec.Struct, frozen=True):
    """All calls of one kind in a step: their seconds, and those that no compute hides whatever else runs (`alone_s`, a
    sum). `share` is the share of the step's micro-batches that they take part in."""

    call: Traffic
    share: Number
    seconds: Number
    alone_s: tuple[Number, ...]


class PhaseWaits(msgspec.Struct, frozen=True):
    """One phase's collectives outside of passes. `waited_s` are the seconds that the phase is longer for them: what is
    waited for of each, and `together_s`, what of all that could hide beside compute has no room there; None where there
    is no compute beside."""

    calls: list[Wait]
    together_s: Number | None
    waited_s: Number


class TransferWait(msgspec.Struct, frozen=True):
    """Transfers of one phase over the host's link: their seconds, and those that no compute hides."""

    transfer: Transfer
    seconds: Number
    waited_s: Number


class Waits(msgspec.Struct, frozen=True):
    """What a step waits for beside its passes, by phase, and over the host's link: `moved_s` altogether."""

    phases: dict[str, PhaseWaits]
    moved: list[TransferWait]
    moved_s: Number


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

    @classmethod
    def of(cls, layout: Layout, forward_s: Sequence[float], backward_s: Sequence[float]) -> Slowest:
        """Of chunks in the model's order; the first of equals."""
        passes_s = [0.0] * layout.pp
        for chunk, (forward, backward) in enumerate(zip(forward_s, backward_s, strict=True)):
            passes_s[rank_of(layout.pp_schedule, layout.pp, chunk)] += layout.grad_accum * (forward + backward)
        stage = max(range(layout.pp), key=lambda rank: (round(passes_s[rank] / max(passes_s), 9), -rank))
        return cls(stage, passes_s[stage])


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
