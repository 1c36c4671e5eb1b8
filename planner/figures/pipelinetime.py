"""Seconds from a step's first forward to its last backward: a pipeline's schedule played out, or a bound for columns.

Not here: the schedules (planner/parallelism/pipeline.py, makespan.py), or what the step waits for beside passes
(steptime.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from planner.basics.arith import Number, is_column
from planner.engines.base import Call
from planner.figures.beside import element_bytes_of
from planner.figures.comm import Traffic, collective_seconds, traffic
from planner.figures.passes import Passes, on_stage
from planner.figures.work import Work
from planner.parallelism.case import Case
from planner.parallelism.makespan import lower_bound_s, makespan_s
from planner.parallelism.offload import Transfer
from planner.parallelism.pipeline import boundary_bytes, rank_of
from planner.spec import Layout
from planner.spec.calibration import Coefficients

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


# -- Parts of a step ---------------------------------------------------------------------------------------------------

Played = tuple[Number, Slowest | None, Chunks | None]
"""Seconds of all passes, and of a schedule that was played out its slowest stage and its chunks."""


def pipeline_seconds(case: Case, units: dict[str, Passes], known: Coefficients, *, least: bool = False) -> Played:
    """From the first forward to the last backward: all passes one after the other without a pipeline, the schedule
    played out for one layout of stages (with its slowest, and what was played), and a bound below it for columns, or
    where the `least` is asked for."""
    layout = case.layout
    if not case.pipelined:
        passes = on_stage(case, units)
        return layout.grad_accum * (passes.forward_s + passes.backward_s), None, None
    p2p_s = seconds_sent(case, known, sends(case))
    if least or is_column(layout.pp, layout.grad_accum, layout.micro_batch_size, layout.tp, layout.cp, layout.dp_shard):
        return _pipeline_bound_s(case, units, p2p_s), None, None
    forward, backward = ([float(one) for one in passes_s] for passes_s in chunk_seconds(case, units))
    return play(layout, forward, backward, p2p_s)


def play(layout: Layout, forward: list[float], backward: list[float], p2p_s: Number) -> Played:
    """The schedule of one layout played out, by the seconds of each chunk's passes and of one send."""
    played_s = makespan_s(
        layout.pp_schedule, forward, backward, int(layout.grad_accum), layout.virtual_stages, float(p2p_s)
    )
    chunks = Chunks(tuple(forward), tuple(backward), float(p2p_s))
    return played_s, Slowest.of(layout, forward, backward), chunks


def chunk_seconds(case: Case, units: dict[str, Passes]) -> tuple[list[Number], list[Number]]:
    """Forward and backward seconds of every chunk of layers, in the model's order; equal chunks share theirs."""
    passes: dict[Any, Passes] = {}
    kinds = []
    for chunk in case.chunks():
        kinds.append((chunk.first, chunk.last, chunk.layers))
        if kinds[-1] not in passes:
            passes[kinds[-1]] = on_stage(case.at(chunk), units)
    return [passes[kind].forward_s for kind in kinds], [passes[kind].backward_s for kind in kinds]


def _pipeline_bound_s(case: Case, units: dict[str, Passes], p2p_s: Number) -> Number:
    """Seconds that no layout of the columns is through its schedule in: a closed form for each number of stages."""
    layout = case.layout
    stages: Any = layout.pp
    if not is_column(stages):
        chunks = chunk_seconds(case, units)
        return lower_bound_s(layout.pp_schedule, *chunks, layout.grad_accum, layout.virtual_stages, p2p_s)
    import numpy as np  # columns only

    bound_s = np.empty(len(stages))
    for count in np.unique(stages):
        rows = stages == count

        def of_these(figure: Any, rows: Any = rows) -> Any:
            return figure[rows] if is_column(figure) else figure

        some = {unit: Passes(*map(of_these, passes)) for unit, passes in units.items()}
        alike = msgspec.structs.replace(case, layout=msgspec.structs.replace(layout, pp=int(count)))
        chunks = chunk_seconds(alike, some)
        bound_s[rows] = lower_bound_s(
            layout.pp_schedule, *chunks, of_these(layout.grad_accum), layout.virtual_stages, of_these(p2p_s)
        )
    return bound_s


def sends(case: Case) -> list[Call]:
    """What takes one micro-batch's activations over one boundary."""
    layout = case.layout
    whole = layout.micro_batch_size, case.job.seq_len, case.model.hidden, element_bytes_of(case)
    split = layout.cp * (layout.tp if layout.sequence_parallel else 1)
    return [Call("send", "pp", "boundary", "forward", 1, boundary_bytes(*whole, split))]


def seconds_sent(case: Case, known: Coefficients, calls: list[Call]) -> Number:
    """Seconds of such calls, one after the other."""
    seconds: Number = 0.0
    for sent in traffic(case, calls):
        seconds = seconds + collective_seconds(sent, case.cluster.levels, known)
    return seconds
