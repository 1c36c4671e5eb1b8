"""Step time: FLOP that a reader checks by hand, limits, and what is hidden beside compute."""

from __future__ import annotations

import msgspec
import pytest

from planner.ask.question import Question, case_of
from planner.engines import engine_of
from planner.figures.comm import collective_seconds, traffic
from planner.figures.passes import coefficients
from planner.figures.steptime import exposed_seconds, step_parts, step_time, throughput
from planner.spec import Layout, TrainingJob, presets
from planner.spec.calibration import calibration

FSDP = Layout(engine="fsdp2", dp_shard=32, zero_stage=3)
KNOWN = calibration()


def asked(gpu: str = "dgx-h100", gpus: int = 32, **job: object) -> Question:
    return Question(presets.model("7b"), presets.cluster(gpu, gpus), TrainingJob(**job), KNOWN)


def timed(layout: Layout, question: Question | None = None):
    return step_time(case_of(question or asked(), layout), KNOWN)


def changed(layout: Layout, **fields: object) -> Layout:
    return msgspec.structs.replace(layout, **fields)


def test_four_nodes_of_eight_with_batch_8_and_accumulation_2_see_512_sequences():
    assert Layout(engine="ddp", dp_replicate=32, micro_batch_size=8, grad_accum=2).global_batch_size == 512


def test_a_7b_token_costs_6_flop_a_matrix_element_and_half_of_palms_attention():
    """Matrices: all weights but the token table and the norms."""
    matrices = 6_738_415_616 - 32_000 * 4096 - (2 * 32 + 1) * 4096
    attention = 12 * 32 * 4096 * 2048 / 2

    assert timed(FSDP).model_flops == pytest.approx(2048 * (6 * matrices + attention))


def test_recomputation_adds_one_forward_of_the_layers_to_the_hardware_only():
    plain, again = timed(FSDP), timed(changed(FSDP, recompute="full"))
    layers = 6_738_415_616 - 2 * 32_000 * 4096 - (2 * 32 + 1) * 4096

    assert again.model_flops == plain.model_flops == plain.hardware_flops
    assert again.hardware_flops - plain.hardware_flops == pytest.approx(2048 * (2 * layers + 2 * 32 * 4096 * 2048))
    assert again.compute_s > plain.compute_s


def test_lora_spares_the_weight_gradients_of_a_frozen_base():
    full, lora = timed(FSDP), timed(FSDP, asked(method="lora"))

    assert lora.model_flops / full.model_flops == pytest.approx(4 / 6, abs=0.02)
    assert lora.optimizer_s < full.optimizer_s / 500


def test_mfu_is_model_flop_over_the_peak_and_hfu_counts_recomputation():
    case = case_of(asked(), changed(FSDP, recompute="full"))
    time = step_time(case, KNOWN)
    speed = throughput(case, time)

    assert speed.mfu == pytest.approx(time.model_flops / time.step_s / 989.4e12)
    assert speed.hfu / speed.mfu == pytest.approx(time.hardware_flops / time.model_flops)
    assert speed.tokens_per_s == pytest.approx(32 * 2048 / time.step_s)
    assert 0 < speed.mfu < speed.hfu < coefficients(case, KNOWN).compute.matmul_share


def test_no_mfu_and_no_time_where_the_rate_is_unknown():
    """A V100 has no bf16 units."""
    case = case_of(asked("v100", 8), changed(FSDP, dp_shard=8))
    speed = throughput(case, step_time(case, KNOWN))

    assert step_time(case, KNOWN).step_s is None
    assert (speed.mfu, speed.hfu, speed.tokens_per_s) == (None, None, None)


