"""Claims about what stands beside live bytes: parts that add up, what passes, communicators, pending blocks."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from planner.basics.arith import is_column
from planner.decide.phases import derived
from planner.engines import engine_of
from planner.figures.allocator import (
    DEVICE_PARTS,
    GIVEN_BACK,
    RESERVED_PARTS,
    block_bytes,
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
LLAMA_ELEMENTS = 6_738_415_616
KNOWN = Allocator(fragmentation=0.1, workspace_bytes=2e9, context_bytes=1e9, churn=0.25, communicator_bytes=5e8)


def case_of(allocator: Allocator = KNOWN, **layout: Any) -> Case:
    made = Layout(engine="nanotron", **layout)
    runtime = msgspec.structs.replace(presets.runtime("nanotron"), allocator=allocator)
    gpus = 64 if is_column(made.world_size) else max(int(made.world_size), 8)
    cluster = presets.cluster("dgx-h100", gpus=gpus)
    return Case(LLAMA, TrainingJob(seq_len=4096), made, cluster, runtime)


def test_what_is_needed_has_nothing_that_is_given_back() -> None:
    case = case_of(tp=2, dp_shard=4, zero_stage=1, sequence_parallel=True)
    parts = parts_beside(case, 40e9)
    given_back = sum(parts[part] for part in ("fragmentation", "churn", "blocks", "pending"))

    assert needed_bytes(case, 40e9) == pytest.approx(device_bytes(case, 40e9) - given_back)
    memory = memory_breakdown(case)
    assert sum(memory.beside[part] for part in GIVEN_BACK) == pytest.approx(
        memory.device_bytes - float(needed_bytes(case, memory.peak.total))
    )


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
    assert parts["pending"] == pending_bytes(case) > 0
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
        passes = float(engine_of("nanotron").forwards_queued(case.at(next(case.stages()))))
        return passes * (34 * float(layers) + 20)

    assert launches(few) == launches(many) == pytest.approx(1024)
    assert engine_of("nanotron").forwards_queued(short.at(next(short.stages()))) == 2  # then it waits for a gradient


def test_without_a_pipeline_the_host_goes_on_to_backward_which_has_twice_the_launches() -> None:
    one, two = (float(engine_of("nanotron").forwards_queued(case_of(grad_accum=accum))) for accum in (1, 2))
    short = msgspec.structs.replace(case_of(grad_accum=2), model=msgspec.structs.replace(LLAMA, layers=16))

    assert one == two == pytest.approx(1024 / (34 * 32 + 20))  # its forward alone is more than the driver queues
    assert engine_of("nanotron").forwards_queued(short) == pytest.approx(1 + (1024 / (34 * 16 + 20) - 1) / 2)


def test_answers_have_the_parts() -> None:
    case = case_of(tp=2, dp_shard=4, zero_stage=1, sequence_parallel=True)
    memory = memory_breakdown(case)
    phase = derived(case, "peak")

    assert sum(memory.beside.values()) == pytest.approx(memory.device_bytes - memory.peak.total)
    assert phase.beside == pytest.approx(memory.beside)


def deepspeed(allocator: Allocator = KNOWN, seq_len: int = 4096, precision: str = "bf16", **layout: Any) -> Case:
    made = Layout(**{"engine": "deepspeed", "zero_stage": 2} | layout)
    runtime = msgspec.structs.replace(
        presets.runtime("deepspeed-pipeline" if made.engine == "deepspeed-pipeline" else "deepspeed-zero"),
        allocator=allocator,
    )
    cluster = presets.cluster("dgx-h100", gpus=max(int(made.world_size), 8))
    return Case(LLAMA, TrainingJob(seq_len=seq_len, precision=precision), made, cluster, runtime)  # type: ignore[arg-type]


def test_gradients_that_a_zero_step_lays_end_to_end_get_segments_of_their_own() -> None:
    """The rank's part in 16 bits, and in fp32, beside whichever live bytes of forward and backward."""
    part = LLAMA_ELEMENTS / 8
    for stage in (1, 2, 3):
        assert block_bytes(deepspeed(dp_shard=8, zero_stage=stage), 1e12) == pytest.approx((2 + 4) * part, rel=1e-3)
    fp32 = deepspeed(dp_shard=8, precision="fp32")
    assert block_bytes(fp32, 1e12) == pytest.approx(4 * part, rel=1e-3)  # no copy in another format
    thirds = deepspeed(dp_shard=2, zero_stage=3)
    assert block_bytes(thirds, 1e12) == 6 * 10**9  # of one group of a billion


