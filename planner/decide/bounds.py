"""What no layout of a block goes below in memory, in columns and without walking the model's layers one by one.

Not here: exact figures (memory.py), or the bound on time, which is the step's own formula in columns (candidates.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from planner.basics.arith import Number, by_value, ceil_div, is_column, maximum, minimum, where
from planner.engines import engine_of
from planner.figures.allocator import filled_bytes
from planner.figures.memory import BATCH_BYTES_PER_TOKEN, device_bytes
from planner.inventory.walk import kept_by_layer, made_by_tail
from planner.parallelism.case import Case, StageClass
from planner.parallelism.pipeline import filled_by_chunk
from planner.parallelism.pipeline import in_flight as in_flight_of
from planner.spec import Layout


def memory_bound(case: Case, lines: list[tuple[Number, Number]] | None = None) -> Number:
    """Device bytes that no stage's peak is below; `lines` spares asking for `bound_lines` again."""
    micro = case.layout.micro_batch_size
    lines = bound_lines(case) if lines is None else lines
    return device_bytes(case, maximum(*(start + slope * micro for start, slope in lines)))


def bound_lines(case: Case) -> list[tuple[Number, Number]]:
    """(bytes, bytes a sequence of the micro-batch) that no stage's peak is below, as `memory_lines`: what stays between
    steps, what the layers of a stage keep on the device for the micro-batches in flight, and what the head and the loss
    take beside that on the last one.

    What is kept beside layers, and everything else that comes and goes, is left out.
    """
    kept = () if case.layout.offload_activations else _per_token(case)
    lines = [_stage_line(case.at(next(case.stages())), kept)]
    if case.pipelined:
        for stage in _heavier_stages(case):
            there = (stage.place > 0) & (stage.place < case.layout.pp)
            start, slope = _stage_line(case.at(stage), kept)
            lines.append((where(there, start, 0.0), where(there, slope, 0.0)))
    return lines


def _heavier_stages(case: Case) -> list[StageClass]:
    """The first stage behind the dense layers of a mixture of experts, which are light, or behind an end that counts
    as a layer, and the last one."""
    layout, pp, dense = case.layout, case.layout.pp, case.model.dense_layers
    if not is_column(pp) or layout.stage_layers is not None:
        later = [one for one in case.every_stage() if not one.first and not one.layers[0]]
        return [*later[:1], *later[1:][-1:]]
    stages = []
    if dense or _uneven(layout):
        chunk = maximum(case.model.layers // (pp * layout.virtual_stages), 1)
        behind = maximum(minimum(ceil_div(dense, chunk), pp - 1), 1)
        stages.append(StageClass(False, False, behind, case.rank_layers(behind)))
    if layout.pp_schedule != "zb-v":  # where the first rank has the head
        stages.append(StageClass(False, True, pp - 1, case.rank_layers(pp - 1)))
    return stages


def _stage_line(case: Case, per_token: tuple[Number, ...]) -> tuple[Number, Number]:
    layout, here = case.layout, case.here
    resident = filled_bytes(case)
    flying: Number = 1
    if case.pipelined:
        flying = _flying(case)
        # No gradient is made while all are in flight: with what accumulates there is one micro-batch less.
        flying = flying - where((flying >= layout.grad_accum) & (layout.grad_accum > 1), 1, 0)
    kept: Number = 0.0
    if not layout.offload_activations:
        *each, tail = per_token
        kept = flying * sum(count * one for count, one in zip(here.layers, each, strict=True))
        if here.last and not (here.first and case.pipelined):
            kept = kept + tail
    return resident, (kept + BATCH_BYTES_PER_TOKEN) * case.rank_seq_len


def _flying(case: Case) -> Number:
    """Micro-batches in flight when the pipeline is filled, each counted for all layers of the stage."""
    layout = case.layout
    shape = layout.pp, case.here.place, layout.grad_accum, layout.virtual_stages
    if not _uneven(layout) or layout.pp_schedule != "interleaved":
        return in_flight_of(layout.pp_schedule, *shape)
    counts = [count for count, _ in case.dealt(case.here.place)]
    held = sum(number * count for number, count in zip(filled_by_chunk(*shape), counts, strict=True))
    return held / maximum(sum(counts), 1)


def _uneven(layout: Layout) -> bool:
    """Whether the first stage may have fewer layers than those behind it."""
    return layout.stage_layers is not None or layout.counted_ends != "none"


def _per_token(case: Case) -> tuple[Number, ...]:
    """Bytes for each token that a layer of each kind keeps, and that the tail makes beside them; asked once for each
    tensor degree, with and without shards (which may decide the number format) and split experts."""
    layout = case.layout
    engine = engine_of(layout.engine)

    def of_split(key: float) -> Any:  # a row of the column that is found
        tp, shards, ep = int(key // 4), 1 + int(key // 2) % 2, 1 + int(key) % 2
        single = msgspec.structs.replace(
            layout, tp=tp, ep=ep, cp=1, pp=1, dp_replicate=1, dp_shard=shards, micro_batch_size=1, grad_accum=1,
            sequence_parallel=layout.sequence_parallel and tp > 1, virtual_stages=1, pp_schedule="1f1b",
        )  # fmt: skip
        one = Case(case.model, case.job, single, case.cluster, case.runtime)
        asked = one.walked_model, engine.compute(one)
        kept = [kept_by_layer(*asked, kind).per_token if case.whole_repeats[kind] else 0.0 for kind in case.kinds]
        return (*kept, made_by_tail(*asked).per_token)

    found: Any = by_value(of_split, layout.tp * 4 + where(layout.dp_shard > 1, 2, 0) + where(layout.ep > 1, 1, 0))
    return tuple(found.T if is_column(found) else found)