@pytest.mark.parametrize(
    "layout", [FSDP, Layout(engine="ddp", dp_replicate=32), Layout(engine="deepspeed", dp_shard=32, zero_stage=2)]
)
@pytest.mark.parametrize("accum", [1, 4])
def test_exposed_communication_is_never_more_than_all_and_never_nothing(layout: Layout, accum: int):
    time = timed(changed(layout, grad_accum=accum))

    assert 0 < time.exposed_comm_s <= time.comm_s
    assert time.step_s == pytest.approx(time.compute_s + time.exposed_comm_s + time.bubble_s + time.optimizer_s)
    assert time.low_s < time.step_s < time.high_s


def test_a_reduction_once_a_step_hides_beside_one_micro_batch_only():
    """Raw seconds stay the same; what hides grows by no more than each micro-batch's adding up of gradients."""
    layout = Layout(engine="ddp", dp_replicate=32)
    one, many = timed(layout), timed(changed(layout, grad_accum=16))

    assert many.comm_s == pytest.approx(one.comm_s)
    added_up_s = (many.compute_s - 16 * one.compute_s) / 16
    assert one.exposed_comm_s - added_up_s <= many.exposed_comm_s * (1 + 1e-9)
    assert many.exposed_comm_s <= one.exposed_comm_s


def test_all_but_the_last_call_hide_when_there_is_compute_enough():
    assert exposed_seconds(10.0, 2.0, 100.0) == 2.0
    assert exposed_seconds(10.0, 2.0, 4.0) == 6.0


def test_slower_links_never_make_a_step_faster():
    fast = asked()
    slow_link = msgspec.structs.replace(fast.cluster.inter_link, bytes_per_s_per_direction=1e9)
    slow = msgspec.structs.replace(fast, cluster=msgspec.structs.replace(fast.cluster, inter_link=slow_link))

    assert timed(FSDP, slow).comm_s > timed(FSDP, fast).comm_s
    assert timed(FSDP, slow).step_s > timed(FSDP, fast).step_s


def test_tensor_ranks_wait_for_every_sum_that_the_engine_makes():
    layout = Layout(engine="deepspeed-autotp", tp=8, zero_stage=1, micro_batch_size=1, grad_accum=2)
    question = asked(gpus=8)
    case = case_of(question, layout)
    sent = [call for call in engine_of(layout.engine).collectives(case) if call.axis == "tp"]
    known = coefficients(case, KNOWN)
    sent_s = sum(collective_seconds(call, case.cluster.levels, known) for call in traffic(case, sent))
    assert timed(layout, question).exposed_comm_s == pytest.approx(sent_s)


def test_without_streams_only_what_is_started_asynchronously_hides():
    cluster = presets.cluster("localhost", nodes=2, gpus_per_node=1)
    question = msgspec.structs.replace(asked(gpus=8), cluster=cluster)

    def hidden_s(layout: Layout) -> float:
        time = timed(layout, question)
        return float(time.comm_s - time.exposed_comm_s)

    assert hidden_s(Layout(engine="fsdp2", dp_shard=2, zero_stage=3, micro_batch_size=1)) == pytest.approx(0.0)
    assert hidden_s(Layout(engine="ddp", dp_replicate=2, micro_batch_size=1)) > 0


@pytest.mark.parametrize("engine", ["deepspeed-pipeline", "megatron", "nanotron"])
@pytest.mark.parametrize("pp", [2, 4])
def test_the_sum_of_a_tied_tables_gradients_over_the_stages_is_waited_for(engine: str, pp: int):
    """A send between stages belongs to a pass; the table's sum comes after all of them."""
    question = Question(presets.model("gemma-2-9b"), presets.cluster("dgx-h100", 16), TrainingJob(), KNOWN)
    layout = Layout(engine=engine, pp=pp, dp_shard=16 // pp, zero_stage=1, grad_accum=8)
    parts = step_parts(case_of(question, layout), KNOWN)[1]
    assert parts is not None
    sums = [one for one in parts.waits.phases["backward"].calls if one.call.axis.startswith("pp")]

    assert len(sums) == 1 and sums[0].call.payload_bytes >= 256_000 * 3584 * 2
    assert parts.waits.phases["backward"].waited_s >= sums[0].seconds > 0
