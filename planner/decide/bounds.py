"""What no layout of a block goes below in memory, in columns and without walking the model's layers one by one.

Not here: exact figures (memory.py), or the bound on time, which is the step's own formula in columns (candidates.py).
"""

from __future__ import annotations

import msgspec

from planner.basics.arith import Number, by_value, maximum, where
from planner.engines import engine_of
from planner.engines.base import held_when_filled
from planner.figures.memory import BATCH_BYTES_PER_TOKEN, device_bytes
from planner.inventory.walk import kept_by_layer
from planner.parallelism.case import LAYERS, Case, StageClass
from planner.parallelism.schedules import filled_by_chunk
from planner.parallelism.schedules import in_flight as in_flight_of


def memory_bound(case: Case) -> Number:
    """Device bytes that no stage's peak is below."""
    micro = case.layout.micro_batch_size
    return device_bytes(case, maximum(*(start + slope * micro for start, slope in bound_lines(case))))


def bound_lines(case: Case) -> list[tuple[Number, Number]]:
    """(bytes, bytes a sequence of the micro-batch) that no stage's peak is below, as `memory_lines`: what stays between
    steps, and what the layers of a stage keep on the device for the micro-batches in flight.

    What is kept beside layers, and everything that comes and goes, is left out.
    """
    stages = [next(case.stages())]
    uneven = case.layout.stage_layers is not None or case.layout.counted_ends != "none"
    if case.pipelined and (case.model.dense_layers or uneven):  # the first stage may be the light one
        stages.append(StageClass(False, False, 1, case.rank_layers(1)))
    lines = [_stage_line(case.at(stage)) for stage in stages]
    if len(lines) > 1:  # with two stages the second has the head too, and holds more
        start, slope = lines[1]
        lines[1] = where(case.layout.pp > 1, start, 0.0), where(case.layout.pp > 1, slope, 0.0)
    return lines


def _stage_line(case: Case) -> tuple[Number, Number]:
    layout = case.layout
    engine = engine_of(layout.engine)
    resident = sum(held_when_filled(engine, case).values())
    flying: Number = 1
    if case.pipelined:
        flying = _flying(case)
        # No gradient is made while all are in flight: with what accumulates there is one micro-batch less.
        flying = flying - where((flying >= layout.grad_accum) & (layout.grad_accum > 1), 1, 0)
    kept: Number = 0.0
    for unit, count in zip(LAYERS, case.here.layers, strict=True) if not layout.offload_activations else ():
        kept = kept + count * _kept_per_token(case, unit)
    return resident, (flying * kept + BATCH_BYTES_PER_TOKEN) * case.rank_seq_len


def _flying(case: Case) -> Number:
    """Micro-batches in flight when the pipeline is filled, each counted for all layers of the stage."""
    layout = case.layout
    shape = layout.pp, case.here.place, layout.grad_accum, layout.virtual_stages
    uneven = layout.stage_layers is not None or layout.counted_ends != "none"
    if not uneven or layout.pp_schedule != "interleaved":
        return in_flight_of(layout.pp_schedule, *shape)
    counts = [count for count, _ in case.dealt(case.here.place)]
    held = sum(number * count for number, count in zip(filled_by_chunk(*shape), counts, strict=True))
    return held / maximum(sum(counts), 1)


def _kept_per_token(case: Case, unit: str) -> Number:
    """Bytes that one layer of a kind keeps for each token; asked once for each tensor degree, with and without shards
    (which may decide the number format) and split experts."""
    if unit == "dense" and not case.model.dense_layers:
        return 0.0
    layout = case.layout
    engine = engine_of(layout.engine)

    def kept(key: float) -> float:
        tp, shards, ep = int(key // 4), 1 + int(key // 2) % 2, 1 + int(key) % 2
        single = msgspec.structs.replace(
            layout, tp=tp, ep=ep, cp=1, pp=1, dp_replicate=1, dp_shard=shards, micro_batch_size=1, grad_accum=1,
            sequence_parallel=layout.sequence_parallel and tp > 1, virtual_stages=1, pp_schedule="1f1b",
        )  # fmt: skip
        one = Case(case.model, case.job, single, case.cluster, case.runtime)
        return kept_by_layer(one.walked_model, engine.compute(one), unit).per_token

    return by_value(kept, layout.tp * 4 + where(layout.dp_shard > 1, 2, 0) + where(layout.ep > 1, 1, 0))
