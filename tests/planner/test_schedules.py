"""Schedules are those of torch.distributed.pipelining: the same order on every rank, as many micro-batches held.

torch's classes are built, and where they run rather than plan (GPipe, 1F1B) they run, on stages that only write down
what they are told. Not here: seconds (test_makespan.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
from msgspec.structs import replace

from planner.figures.memory import memory_breakdown, memory_lines, peak_at
from planner.parallelism.case import Case
from planner.parallelism.pipeline import (
    SCHEDULES,
    ZERO_BUBBLE,
    Action,
    actions,
    in_flight,
    micro_batches_match_torch,
    rank_of,
    stage_of,
    virtual_stages_match,
)
from planner.spec import Layout, TrainingJob, presets

CHUNKS = {"interleaved": (2, 3, 4), "zb-h1": (1, 2, 3), "zb-v": (2,)}
SHAPES = [
    (schedule, stages, micro_batches, chunks)
    for schedule in SCHEDULES
    for chunks in CHUNKS.get(schedule, (1,))
    for stages in (1, 2, 3, 4, 8)
    for micro_batches in (1, 2, 3, 4, 5, 7, 8, 10, 16, 24)
]


class Stage(SimpleNamespace):
    """A pipeline stage as torch's schedules see one, that notes what it is told to compute."""

    def __init__(self, rank: int, stages: int, chunk: int, chunks: int) -> None:
        super().__init__(
            group_rank=rank, group_size=stages, stage_index=chunk * stages + rank, num_stages=stages * chunks,
            is_first=False, is_last=False, submod=None, told=[],
        )  # fmt: skip

    def forward_one_chunk(self, micro_batch: int, *_args: object, **_options: object) -> None:
        self.told.append(("F", micro_batch, self.stage_index))

    def backward_one_chunk(self, micro_batch: int, **_options: object) -> None:
        self.told.append(("B", micro_batch, self.stage_index))

    def get_fwd_recv_ops(self, _micro_batch: int) -> list[object]:
        return []

    get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = get_fwd_recv_ops

    def perform_reduce_grad(self, _scale: int) -> None:
        pass


@cache
def of_torch(schedule: str, stages: int, micro_batches: int, chunks: int) -> list[list[tuple[str, int, int]]] | None:
    """(kind, micro-batch, stage) by rank as torch does it, or None when it refuses the shape."""
    from torch.distributed.pipelining import schedules as torchs  # seconds

    single = {"gpipe": torchs.ScheduleGPipe, "1f1b": torchs.Schedule1F1B}
    multi = {
        "interleaved": torchs.ScheduleInterleaved1F1B,
        "zb-h1": torchs.ScheduleInterleavedZeroBubble,
        "zb-v": torchs.ScheduleZBVZeroBubble,
    }
    try:
        if schedule in single:
            ranks = [Stage(rank, stages, 0, 1) for rank in range(stages)]
            for stage in ranks:
                ran = single[schedule](stage, micro_batches)
                ran._stage_forward_initialized = True  # its buffers would need a process group
                ran._step_microbatches()
            return [stage.told for stage in ranks]
        built = multi[schedule]([Stage(0, stages, chunk, chunks) for chunk in range(chunks)], micro_batches)
    except ValueError:
        return None
    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    return [
        [
            (kinds[one.computation_type.name], one.microbatch_index, one.stage_index)
            for one in built.pipeline_order_with_comms[rank]
            if one.computation_type.name in kinds
        ]
        for rank in range(stages)
    ]


def held(order: list[tuple[str, int, int]], chunks: int) -> float:
    """Most (micro-batch, chunk) pairs between forward and last use."""
    alive: set[tuple[int, int]] = set()
    most = 0
    for kind, micro_batch, place in order:
        if kind == "F":
            alive.add((micro_batch, place))
        elif kind != "I":
            alive.remove((micro_batch, place))
        most = max(most, len(alive))
    return most / chunks


def placed(schedule: str, stages: int, rank: int, order: tuple[Action, ...]) -> list[tuple[str, int, int]]:
    return [(one.kind, one.micro_batch, stage_of(schedule, stages, rank, one.chunk)) for one in order]


def shapes_of_torch() -> Iterator[tuple[str, int, int, int]]:
    for schedule, stages, micro_batches, chunks in SHAPES:
        if of_torch(schedule, stages, micro_batches, chunks) is not None:
            yield schedule, stages, micro_batches, chunks


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_every_rank_does_what_torch_does_in_the_same_order(schedule):
    compared = [shape for shape in shapes_of_torch() if shape[0] == schedule]

    assert len(compared) >= 30
    for _, stages, micro_batches, chunks in compared:
        ours = actions(schedule, stages, micro_batches, chunks)
        for rank, theirs in enumerate(of_torch(schedule, stages, micro_batches, chunks)):
            assert placed(schedule, stages, rank, ours[rank]) == theirs, (stages, micro_batches, chunks, rank)


