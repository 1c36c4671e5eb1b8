"""Methods, precisions and batches: QLoRA's bytes, fp16 and fp8, padding and packing, and what cannot be combined."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from families import whole_model

from planner.ask.options import question
from planner.ask.question import Question, case_of
from planner.basics.errors import PlannerError
from planner.decide.strategies import answer
from planner.engines import deepspeed_common, engine_of
from planner.figures.memory import memory_breakdown
from planner.figures.passes import matmul_rate, peak_flops
from planner.figures.steptime import step_time, throughput
from planner.figures.work import unit_work
from planner.inventory import TERMS, Compute, Moment, walk
from planner.inventory.narrow import nf4_scale_bytes
from planner.parallelism.case import Case
from planner.parallelism.rule import check
from planner.spec import Layout, Lora, Quantization, TrainingJob, presets
from planner.spec.calibration import calibration

DDP = Layout(engine="ddp", dp_replicate=8)
FSDP = Layout(engine="fsdp2", dp_shard=8, zero_stage=3)
ZERO = {stage: Layout(engine="deepspeed", dp_shard=8, zero_stage=stage) for stage in (1, 2, 3)}

LAYER_MATRICES = 4 * 4096**2 + 3 * 4096 * 11008
QUANTISED = 32 * LAYER_MATRICES
SIXTEEN_BIT = 6_738_415_616 - QUANTISED
"""Llama 2 7B: 6.48e9 weights are quantised; 0.26e9 of embedding, head and norms are not."""


def ask(layout: Layout, gpu: str = "dgx-h100", **job: Any) -> Case:
    asked = Question(presets.model("7b"), presets.cluster(gpu, 8), TrainingJob(**job), calibration())
    return case_of(asked, layout)


def peak_term(case: Case, phase: str, term: str) -> float:
    return next(one.terms[term] for one in memory_breakdown(case).phases if one.phase == phase)


# -- QLoRA ---------------------------------------------------------------------------------------------------------


def test_scales_cost_a_sixteenth_of_a_byte_and_a_quarter_of_that_when_quantised_again():
    assert nf4_scale_bytes(1e9, False) / 1e9 == 0.0625
    assert nf4_scale_bytes(1e9, True) / 1e9 == pytest.approx(0.0159, abs=0.00004)


@pytest.mark.parametrize(("double", "scale"), [(True, 1 / 64 + 4 / 64 / 256), (False, 4 / 64)])
def test_qloras_7b_base_is_4_bit_layers_beside_16_bit_norms_embedding_and_head(double: bool, scale: float):
    lora = Lora(rank=8, upcast_adapters=False)
    case = ask(DDP, method="qlora", lora=lora, quantization=Quantization(double=double))

    tables = 7 * 32 * (64 + (1028 if double else 0))
    by_hand = QUANTISED * (0.5 + scale) + tables + SIXTEEN_BIT * 2 + 4_194_304 * 2
    assert peak_term(case, "optimizer", "params") == pytest.approx(by_hand)
    assert by_hand / 1e9 == pytest.approx(3.88 if double else 4.18, abs=0.01)


def test_fsdp2_shards_4_bit_codes_and_keeps_their_scales_whole():
    whole, split = (peak_term(ask(layout, method="qlora"), "optimizer", "params") for layout in (DDP, FSDP))
    scales = nf4_scale_bytes(QUANTISED, True)

    assert split - scales == pytest.approx((whole - scales) / 8, rel=1e-3)


@pytest.mark.parametrize("stage", [1, 2])
def test_zero_1_and_2_hold_the_4_bit_base_whole(stage: int):
    lora = Lora(upcast_adapters=False)
    params = peak_term(ask(ZERO[stage], method="qlora", lora=lora), "optimizer", "params")

    assert params == pytest.approx(peak_term(ask(DDP, method="qlora", lora=lora), "optimizer", "params"), rel=1e-5)


@pytest.mark.parametrize("layout", [ZERO[3], FSDP], ids=["zero3", "fsdp2"])
def test_no_gpu_has_the_sharded_4_bit_base_whole_not_even_while_it_loads(layout: Layout):
    case = ask(layout, method="qlora")
    whole = peak_term(ask(DDP, method="qlora", lora=Lora(upcast_adapters=False)), "optimizer", "params")
    load = next(phase for phase in memory_breakdown(case).phases if phase.phase == "load")
    largest = max(weight.elements for weight in case.weights()) * 2

    assert peak_term(case, "optimizer", "params") < whole / 5
    assert load.total <= peak_term(case, "optimizer", "params") * 1.3 + 2 * largest


def test_qlora_gathers_a_quarter_of_loras_bytes_but_for_the_16_bit_ends():
    def gathered(method: str) -> float:
        calls = engine_of("fsdp2").collectives(ask(FSDP, method=method))
        return sum(float(call.payload_bytes) for call in calls if call.op == "all_gather" and call.unit == "layer")

    assert gathered("qlora") / gathered("lora") == pytest.approx(0.25, abs=0.005)


def biggest_temporary(compute: Compute, phase: str) -> float:
    def fixed(moment: Moment) -> float:
        return moment.live[TERMS.index("temporaries")].fixed

    model = presets.model("7b")
    return max(fixed(one) for one in walk(model, compute, whole_model(model)).moments if one.phase == phase)


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(("form", "scales"), [("nf4", 0), ("nf4-double", 4 / 64)])
def test_one_unpacked_weight_at_a_time_lives_in_forward_and_in_backward(phase: str, form: str, scales: float):
    compute = Compute(2, 2, lora=Lora(), adapter_bytes=2, layer_form=form)

    assert biggest_temporary(compute, phase) == pytest.approx((2 + scales) * 4096 * 11008, rel=1e-6)


def test_unpacking_costs_time_in_both_passes_and_no_flop():
    lora, qlora = (step_time(ask(DDP, method=method), calibration()) for method in ("lora", "qlora"))

    assert qlora.model_flops == lora.model_flops
    moved = 2 * QUANTISED * (0.5 + 1 / 64 + 4 / 64 / 256 + 2)
    share = calibration().of("accelerate-ddp", "h100-sxm-80gb", "cuda").compute.memory_share
    assert qlora.compute_s - lora.compute_s == pytest.approx(moved / 3350e9 / share, rel=1e-6)


# -- fp16 and fp8 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [DDP, FSDP, ZERO[1], ZERO[3]])
def test_fp16_holds_what_bf16_holds_but_zero_1_and_2_accumulate_in_its_own_format(layout: Layout):
    phases = [memory_breakdown(ask(layout, precision=precision)).phases for precision in ("fp16", "bf16")]

    for fp16, bf16 in zip(*phases, strict=True):
        assert fp16.terms["params"] == bf16.terms["params"]
        assert fp16.terms["optimizer"] == bf16.terms["optimizer"]
        assert fp16.total <= bf16.total


def test_deepspeed_fp16_is_the_zero_papers_2_2_12():
    states = deepspeed_common.states(ask(ZERO[1], precision="fp16"))

    assert (states.weight, states.grad, states.optimizer) == (2, 2, 12)


def test_fp8_runs_layers_at_the_8_bit_rate_and_attention_and_head_at_the_16_bit_one():
    case = ask(DDP, precision="fp8")
    fast, slow = 1978.9e12, 989.4e12
    layers, rest = 2 * 32 * LAYER_MATRICES, 2 * 32_000 * 4096 + 2 * 32 * 4096 * 2048

    assert peak_flops(case) == fast
    assert matmul_rate(case, unit_work(case)) == pytest.approx((layers + rest) / (layers / fast + rest / slow))


def test_fp8_keeps_fp32_weights_and_16_bit_activations():
    """torchao's dynamic scaling saves 16-bit inputs and casts again in backward."""
    fp8, bf16 = (memory_breakdown(ask(DDP, precision=precision)) for precision in ("fp8", "bf16"))

    for term in ("params", "grads", "optimizer", "activations"):
        assert fp8.peak.terms[term] == bf16.peak.terms[term]


