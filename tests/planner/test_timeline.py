"""A step on an axis: its spans are those of the schedule, add up to the step time's parts, never overlap and end with
it.

Not here: how a timeline is drawn (test_timeline_views.py), or a real step (tests/cluster/test_profile.py).
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from itertools import pairwise

import msgspec
import pytest

from planner.ask.options import question
from planner.ask.question import case_of, exact_layout
from planner.engines import engine_of
from planner.figures.hiding import OverlapWindow, Piece, place_hidden
from planner.figures.passes import coefficients, on_stage, waiting_of
from planner.figures.steptime import StepTime, step_parts
from planner.figures.timeline import KINDS, StageSpans, Timeline, timeline
from planner.parallelism.case import Case
from planner.parallelism.makespan import makespan_s
from planner.parallelism.pipeline import actions, backward_sends, forward_sends
from planner.parallelism.rule import check
from planner.spec.calibration import Calibration
from planner.spec.spans import COLLECTIVES, COMPUTE, COPIES, HOST, INSIDE, SENDS, STREAMS

PIPELINE = {"model": "13b", "gpus": "32", "pp": "4", "tp": "4", "dp_shard": "2", "global_batch_size": "24",
            "micro_batch_size": "1", "method": "full"}  # fmt: skip
SCHEDULES = {
    "gpipe": {"runtime": "torchtitan", "pp_schedule": "gpipe"},
    "1f1b": {"runtime": "torchtitan"},
    "1f1b, megatron": {"runtime": "megatron", "stage_layers": "9,10,11,10"},
    "1f1b, nanotron": {"runtime": "nanotron"},
    "1f1b, deepspeed": {"runtime": "deepspeed-pipeline"},
    "interleaved": {"runtime": "megatron", "pp_schedule": "interleaved", "virtual_stages": "2"},
    "zb-h1": {"runtime": "torchtitan", "pp_schedule": "zb-h1", "recompute": "full"},
    "zb-v": {"runtime": "torchtitan", "pp_schedule": "zb-v", "virtual_stages": "2"},
}
PLAIN = {"model": "7b", "gpus": "8", "global_batch_size": "32", "micro_batch_size": "1", "method": "full"}
PLAINS = {
    "single": {"model": "gpt2", "gpus": "1", "strategy": "single"},
    "ddp": {"model": "gpt2", "dp_replicate": "8"},
    "fsdp2": {"dp_shard": "8"},
    "hsdp": {"dp_shard": "4", "dp_replicate": "2"},
    "fsdp2, no reshard": {"dp_shard": "8", "reshard_after_forward": False},
    "fsdp2, every micro-batch": {"dp_shard": "8", "sync_each_micro_batch": True},
    "fsdp2, one micro-batch": {"dp_shard": "8", "global_batch_size": "8"},
    "fsdp2, slow network": {"dp_shard": "16", "gpus": "16", "gpu": "l4", "recompute": "full"},
    "fsdp1": {"dp_shard": "8", "runtime": "fsdp1"},
    "zero1": {"dp_shard": "8", "runtime": "deepspeed", "zero_stage": "1"},
    "zero2": {"dp_shard": "8", "runtime": "deepspeed", "zero_stage": "2"},
    "zero3": {"dp_shard": "8", "runtime": "deepspeed", "zero_stage": "3"},
    "hpz": {"dp_shard": "16", "gpus": "16", "runtime": "deepspeed", "zero_stage": "3", "zero_secondary_shard": "8"},
    "zero3, offloaded": {"dp_shard": "8", "runtime": "deepspeed", "zero_stage": "3", "offload_optimizer": True},
    "fsdp2, offloaded": {"dp_shard": "8", "offload_optimizer": True, "offload_params": True},
    "activations offloaded": {"dp_shard": "8", "offload_activations": True},
    "ulysses": {"cp": "4", "dp_shard": "2", "runtime": "deepspeed-ulysses", "cp_method": "ulysses"},
    "transformers-tp": {"tp": "4", "dp_shard": "2", "runtime": "transformers-tp"},
    "autotp": {"tp": "4", "dp_shard": "2", "runtime": "deepspeed-autotp", "zero_stage": "1"},
    "experts": {"model": "mixtral-8x7b", "gpus": "64", "dp_shard": "16", "tp": "4", "ep": "8", "runtime": "megatron",
                "global_batch_size": "64"},
    "cpu": {"model": "gpt2", "gpu": "cpu", "gpus": "2", "dp_shard": "2", "global_batch_size": "8"},
}  # fmt: skip
NAMES = [*SCHEDULES, *PLAINS]


def asked(**given: object) -> tuple[Case, Calibration]:
    found = question({name: value for name, value in given.items() if value is not None})
    layout = exact_layout(found)
    case = case_of(found, layout)
    check(case, engine_of(layout.engine).rules)
    return case, found.calibration


def named(name: str) -> tuple[Case, Calibration]:
    return asked(**(PIPELINE | SCHEDULES[name] if name in SCHEDULES else PLAIN | PLAINS[name]))


def drawn(name: str) -> tuple[Case, Timeline]:
    case, known = named(name)
    found = timeline(case, known)
    assert found is not None
    return case, found


def seconds(stage: StageSpans, stream: str, *kinds: str, exposed: bool | None = None) -> float:
    return math.fsum(
        span.seconds
        for span in stage.of(stream)
        if (not kinds or span.kind in kinds) and exposed in (None, span.exposed)
    )


def lanes(stage: StageSpans) -> dict[tuple[str, int], list]:
    found = defaultdict(list)
    for span in stage.spans:
        found[span.stream, span.lane].append(span)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_spans_of_a_stream_never_overlap_and_the_last_ends_with_the_step(name):
    _, found = drawn(name)

    for stage in found.stages:
        for (stream, _), spans in lanes(stage).items():
            assert stream in STREAMS
            assert spans[0].start_s >= -1e-12
            assert all(span.end_s > span.start_s for span in spans)
            assert all(one.end_s <= after.start_s + 1e-9 * found.step_s for one, after in pairwise(spans))
        assert max(span.end_s for span in stage.spans) <= found.step_s * (1 + 1e-9)
    assert max(span.end_s for span in found.stages[0].spans) == pytest.approx(found.step_s, rel=1e-9, abs=0)


@pytest.mark.parametrize("name", NAMES)
def test_the_first_stage_s_spans_add_up_to_each_part_of_the_step_time(name):
    case, calibration = named(name)
    _, parts = step_parts(case, calibration)
    found = timeline(case, calibration)
    time, first = found.time, found.stages[0]

    def near(value: object) -> object:
        return pytest.approx(float(value), rel=1e-9, abs=1e-12)

    assert seconds(first, COMPUTE, *KINDS.values(), "recompute") == near(time.compute_s)
    assert seconds(first, COMPUTE, "clip", "update") + seconds(first, HOST) == near(time.optimizer_s)
    waited = sum(seconds(first, stream, exposed=True) for stream in (COLLECTIVES, INSIDE, COPIES))
    assert waited == near(time.exposed_comm_s)
    outside = [wait for phase in parts.waits.phases.values() for wait in phase.calls]
    assert seconds(first, COLLECTIVES) == near(sum(float(wait.seconds) for wait in outside))
    assert seconds(first, COPIES) == near(sum(float(one.seconds) for one in parts.waits.moved))
    known = coefficients(case, calibration)
    sent = on_stage(parts.first, waiting_of(case, known))
    assert seconds(first, INSIDE) == near(case.layout.grad_accum * (sent.forward_s + sent.backward_s))
    assert first.unplaced_s == 0


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_stage_takes_its_passes_in_the_schedule_s_order_and_they_end_with_the_makespan(name):
    case, found = drawn(name)
    layout = case.layout
    _, parts = step_parts(*named(name))
    orders = actions(layout.pp_schedule, layout.pp, layout.grad_accum, layout.virtual_stages)

    for stage, order in zip(found.stages, orders, strict=True):
        passes = [span for span in stage.of(COMPUTE) if span.kind in KINDS.values()]
        told = [(span.kind, span.micro_batch, span.chunk) for span in passes]
        assert told == [(KINDS[one.kind], one.micro_batch, one.chunk) for one in order]
    first = min(span.start_s for span in found.stages[0].of(COMPUTE))
    inside = [span for stage in found.stages for stream in (COMPUTE, INSIDE) for span in stage.of(stream)]
    last = max(span.end_s for span in inside if span.kind not in ("clip", "update"))
    chunks = parts.chunks
    whole = makespan_s(
        layout.pp_schedule, chunks.forward_s, chunks.backward_s, layout.grad_accum, layout.virtual_stages, chunks.send_s
    )
    assert last - first == pytest.approx(whole, rel=1e-9, abs=0)


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_stage_sends_once_for_each_boundary_and_micro_batch(name):
    case, found = drawn(name)
    layout = case.layout
    shape = layout.pp_schedule, layout.pp
    for stage in found.stages:
        sent = stage.of(SENDS)
        told = Counter(span.name.split()[0] for span in sent)
        ways = {"activations": forward_sends, "gradients": backward_sends}
        for what, sends in ways.items():
            assert told[what] == layout.grad_accum * sends(*shape, stage.stage, layout.virtual_stages)
        assert {span.calls for span in sent} == {1}


def test_recomputation_is_told_apart_and_comes_before_the_backward_it_is_for():
    plain, again = (
        timeline(*asked(**(PLAIN | {"dp_shard": "8", "recompute": name}))).stages[0] for name in ("none", "full")
    )

    assert seconds(plain, COMPUTE, "recompute") == 0
    assert seconds(plain, COMPUTE, "backward") == pytest.approx(seconds(again, COMPUTE, "backward"))
    assert seconds(again, COMPUTE, "recompute") > 0.5 * seconds(again, COMPUTE, "forward")
    order = [span.kind for span in again.of(COMPUTE)]
    assert order[:4] == ["forward", "recompute", "backward", "forward"]


def test_clipping_has_a_span_where_gradients_are_clipped():
    for norm, there in (("1.0", True), ("0", False)):
        stage = timeline(*asked(**(PLAIN | {"dp_shard": "8", "max_grad_norm": norm}))).stages[0]

        assert (seconds(stage, COMPUTE, "clip") > 0) == there


def test_what_the_optimizer_s_step_has_made_is_gathered_after_it():
    stage = drawn("zero2")[1].stages[0]
    (updated,) = (span for span in stage.of(COMPUTE) if span.kind == "update")
    gathered = [span for span in stage.of(COLLECTIVES) if span.name.startswith("all_gather")]

    assert gathered and all(span.exposed for span in gathered)
    assert min(span.start_s for span in gathered) == pytest.approx(updated.end_s)


def test_gradients_that_are_reduced_once_a_step_hide_beside_the_last_micro_batch():
    stage = timeline(*asked(**(PLAIN | {"dp_shard": "8"}))).stages[0]
    reduced = [span for span in stage.of(COLLECTIVES) if span.name.startswith("reduce_scatter")]

    assert {span.micro_batch for span in reduced} == {3}
    gathered = [span for span in stage.of(COLLECTIVES) if span.name == "all_gather dp_shard layer"]
    assert {span.micro_batch for span in gathered} == {0, 1, 2, 3}


def test_sends_that_are_under_way_at_once_take_a_lane_each():
    case, known = named("1f1b")
    slow = msgspec.structs.replace(case.cluster.inter_link, bytes_per_s_per_direction=1e8)
    cluster = msgspec.structs.replace(case.cluster, inter_link=slow)
    found = timeline(msgspec.structs.replace(case, cluster=cluster), known)

    assert max(span.lane for span in found.stages[0].of(SENDS)) > 0
    for spans in lanes(found.stages[0]).values():
        assert all(one.end_s <= after.start_s + 1e-12 for one, after in pairwise(spans))


def test_there_is_no_timeline_where_the_device_s_rates_are_unknown():
    case, known = named("fsdp2")
    gpu = msgspec.structs.replace(case.cluster.gpu, memory_bytes_per_s=None)
    cluster = msgspec.structs.replace(case.cluster, gpu=gpu)

    assert timeline(msgspec.structs.replace(case, cluster=cluster), known) is None


def piece(on: range, hidden_s: float) -> Piece:
    return Piece("all_reduce dp x", "all_reduce", "backward", False, on, 0.0, hidden_s, 1.0)


def test_what_hides_beside_one_micro_batch_comes_before_what_hides_beside_all():
    windows = [OverlapWindow(number, float(number), number + 1.0) for number in range(4)]
    every, last = piece(range(4), 3.0), piece(range(3, 4), 0.8)

    placed, left_s = place_hidden(windows, [every, last])

    assert left_s == 0
    assert [when for one, _, when in placed if one is last] == [(3.0, 3.8)]
    assert sum(end - start for one, _, (start, end) in placed if one is every) == pytest.approx(3.0)
    assert sum(end - start for one, number, (start, end) in placed if one is every and number < 3) > 2.25


def test_what_has_no_room_beside_any_pass_is_counted_and_not_drawn():
    placed, left_s = place_hidden([OverlapWindow(0, 0.0, 1.0)], [piece(range(1), 1.5)])

    assert left_s == pytest.approx(0.5)
    assert [when for _, _, when in placed] == [(0.0, 1.0)]


def test_a_later_stage_whose_own_reductions_and_update_take_longer_than_the_first_s_is_cut_and_says_so():
    uneven = timeline(*asked(**(PIPELINE | {"runtime": "megatron", "stage_layers": "1,1,1,37"})))
    *others, last = uneven.stages

    assert last.unplaced_s > 0
    assert all(stage.unplaced_s == 0 for stage in others)
    assert max(span.end_s for span in last.spans) == pytest.approx(uneven.step_s)
    assert all(stage.unplaced_s == 0 for stage in drawn("1f1b")[1].stages)


def test_a_step_time_is_the_same_with_its_parts_and_without():
    case, known = named("interleaved")
    time, _ = step_parts(case, known)

    assert isinstance(time, StepTime)
    assert timeline(case, known).time == time