@pytest.mark.slow
def test_in_flight_micro_batches_are_as_many_as_torch_s_own_schedules_hold():
    for schedule, stages, micro_batches, chunks in shapes_of_torch():
        for rank, order in enumerate(of_torch(schedule, stages, micro_batches, chunks)):
            shape = schedule, stages, rank, micro_batches, chunks
            assert in_flight(*shape) == held(order, chunks), shape


def test_in_flight_is_what_counting_our_actions_gives_for_every_schedule_also_where_torch_refuses():
    for schedule, stages, micro_batches, chunks in SHAPES:
        if schedule in CHUNKS and not micro_batches_match_torch(schedule, stages, micro_batches):
            continue
        for rank, order in enumerate(actions(schedule, stages, micro_batches, chunks)):
            shape = schedule, stages, rank, micro_batches, chunks
            counted = held(placed(schedule, stages, rank, order), chunks)
            assert in_flight(*shape) == counted, shape


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_in_flight_answers_alike_for_numbers_and_columns(schedule):
    rows = [(p, r, m, v) for name, p, m, v in SHAPES if name == schedule for r in range(p)]
    columns = [np.array(column, dtype=float) for column in zip(*rows, strict=True)]

    assert list(np.broadcast_to(in_flight(schedule, *columns), len(rows))) == [in_flight(schedule, *r) for r in rows]


def test_published_peaks():
    assert [in_flight("1f1b", 8, rank, 64, 1) for rank in (0, 7)] == [8, 1]  # Narayanan et al. 2021
    assert [in_flight("interleaved", 8, rank, 64, 2) for rank in (0, 7)] == [11.5, 4.5]  # p (1 + (p-1)/(p v)), rank 0
    for rank in range(8):  # Qi et al. 2023, section 2.3, with ranks from 0
        assert in_flight("zb-h1", 8, rank, 64, 1) == (8 - rank) + rank
        assert in_flight("zb-v", 8, rank, 64, 2) == 8


@pytest.mark.slow
def test_a_shape_is_legal_for_torch_exactly_when_torch_takes_it():
    for schedule, stages, micro_batches, chunks in SHAPES:
        took = of_torch(schedule, stages, micro_batches, chunks) is not None
        assert micro_batches_match_torch(schedule, stages, micro_batches) == took
        assert virtual_stages_match(schedule, chunks)


def test_every_chunk_sees_every_micro_batch_once_forward_and_once_back():
    for schedule, stages, micro_batches, chunks in SHAPES:
        if not micro_batches_match_torch("interleaved", stages, micro_batches):
            continue
        kinds = "FIW" if schedule in ZERO_BUBBLE else "FB"
        whole = sorted((kind, one, c) for kind in kinds for one in range(micro_batches) for c in range(chunks))
        for order in actions(schedule, stages, micro_batches, chunks):
            assert sorted(order) == whole


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_stage_s_rank_holds_it(schedule):
    for chunks in CHUNKS.get(schedule, (1,)):
        places = [(stage_of(schedule, 4, rank, chunk), rank) for rank in range(4) for chunk in range(chunks)]
        assert sorted(places) == [(stage, rank_of(schedule, 4, stage)) for stage in range(4 * chunks)]


def test_a_later_backward_finds_one_micro_batch_less_where_all_forwards_are_over_before_the_first() -> None:
    """Two ranks, tiny-llama in fp32, two micro-batches of 2 x 128 tokens: a real run's fullest moment was in the first
    backward, with 20,578,860 bytes. The second one was planned as the fullest, with 22,127,104."""
    layout = Layout(engine="deepspeed-pipeline", pp=2, zero_stage=1, micro_batch_size=2, grad_accum=2)
    cluster = replace(presets.cluster("localhost"), nodes=1, gpus_per_node=2)
    runtime = presets.runtime("deepspeed-pipeline")
    case = Case(presets.model("tiny-llama"), TrainingJob(precision="fp32", seq_len=128), layout, cluster, runtime)

    found = memory_breakdown(case)
    phases = {phase.phase: phase.terms for phase in found.phases}

    assert found.peak.phase == "backward"
    assert found.peak.total == pytest.approx(20_578_860, rel=0.005)
    assert phases["backward.next"]["activations"] < phases["backward"]["activations"]
    assert peak_at(memory_lines(case), 2) == pytest.approx(found.peak.total)