def test_fp8_casts_weight_and_input_of_one_product_at_a_time():
    assert biggest_temporary(Compute(2, 2, layer_form="fp8"), "forward") == 4096 * 11008


def test_an_unknown_fp8_rate_predicts_no_time():
    case = ask(DDP, precision="fp8")
    bare = msgspec.structs.replace(case.cluster, gpu=msgspec.structs.replace(case.cluster.gpu, flops_per_s={}))
    unknown = Case(case.model, case.job, case.layout, bare, case.runtime)

    check(unknown, engine_of("ddp").rules)
    assert step_time(unknown, calibration()).step_s is None


# -- batches -------------------------------------------------------------------------------------------------------


def test_padding_costs_as_much_as_tokens_and_only_the_documents_are_useful():
    full, padded = ask(DDP), ask(DDP, mean_seq_len=512)
    times = [step_time(case, calibration()) for case in (full, padded)]
    speed = throughput(padded, times[1])

    assert times[0].step_s == times[1].step_s
    assert speed.useful_tokens_per_s == speed.tokens_per_s / 4


def test_packed_documents_attend_to_themselves_and_waste_nothing():
    full, packed = ask(DDP), ask(DDP, packing="packed", mean_seq_len=512)
    times = [step_time(case, calibration()) for case in (full, packed)]
    speed = throughput(packed, times[1])

    attention = 3 * 2 * 32 * 4096 * 2048 * 2048  # one sequence, forward and backward
    assert times[0].model_flops - times[1].model_flops == pytest.approx(attention * 3 / 4)
    assert speed.useful_tokens_per_s == speed.tokens_per_s


