"""Claims about what stands beside live bytes: parts that add up, what passes, communicators, pending blocks."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from planner.basics.arith import is_column
from planner.decide.phases import derived
from planner.engines import engine_of, nanotron
from planner.figures.allocator import (
    DEVICE_PARTS,
    RESERVED_PARTS,
    device_bytes,
    lasting_bytes,
    more_communicators,
    needed_bytes,
    parts_beside,
    pending_bytes,
    reserved_bytes,
)
from planner.figures.memory import memory_breakdown
from planner.parallelism.case import Case
from planner.spec import Allocator, Layout, TrainingJob, presets

LLAMA = presets.model("llama-2-7b")
KNOWN = Allocator(fragmentation=0.1, workspace_bytes=2e9, context_bytes=1e9, churn=0.25, communicator_bytes=5e8)


def case_of(allocator: Allocator = KNOWN, **layout: Any) -> Case:
    made = Layout(engine="nanotron", **layout)
    runtime = msgspec.structs.replace(presets.runtime("nanotron"), allocator=allocator)
    gpus = 64 if is_column(made.world_size) else max(int(made.world_size), 8)
    cluster = presets.cluster("dgx-h100", gpus=gpus)
    return Case(LLAMA, TrainingJob(seq_len=4096), made, cluster, runtime)


def test_what_is_needed_has_no_holes() -> None:
    case = case_of(tp=2, dp_shard=4, zero_stage=1, sequence_parallel=True)
    parts = parts_beside(case, 40e9)

    assert needed_bytes(case, 40e9) == pytest.approx(device_bytes(case, 40e9) - parts["fragmentation"] - parts["churn"])
    memory = memory_breakdown(case)
    assert memory.needed_bytes == pytest.approx(float(needed_bytes(case, memory.peak.total)))


def test_segments_that_grow_page_by_page_leave_no_holes_that_nothing_fits_into() -> None:
    case = case_of(tp=2, dp_shard=4, zero_stage=1, sequence_parallel=True)
    pages = msgspec.structs.replace(case, runtime=msgspec.structs.replace(case.runtime, expandable_segments=True))
    plain, grown = parts_beside(case, 40e9), parts_beside(pages, 40e9)

    assert plain["fragmentation"] > 0 and plain["churn"] > 0
    assert grown == plain | {"fragmentation": 0, "churn": 0}


def test_reserved_and_device_memory_are_live_bytes_and_their_parts() -> None:
    case = case_of(tp=2, dp_shard=4, zero_stage=1, sequence_parallel=True)
    live, lasting = 40e9, lasting_bytes(case, 40e9)
    parts = parts_beside(case, live)

    assert tuple(parts) == RESERVED_PARTS + DEVICE_PARTS
    assert parts["fragmentation"] == pytest.approx(0.1 * 42e9) and parts["workspace"] == 2e9
    assert parts["churn"] == pytest.approx(0.25 * (live - lasting)) and 0 < lasting < live
    assert parts["communicators"] == 2 * 5e8  # tensor ranks, data ranks and all of them, but for the first
    assert reserved_bytes(case, live) == pytest.approx(live + sum(parts[part] for part in RESERVED_PARTS))
    assert device_bytes(case, live) == pytest.approx(live + sum(parts.values()))


def test_what_stays_between_steps_is_that_of_the_stage_with_most() -> None:
    case = case_of(pp=4, dp_shard=2, zero_stage=1, grad_accum=4)
    each = [sum(engine_of("nanotron").resident(case.at(stage)).values()) for stage in case.stages()]

    assert lasting_bytes(case, 1e12) == max(each) > min(each)
    assert lasting_bytes(case, 1e9) == 1e9  # not more than there is


def test_columns_are_what_their_layouts_are_and_bounds_from_below_where_pipelines_are_columns() -> None:
    one, column = case_of(dp_shard=8, zero_stage=1), case_of(dp_shard=np.array([8, 4]), zero_stage=1)
    stages = case_of(pp=np.array([2, 4]), dp_shard=2, zero_stage=1, grad_accum=4)
    each = [case_of(pp=pp, dp_shard=2, zero_stage=1, grad_accum=4) for pp in (2, 4)]

    assert reserved_bytes(column, np.array([70e9, 90e9]))[0] == pytest.approx(reserved_bytes(one, 70e9))
    assert parts_beside(stages, 70e9)["churn"] == 0 < min(parts_beside(case, 70e9)["churn"] for case in each)


def test_a_cpu_has_no_part_beside_live_bytes() -> None:
    case = case_of(tp=2, sequence_parallel=True)
    cpu = presets.cluster("cpu", gpus=2)
    alone = msgspec.structs.replace(case, cluster=cpu)

    assert device_bytes(alone, 1e9) == 1e9 and pending_bytes(alone, 3) == 0


@pytest.mark.parametrize(
    ("sizes", "more"),
    [
        ({}, 0),
        ({"dp_replicate": 8}, 0),
        ({"dp_shard": 8}, 0),
        ({"dp_replicate": 2, "dp_shard": 4}, 2),
        ({"tp": 8, "pp": 2, "dp_shard": 4}, 3),
        ({"dp_shard": 8, "ep": 4}, 2),
    ],
)
def test_a_rank_has_a_communicator_an_axis_and_one_of_all_ranks(sizes: dict[str, int], more: int) -> None:
    assert more_communicators(Layout(engine="fsdp2", **sizes)) == more


def test_a_forward_frees_two_whole_results_a_layer_that_nccls_stream_may_still_read() -> None:
    case = case_of(tp=2, pp=4, dp_shard=2, zero_stage=1, grad_accum=8, micro_batch_size=2, sequence_parallel=True)
    layers = int(next(case.stages()).layers[-1])

    assert pending_bytes(case, 3) == 3 * 2 * layers * (2 * 2 * 4096 * 4096)
    assert memory_breakdown(case).pending_bytes == pending_bytes(case) > 0
    for none in (case_of(dp_shard=8, zero_stage=1), case_of(tp=2)):
        assert pending_bytes(none, 3) == 0  # nothing is scattered


def test_a_host_launches_no_more_forwards_than_the_driver_queues() -> None:
    few = case_of(pp=4, stage_layers=(8, 8, 8, 8), grad_accum=8)
    many = case_of(pp=16, stage_layers=(2,) * 16, grad_accum=16)
    short = case_of(pp=2, stage_layers=(4, 28), grad_accum=8)

    def launches(case: Case) -> float:
        layers = next(case.stages()).layers[-1]
        passes = float(nanotron.forwards_queued(case.at(next(case.stages()))))
        return passes * (34 * float(layers) + 20)

    assert launches(few) == launches(many) == pytest.approx(1024)
    assert nanotron.forwards_queued(short.at(next(short.stages()))) == 2  # then it waits for a gradient


def test_without_a_pipeline_the_host_goes_on_to_backward_which_has_twice_the_launches() -> None:
    one, two = (float(nanotron.forwards_queued(case_of(grad_accum=accum))) for accum in (1, 2))
    short = msgspec.structs.replace(case_of(grad_accum=2), model=msgspec.structs.replace(LLAMA, layers=16))

    assert one == two == pytest.approx(1024 / (34 * 32 + 20))  # its forward alone is more than the driver queues
    assert nanotron.forwards_queued(short) == pytest.approx(1 + (1024 / (34 * 16 + 20) - 1) / 2)


def test_answers_have_the_parts() -> None:
    case = case_of(tp=2, dp_shard=4, zero_stage=1, sequence_parallel=True)
    memory = memory_breakdown(case)
    phase = derived(case, "peak")

    assert sum(memory.beside.values()) == pytest.approx(memory.device_bytes - memory.peak.total)
    assert phase.beside == pytest.approx(memory.beside)
