"""Seconds from a step's first forward to its last backward: a pipeline's schedule played out, or a bound for columns.

Not here: the schedules (planner/parallelism/schedules.py, makespan.py), or what the step waits for beside passes
(steptime.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from planner.basics.arith import Number, is_column
from planner.engines.base import Call
from planner.figures.comm import collective_seconds, traffic
from planner.figures.passes import Passes, on_stage
from planner.figures.stepparts import Chunks, Slowest
from planner.figures.work import element_bytes_of
from planner.parallelism.case import Case
from planner.parallelism.makespan import lower_bound_s, makespan_s
from planner.parallelism.pipeline import boundary_bytes
from planner.spec import Layout
from planner.spec.calibration import Coefficients

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