def test_documents_as_long_as_the_sequence_change_nothing_but_that_a_mask_hides_half_of_what_it_has_computed():
    plain = step_time(ask(DDP), calibration())
    padded, masked = (ask(DDP, packing=packing, mean_seq_len=2048) for packing in ("padded", "packed"))
    parts = msgspec.structs.replace(masked.runtime.parts, packing="varlen")
    told = Case(
        masked.model, masked.job, masked.layout, masked.cluster, msgspec.structs.replace(masked.runtime, parts=parts)
    )

    assert step_time(padded, calibration()) == step_time(told, calibration()) == plain
    under_mask = step_time(masked, calibration())
    assert under_mask.model_flops == plain.model_flops
    causal = 3 * 2 * 32 * 4096 * 2048 * 2048  # one sequence, forward and backward
    assert under_mask.hardware_flops - plain.hardware_flops == pytest.approx(causal)
    assert under_mask.step_s > plain.step_s
    for case in (padded, masked):
        assert throughput(case, step_time(case, calibration())).useful_tokens_per_s is not None


# -- what cannot be combined ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({"precision": "fp8", "gpu": "a100-sxm-80gb"}, ("precision=fp8", "a100-sxm-80gb", "bf16")),
        ({"precision": "fp8", "cluster": "localhost"}, ("precision=fp8", "bf16")),
        ({"precision": "fp8", "method": "lora"}, ("precision=fp8", "lora", "method full")),
        ({"precision": "fp8", "dp_shard": "8", "zero_stage": "2"}, ("precision=fp8", "ZeRO", "fsdp2")),
        ({"method": "qlora", "quant_storage": "uint8", "dp_shard": "8"}, ("quant_storage=uint8", "FSDP2", "bf16")),
        ({"optimizer": "adamw-8bit", "dp_shard": "8"}, ("optimizer=adamw-8bit", "engine ddp")),
        ({"optimizer": "adamw", "momentum": "0.9"}, ("momentum=0.9", "sgd")),
        ({"double_quant": False, "method": "lora"}, ("double_quant", "qlora")),
        ({"mean_seq_len": "4096"}, ("mean_seq_len=4096", "2048")),
    ],
)
def test_contradictions_name_the_value_the_rule_and_a_way_out(given: dict[str, Any], parts: tuple[str, ...]):
    place = {} if "cluster" in given else {"gpus": "8"}
    with pytest.raises(PlannerError) as refusal:
        answer(question({"model": "7b", **place, **given}))

    for part in parts:
        assert part in refusal.value.sentence


def test_a_strategy_that_cannot_use_the_optimizer_says_why():
    found = answer(question({"model": "7b", "gpus": "32", "optimizer": "adamw-8bit"}))

    assert "FSDP2's sharded tensors" in found.unavailable["fsdp"]
    assert {"ddp", "zero1", "zero2", "zero3"} <= {one.strategy for one in found.estimates}


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"optimizer": "muon"}, "muon"),
        ({"optimizer": "lion"}, "lion"),
        ({"precision": "fp16"}, "fp16"),
        ({"precision": "fp8"}, "fp8"),
    ],
)
def test_what_the_trainer_cannot_run_is_planned_but_never_launchable(given: dict[str, str], word: str):
    found = answer(question({"model": "tiny", "gpus": "8", "seq_len": "512", "method": "full", **given}))

    assert found.estimates
    assert all(not one.launchable and word in str(one.refusal) for one in found.estimates)
