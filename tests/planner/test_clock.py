"""Claims about what each coefficient of a calibration does to a step's time.

Not here: where coefficients come from (test_calibration.py), or collectives on links (test_linktime.py).
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from planner.ask.question import Question, case_of
from planner.decide.candidates import passed_seconds
from planner.engines.base import Call
from planner.figures.comm import traffic
from planner.figures.conditions import NONE, Conditions, polls_of
from planner.figures.kernels.products import Product, is_aligned, unaligned_seconds
from planner.figures.linktime import collective_seconds
from planner.figures.passes import coefficients
from planner.figures.steptime import StepTime, least_loads, step_parts, step_time
from planner.figures.work import unit_work
from planner.parallelism.case import Case
from planner.parallelism.pipeline import boundary_bytes
from planner.spec import Layout, TrainingJob, presets
from planner.spec.calibration import Calibration, ComputeEntry, OverlapEntry, calibration

NAKED = {"half_size": 0.0, "operation_s": 0.0}


def known(overlap: dict[str, float] | None = None, **compute: float) -> Calibration:
    return Calibration(
        name="test",
        compute=(ComputeEntry(source="test", **(NAKED | compute)),),
        overlap=(OverlapEntry(source="test", **(overlap or {})),),
        base=calibration(),
    )


def timed(
    given: Calibration,
    layout: Layout,
    cluster: str = "dgx-h100",
    gpus: int = 8,
    conditions: Conditions = NONE,
    **job: object,
) -> StepTime:
    asked = Question(presets.model("1b"), presets.cluster(cluster, gpus), TrainingJob(**job), given)
    return step_time(case_of(asked, layout), given, conditions=conditions)


DDP = Layout(engine="ddp", dp_replicate=8)
CPU = Layout(engine="ddp", dp_replicate=2)


def test_a_gpu_hides_the_starting_of_operations_and_a_cpu_does_not():
    none, some, many = (timed(known(operation_s=each), DDP).compute_s for each in (0.0, 1e-7, 1e-3))
    idle, busy = (timed(known(operation_s=each), CPU, "localhost", 2).compute_s for each in (0.0, 1e-7))

    assert none == some < many
    assert busy > idle


def test_where_starting_decides_larger_micro_batches_cost_nothing_more():
    one, four = (
        timed(known(operation_s=1.0), msgspec.structs.replace(DDP, micro_batch_size=micro)).compute_s
        for micro in (1, 4)
    )

    assert one == four


def test_small_products_reach_less_of_the_peak_rate_than_large_ones():
    def lost(micro: int) -> float:
        layout = msgspec.structs.replace(DDP, micro_batch_size=micro)
        plain, curved = (
            timed(known(half_size=half, pace=0.0), layout, seq_len=1024).compute_s for half in (0.0, 500.0)
        )
        return float(curved / plain)

    assert lost(1) > lost(4) > lost(64) > 1


def test_a_cube_of_three_half_sizes_reaches_half_the_share():
    from planner.figures.passes import matmul_seconds

    size = 3 * 500.0
    full, curved = (matmul_seconds(2 * size**3, 3 * size**2, 1e15, 0.8, half) for half in (0.0, 500.0))

    assert curved == pytest.approx(2 * full)


def test_communication_that_is_not_hidden_is_waited_for():
    hidden, half, none = (timed(known({"hidden_share": share}), DDP).exposed_comm_s for share in (1.0, 0.5, 0.0))
    raw = timed(known(), DDP).comm_s

    assert hidden < half < none == pytest.approx(raw)


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


def test_an_older_calibrations_straggling_is_read_and_changes_nothing(tmp_path: Path):
    def step_s(straggling: str) -> float:
        file = tmp_path / f"old{len(straggling)}.toml"
        file.write_text(f'[[overlap]]\nhidden_share = 1.0\n{straggling}source = "of before"\n')
        return float(timed(calibration(str(file)), SPLIT, gpus=16).step_s)

    assert step_s("straggle_s = 1.0\n") == step_s("")


def test_accumulated_gradients_are_added_up_in_every_micro_batch_but_the_first():
    def moved(accum: int) -> float:
        asked = Question(presets.model("1b"), presets.cluster("dgx-h100", 8), TrainingJob(), calibration())
        case = case_of(asked, msgspec.structs.replace(DDP, grad_accum=accum))
        return float(accum * unit_work(case)["layer"].backward.fixed_bytes)

    once, four = moved(1), moved(4)
    assert once == 0
    assert four == pytest.approx(3 * moved(2))


@pytest.mark.parametrize("micro", [1, 4, 64])
@pytest.mark.parametrize("method", ["full", "qlora"])
def test_the_searchs_floor_is_below_the_compute_of_every_micro_batch(micro: int, method: str):
    given = calibration()
    layout = msgspec.structs.replace(DDP, micro_batch_size=micro)
    asked = Question(presets.model("1b"), presets.cluster("dgx-h100", 8), TrainingJob(method=method), given)
    one = case_of(asked, msgspec.structs.replace(layout, micro_batch_size=1))
    floor = passed_seconds(least_loads(one, given), one.whole_repeats)

    assert 0 < floor <= step_time(case_of(asked, layout), given).compute_s / micro


PIPED = Layout(engine="deepspeed-pipeline", tp=4, pp=2, dp_shard=2, grad_accum=8, zero_stage=1)


def test_a_host_that_waits_for_each_operation_adds_what_starting_takes():
    free, waited = (
        timed(known(operation_s=1e-7), DDP, conditions=Conditions(blocking=blocking)).compute_s
        for blocking in (False, True)
    )
    asked = Question(presets.model("1b"), presets.cluster("dgx-h100", 8), TrainingJob(), calibration())
    case = case_of(asked, DDP)
    started = sum(
        case.whole_repeats[unit] * (one.forward.operations + one.backward.operations + one.again.operations)
        for unit, one in unit_work(case).items()
    )

    assert waited - free == pytest.approx(1e-7 * started, rel=1e-3)
    assert timed(known(operation_s=0.0), DDP, conditions=Conditions(blocking=True)).compute_s == pytest.approx(free)


def test_a_send_in_parts_takes_its_part_of_the_time_and_a_gather():
    def send_s(conditions: Conditions) -> float:
        asked = Question(presets.model("1b"), presets.cluster("dgx-h100", 16), TrainingJob(), calibration())
        _, parts = step_parts(case_of(asked, PIPED), known(), conditions=conditions)
        return float(parts.chunks.send_s)

    whole, parted = send_s(NONE), send_s(Conditions(parted_sends=True))
    case = case_of(Question(presets.model("1b"), presets.cluster("dgx-h100", 16), TrainingJob(), calibration()), PIPED)
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
    """Heads of 100 elements are no multiple of eight: two products of 2 s^2 h FLOP forward, four backward."""
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
    import numpy as np

    assert unaligned_seconds(1000, 500, 200, 1e9) == pytest.approx(0.2)
    assert list(unaligned_seconds(np.array([1000, 2000]), 500, 200, 1e9)) == pytest.approx([0.2, 0.4])
    assert [bool(is_aligned(Product(1, n, k))) for n, k in ((64, 104), (64, 108), (150, 64))] == [True, False, False]
    assert list(is_aligned(Product(1, np.array([64, 108]), 16))) == [True, False]
