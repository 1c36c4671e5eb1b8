"""Layouts that papers publish, asked of the planner: what they say of stages, memory and speed beside the prediction.

Not here: measured rows of tables (tests/truth).
"""

from __future__ import annotations

from typing import Any

import pytest

from planner.engines import engine_of
from planner.figures.memory import device_bytes, memory_breakdown
from planner.figures.steptime import step_time, throughput
from planner.inventory import parameters
from planner.parallelism.case import Case
from planner.parallelism.rule import check
from planner.spec import Layout, TrainingJob, presets
from planner.spec.calibration import calibration

CALIBRATION = calibration("published")
CLUSTER = presets.cluster("h800-sxm-80gb", 2048)


# -- Llama 3's own layout --------------------------------------------------------------------------------------------
# The Llama 3 Herd of Models (2024): table 4 (tp 8, pp 16, 8,192 GPUs: dp 64, 32 sequences of 8,192 tokens for each of
# them, 430 TFLOP/s and 43 % a GPU; 16,384: dp 128, 16, 400 and 41 %), section 3.3.2: one layer less on the first stage
# and on the last.
HERD = presets.model("llama-3.1-405b")


def herd(gpus: int, **fields: Any) -> Case:
    shape = {
        "engine": "megatron",
        "tp": 8,
        "pp": 16,
        "sequence_parallel": True,
        "zero_stage": 1,
        "counted_ends": "both",
    }
    layout = Layout(**shape | {"dp_shard": gpus // 128, "grad_accum": 2**18 // gpus} | fields)  # type: ignore[arg-type]
    cluster = presets.cluster("llama-3-24k", gpus)
    return Case(HERD, TrainingJob(seq_len=8192), layout, cluster, presets.runtime("megatron-core"))


def test_llama_3_405b_stands_on_16_stages_with_a_layer_less_on_both_ends() -> None:
    layers = [sum(one.layers) for one in herd(16384).every_stage()]

    assert layers == [7, *[8] * 14, 7]


@pytest.mark.parametrize(("gpus", "published"), [(8192, 0.43), (16384, 0.41)])
def test_llama_3_405b_s_published_speed_is_near_that_of_an_interleaved_schedule(gpus: int, published: float) -> None:
    """The paper does not say how many chunks a rank has: its 128 slots leave 1 to 8."""
    found = []
    for virtual in (1, 2, 4, 8):
        one = herd(gpus, virtual_stages=virtual, pp_schedule="interleaved" if virtual > 1 else "1f1b")
        time = step_time(one, CALIBRATION)
        peak = one.cluster.gpu.flops_per_s["bf16"]
        found.append(float(time.model_flops / (time.step_s * peak)))  # type: ignore[operator]

    assert found[0] < min(found[1:])
    assert published / 1.25 < max(found) < published * 1.1


# -- DeepSeek-V3's ---------------------------------------------------------------------------------------------------
# DeepSeek-V3 technical report (2024): 671B parameters; section 3.1 and 3.2: 2,048 H800, 16 pipeline stages, experts
# over 64 ranks, ZeRO-1, no tensor parallelism; section 3.2.3: norms, projections up from the latents and the SwiGLU's
# result are made again in backward; section 3.3: 8-bit products in blocks; table 1: 180,000 GPU hours for 1e12 tokens.
# Which stage has how many of the 61 layers it does not say: cut as Megatron-Bridge does (tests/truth/published).
V3 = presets.model("deepseek-v3")
SPEED = 1e12 / (180_000 * 3600)


def v3(*modules: str) -> Case:
    layout = Layout(
        engine="megatron", pp=16, dp_shard=128, ep=64, zero_stage=1, grad_accum=120, recompute_modules=modules,
        stage_layers=(*[4] * 15, 1),
    )  # fmt: skip
    job = TrainingJob(seq_len=4096, precision="fp8-blockwise", global_batch_size=15360)
    return Case(V3, job, layout, CLUSTER, presets.runtime("megatron-core"))


def test_deepseek_v3_is_answered_on_2048_gpus_as_it_was_trained() -> None:
    one = v3("mla_up_proj", "layernorm", "moe_act")
    check(one, engine_of("megatron").rules)

    assert round(parameters(V3) / 1e9) == 671
    assert [sum(stage.layers) for stage in one.every_stage()] == [4] * 15 + [1]
    assert [stage.layers[0] for stage in one.every_stage()][:2] == [3, 0]  # three dense layers


def test_deepseek_v3_needs_its_recomputation_to_fit_80_gb() -> None:
    """The report trained on cards of 80 GB; its 8-bit caches and 16-bit moments are not in the prediction."""
    card = CLUSTER.gpu.memory_bytes
    plain, own = (
        float(device_bytes(one, memory_breakdown(one).peak.total)) / card
        for one in (v3(), v3("mla_up_proj", "layernorm", "moe_act"))
    )

    assert plain > 1.3
    assert 0.8 < own < 1


def test_deepseek_v3_s_published_speed_is_above_what_is_predicted_without_dualpipe() -> None:
    """Its schedule hides what experts send, and sends it in 8 bits; Megatron-Core's here hides none of it."""
    one = v3("mla_up_proj", "layernorm", "moe_act")
    found = throughput(one, step_time(one, CALIBRATION)).tokens_per_s_per_gpu

    assert found is not None
    assert SPEED / 2 < found < SPEED