def test_no_block_is_laid_apart_where_a_backward_freed_one_as_large() -> None:
    """fp32 logits of 32,000 entries: of 16,384 tokens 2.1 GB, of 32,768 4.2 GB; the blocks are 1.7 and 3.4 GB."""
    each = LLAMA_ELEMENTS / 8
    some, none = (deepspeed(dp_shard=8, seq_len=4096, micro_batch_size=size) for size in (4, 8))

    assert block_bytes(some, 1e12) == pytest.approx(4 * each, rel=1e-3)
    assert block_bytes(none, 1e12) == 0


def test_a_step_that_is_the_fullest_moment_is_not_counted_twice() -> None:
    """Beside it there may be what forward and backward hold in blocks of their own; their engine says how much of that
    is sure."""
    case = deepspeed(dp_shard=1, zero_stage=1)
    blocks = engine_of("deepspeed").blocks(case)
    peak = memory_breakdown(case).peak

    assert peak.phase == "optimizer" and peak.total == pytest.approx(blocks.live)
    assert 0 <= block_bytes(case, peak.total) < sum(blocks.sizes) / 2
    assert block_bytes(case, peak.total + 1) == sum(blocks.sizes)


def test_nothing_is_laid_end_to_end_on_the_host_in_pages_or_without_zero() -> None:
    offloaded = deepspeed(dp_shard=8, offload_optimizer=True)
    pages = deepspeed(dp_shard=8)
    pages = msgspec.structs.replace(pages, runtime=msgspec.structs.replace(pages.runtime, expandable_segments=True))
    plain = deepspeed(engine="deepspeed-pipeline", precision="fp16", zero_stage=0, pp=2, grad_accum=4)

    assert [block_bytes(one, 1e12) for one in (offloaded, pages, plain, case_of(dp_shard=8, zero_stage=1))] == [0] * 4


def test_bf16_pipelines_reduce_a_narrow_copy_of_all_sums_and_widen_one_gradient_at_a_time() -> None:
    case = deepspeed(engine="deepspeed-pipeline", zero_stage=1, pp=2, dp_shard=2, grad_accum=4)
    table = 32000 * 4096

    stage = max(case.at(one).total() for one in case.stages())
    assert block_bytes(case, 1e12) == pytest.approx(2 * stage + 4 * table, rel=1e-4)


def test_blocks_of_columns_are_those_of_their_layouts_and_none_where_pipelines_are_columns() -> None:
    ranks = np.array([2, 4, 8])
    column = deepspeed_columns(dp_shard=ranks)
    each = [float(block_bytes(deepspeed(dp_shard=int(size)), 1e12)) for size in ranks]

    assert list(block_bytes(column, 1e12)) == pytest.approx(each)  # type: ignore[arg-type]
    pipelines = deepspeed_columns(engine="deepspeed-pipeline", pp=ranks, dp_shard=2, zero_stage=1)
    assert block_bytes(pipelines, 1e12) == 0


def deepspeed_columns(**layout: Any) -> Case:
    made = Layout(**{"engine": "deepspeed", "zero_stage": 2} | layout)
    runtime = msgspec.structs.replace(presets.runtime("deepspeed-zero"), allocator=KNOWN)
    return Case(LLAMA, TrainingJob(seq_len=4096), made, presets.cluster("dgx-h100", gpus=64), runtime)


def test_what_loading_took_holds_the_blocks_of_a_step() -> None:
    case = deepspeed(dp_shard=32, zero_stage=2)
    loaded = engine_of("deepspeed").blocks(case).loaded

    assert block_bytes(case, loaded) == 0 < block_bytes(case, loaded + 1)


def test_a_device_shows_what_is_pending_while_its_host_is_ahead_but_in_pipelines_of_columns() -> None:
    alone, column = case_of(tp=8, sequence_parallel=True), case_of(pp=np.array([1, 4]), tp=8, sequence_parallel=True)

    shown = device_bytes(alone, 40e9) - reserved_bytes(alone, 40e9) - 1e9  # and no second communicator
    assert shown == pytest.approx(pending_bytes(alone))
    assert parts_beside(column, 40e9)["pending"] == 0


def test_a_rank_lays_its_part_end_to_end_however_its_peers_share_the_work() -> None:
    """Ranks that share a sequence are data-parallel ranks to ZeRO; of tensor ranks each has its part of the layers."""
    ulysses = deepspeed(engine="deepspeed-ulysses", dp_shard=4, cp=2, cp_method="ulysses")
    assert block_bytes(ulysses, 1e12) == block_bytes(deepspeed(dp_shard=8), 1e12)

    split = deepspeed(engine="deepspeed-autotp", dp_shard=4, tp=2)
    assert block_bytes(split, 1e12) == pytest.approx(6 * split.total() / 4, rel=1e-6)
