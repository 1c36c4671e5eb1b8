"""Claims about what conditions of published runs do to a step's time.

Not here: which rows have which conditions (test_published.py), or a step without any (tests/planner/test_clock.py).
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from planner.ask.question import Question
from planner.ask.question import case_of as case_of_layout
from planner.engines.base import Call
from planner.figures.comm import collective_seconds, traffic
from planner.figures.kernels.products import Product
from planner.figures.kernels.step import Attention, kernels_seconds
from planner.figures.passes import coefficients, loads_of, waiting_of
from planner.figures.passes import device_of as device_for
from planner.figures.steptime import StepTime
from planner.figures.steptime import step_parts as step_parts_of_any
from planner.figures.work import unit_work
from planner.parallelism.case import Case
from planner.parallelism.pipeline import boundary_bytes
from planner.spec import Layout, TrainingJob, presets
from planner.spec.calibration import UNCALIBRATED, Calibration, ComputeEntry, OverlapEntry, calibration
from tests.truth.published.conditions import (
    NONE,
    Conditions,
    is_aligned,
    polls_of,
    slowed,
    step_parts,
    unaligned_seconds,
)

NAKED = {"half_size": 0.0, "operation_s": 0.0}
GUESSES = calibration(UNCALIBRATED)
DDP = Layout(engine="ddp", dp_replicate=8)


def known(**compute: float) -> Calibration:
    return Calibration(
        name="test",
        compute=(ComputeEntry(source="test", **(NAKED | compute)),),
        overlap=(OverlapEntry(source="test"),),
        base=calibration(),
    )


def step_time(case: Case, given: Calibration, conditions: Conditions = NONE) -> StepTime:
    return conditions.step_time(case, given)


def timed(given: Calibration, layout: Layout, gpus: int = 8, conditions: Conditions = NONE) -> StepTime:
    asked = Question(presets.model("1b"), presets.cluster("dgx-h100", gpus), TrainingJob(), given)
    return step_time(case_of_layout(asked, layout), given, conditions)


def case_of(model: str = "qwen3-235b-a22b", **fields: Any) -> Case:
    shape = {"ep": 8, "dp_shard": 128, "zero_stage": 1, "grad_accum": 2}
    layout = Layout(engine="megatron", **shape | fields)
    job = TrainingJob(seq_len=4096, precision="bf16")
    return Case(
        presets.model(model), job, layout, presets.cluster("dgx-h100", gpus=128), presets.runtime("megatron-core")
    )


@pytest.mark.parametrize("layout", [DDP, Layout(engine="deepspeed-pipeline", tp=4, pp=2, dp_shard=2, grad_accum=8)])
def test_conditions_that_say_nothing_add_up_to_the_step_of_any_run(layout: Layout):
    """Through the sum under conditions: a share of buckets of calls that take no time."""
    asked = Question(presets.model("1b"), presets.cluster("dgx-h100", layout.world_size), TrainingJob(), GUESSES)
    case = case_of_layout(asked, layout)

    assert step_parts(case, GUESSES, Conditions(bucket_share=1.0))[0] == step_parts_of_any(case, GUESSES)[0]


CALLS = Conditions(call_s=1.0)


SPLIT = Layout(engine="nanotron", tp=8, pp=2, grad_accum=4, zero_stage=1)


def test_a_host_that_takes_long_to_call_decides_what_a_layer_takes_and_adds_nothing_below():
    plain, within, beyond = (
        timed(known(), SPLIT, gpus=16, conditions=Conditions(call_s=each)).step_s for each in (0.0, 1e-9, 1.0)
    )

    assert plain == within < beyond


def test_a_hosts_calls_take_as_long_in_larger_micro_batches():
    one, four = (
        timed(known(), msgspec.structs.replace(SPLIT, micro_batch_size=micro), gpus=16, conditions=CALLS)
        for micro in (1, 4)
    )

    assert one.compute_s + one.exposed_comm_s + one.bubble_s == pytest.approx(
        four.compute_s + four.exposed_comm_s + four.bubble_s, rel=1e-3
    )


def test_a_call_takes_longer_by_the_ranks_of_its_group_and_where_it_leaves_the_node():
    inside, outside = Conditions(call_s=1.0), Conditions(call_s=1.0, crossing=1.5)

    def taken(tp: int, conditions: Conditions) -> float:
        layout = Layout(engine="nanotron", tp=tp, pp=2, grad_accum=4, zero_stage=1)
        return float(timed(known(), layout, gpus=2 * tp, conditions=conditions).step_s)

    assert taken(8, inside) == taken(8, outside) == pytest.approx(2 * taken(4, inside), rel=1e-3)
    assert taken(16, outside) == pytest.approx(3 * taken(8, inside), rel=1e-3)


def test_groups_of_one_rank_call_nobody():
    alone = Layout(engine="nanotron", pp=2, dp_shard=8, grad_accum=4, zero_stage=1)

    assert timed(known(), alone, gpus=16, conditions=CALLS) == timed(known(), alone, gpus=16)


def test_buckets_of_gradients_call_too_and_one_buffer_does_not():
    conditions = Conditions(call_s=1.0, bucket_share=0.25)

    def longer(zero: int) -> float:
        ranks = {"dp_replicate": 8} if zero == 0 else {"dp_shard": 8}
        layout = Layout(engine="nanotron", pp=2, grad_accum=4, zero_stage=zero, **ranks)
        return float(
            timed(known(), layout, gpus=16, conditions=conditions).comm_s - timed(known(), layout, gpus=16).comm_s
        )

    buckets = longer(0) / (0.25 * 8)
    assert buckets == pytest.approx(round(buckets)) and buckets > 1
    assert longer(1) == 0


def test_polled_sends_by_hand():
    """Two stages, four micro-batches: each pass has one neighbour, so 4 and 2 waits; 1F1B of equal stages takes
    (4 + 2 - 1) forwards and as many backwards."""
    polled = Conditions(poll_s=100.0, forward_polls=4, backward_polls=2)
    none, some = (timed(known(), SPLIT, gpus=16, conditions=each).step_s for each in (Conditions(), polled))

    assert some == pytest.approx(5 * 600.0, rel=1e-3)
    assert none < 5


def test_middle_stages_wait_for_two_neighbours():
    polled = Conditions(poll_s=100.0, forward_polls=4, backward_polls=2)

    assert [polls_of(polled, 3, stage) for stage in range(3)] == [(400, 200), (800, 400), (400, 200)]
    assert polls_of(polled, 1, 0) == (0, 0)


PIPED = Layout(engine="deepspeed-pipeline", tp=4, pp=2, dp_shard=2, grad_accum=8, zero_stage=1)


def test_a_host_that_waits_for_each_operation_adds_what_starting_takes():
    free, waited = (
        timed(known(operation_s=1e-7), DDP, conditions=Conditions(blocking=blocking)).compute_s
        for blocking in (False, True)
    )
    asked = Question(presets.model("1b"), presets.cluster("dgx-h100", 8), TrainingJob(), calibration())
    case = case_of_layout(asked, DDP)
    started = sum(
        case.whole_repeats[unit] * (one.forward.operations + one.backward.operations + one.again.operations)
        for unit, one in unit_work(case).items()
    )

    assert waited - free == pytest.approx(1e-7 * started, rel=1e-3)
    assert timed(known(operation_s=0.0), DDP, conditions=Conditions(blocking=True)).compute_s == pytest.approx(free)


def test_a_send_in_parts_takes_its_part_of_the_time_and_a_gather():
    def send_s(conditions: Conditions) -> float:
        asked = Question(presets.model("1b"), presets.cluster("dgx-h100", 16), TrainingJob(), calibration())
        _, parts = step_parts(case_of_layout(asked, PIPED), known(), conditions)
        return float(parts.chunks.send_s)

    whole, parted = send_s(NONE), send_s(Conditions(parted_sends=True))
    case = case_of_layout(
        Question(presets.model("1b"), presets.cluster("dgx-h100", 16), TrainingJob(), calibration()), PIPED
    )
    payload = boundary_bytes(1, case.job.seq_len, case.model.hidden, 2.0, 1)
    sent, gathered = traffic(
        case,
        [
            Call("send", "pp", "boundary", "forward", 1, payload / 4),
            Call("all_gather", "tp", "boundary", "forward", 1, payload),
        ],
    )
    given = coefficients(case, known())

    assert parted < whole
    assert parted == pytest.approx(
        sum(collective_seconds(call, case.cluster.levels, given) for call in (sent, gathered))
    )


def test_products_with_unaligned_rows_run_at_a_share_of_the_scalar_rate():
    """Heads of 100 elements are not multiple of eight: two products of 2 s^2 h FLOP forward, four backward."""
    model = msgspec.structs.replace(presets.model("1b"), heads=20, kv_heads=20, head_dim=100)
    runtime = presets.runtime("megatron-core")
    runtime = msgspec.structs.replace(runtime, parts=msgspec.structs.replace(runtime.parts, attention="unfused"))
    layout = Layout(engine="megatron", dp_shard=8, zero_stage=1)
    case = Case(model, TrainingJob(seq_len=1024), layout, presets.cluster("dgx-a100", 8), runtime)
    naked = known(pace=1.0, attention_pace=1.0)
    tenth, fifth = (
        float(step_time(case, naked, conditions=Conditions(unaligned_share=share)).compute_s) for share in (0.1, 0.2)
    )
    flops, rate = 6 * 2.0 * 1024**2 * 20 * 100 * model.layers, case.cluster.gpu.flops_per_s["fp32"]

    assert tenth - fifth == pytest.approx(flops / (0.1 * rate) - flops / (0.2 * rate))
    assert float(step_time(case, naked).compute_s) < fifth
    aligned = msgspec.structs.replace(case, model=msgspec.structs.replace(model, head_dim=104))
    assert step_time(aligned, naked, conditions=Conditions(unaligned_share=0.1)) == step_time(aligned, naked)


def test_unaligned_products_by_hand_as_numbers_and_columns():
    assert unaligned_seconds(1000, 500, 200, 1e9) == pytest.approx(0.2)
    assert list(unaligned_seconds(np.array([1000, 2000]), 500, 200, 1e9)) == pytest.approx([0.2, 0.4])
    assert [bool(is_aligned(Product(1, n, k))) for n, k in ((64, 104), (64, 108), (150, 64))] == [True, False, False]
    assert list(is_aligned(Product(1, np.array([64, 108]), 16))) == [True, False]


def test_products_of_a_source_take_longer_and_its_attention_does_not() -> None:
    case = case_of("llama-3-8b", ep=1)
    plain, slow = (step_parts(case, GUESSES, conditions)[1] for conditions in (NONE, Conditions(product_times=1.35)))
    assert plain is not None and slow is not None
    device = device_for(case, plain.work, coefficients(case, GUESSES))
    assert device is not None and device.kernels is not None
    kernels = [one for one in plain.work["layer"].forward.kernels if not isinstance(one, Attention)]
    products_s = float(kernels_seconds(kernels, device.kernels))

    gained = slow.busy["layer"].forward_s - plain.busy["layer"].forward_s
    assert float(gained) == pytest.approx(0.35 * products_s)
    assert slowed(coefficients(case, GUESSES), NONE) == coefficients(case, GUESSES)


def test_nothing_that_a_source_sends_alone_is_hidden() -> None:
    case = case_of("llama-3-8b", ep=1, dp_shard=64, tp=2)
    plain, alone = (step_time(case, GUESSES, conditions=each) for each in (NONE, Conditions(sent_alone=True)))

    assert plain.comm_s == alone.comm_s
    assert float(plain.exposed_comm_s) < 0.9 * float(plain.comm_s)
    # A unit of few products waits for its host, with or without what it sends.
    assert 0.995 * float(alone.comm_s) < float(alone.exposed_comm_s) <= float(alone.comm_s)


@pytest.mark.parametrize("ep", [8, 64])
def test_exchanges_beside_the_other_pass_are_waited_for_as_far_as_they_exceed_it(ep: int) -> None:
    case = case_of(ep=ep)
    known = coefficients(case, GUESSES)
    plain, beside = (
        step_parts(case, GUESSES, conditions)[1] for conditions in (NONE, Conditions(exchanges_beside=True))
    )
    assert plain is not None and beside is not None
    device = device_for(case, plain.work, known)
    assert device is not None
    busy = [float(load.busy_s) for load in loads_of(plain.work["layer"], device)]
    waited = waiting_of(case, known)["layer"]  # without tensor ranks a layer waits for exchanges alone

    for place in (0, 1):
        left_s = max(float(waited[place]) - busy[1 - place], 0.0)
        assert beside.units["layer"][place] == pytest.approx(busy[place] + left_s)
    assert (
        step_time(case, GUESSES, conditions=Conditions(exchanges_beside=True)).step_s < step_time(case, GUESSES).step_s
    )


def test_the_host_starts_no_operations_of_layers_that_are_graphs() -> None:
    slow = Calibration(
        name="slow host", base=GUESSES, compute=(ComputeEntry(operation_s=1e-3, source="a trial of this test"),)
    )
    case = case_of()
    quick_s, plain_s, graphed_s = (
        step_time(case, known, conditions=Conditions(layers_graphed=graphed)).step_s
        for known, graphed in ((GUESSES, False), (slow, False), (slow, True))
    )

    assert plain_s > 3 * quick_s
    # What is left of the slow host are the ends' operations.
    assert quick_s < graphed_s < 0.5 * plain_s
