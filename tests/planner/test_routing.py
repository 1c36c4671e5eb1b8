"""What experts' rows move beside their products, worked out by hand, and what published runs took or spared beside."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from planner.figures.byhand import routed_bytes
from planner.figures.kernels.products import cast_seconds, named
from planner.figures.kernels.step import Grouped, grouped_kernel_seconds, kernels_seconds
from planner.figures.passes import coefficients, loads_of, memory_seconds
from planner.figures.passes import device_of as device_for
from planner.figures.work import unit_work
from planner.parallelism.case import Case
from planner.spec import Layout, TrainingJob, presets
from planner.spec.calibration import UNCALIBRATED, calibration

GUESSES = calibration(UNCALIBRATED)
SEQ = 4096
QWEN, GPT_OSS = presets.model("qwen3-235b-a22b"), presets.model("gpt-oss-120b")
BYTES = 2
ROW = QWEN.hidden * BYTES
K = 8
"""Experts of a token."""


def case_of(model: str = "qwen3-235b-a22b", precision: str = "bf16", **fields: Any) -> Case:
    shape = {"ep": 8, "dp_shard": 128, "zero_stage": 1, "grad_accum": 2}
    layout = Layout(engine="megatron", **shape | fields)  # type: ignore[arg-type]
    job = TrainingJob(seq_len=SEQ, precision=precision)  # type: ignore[arg-type]
    return Case(
        presets.model(model), job, layout, presets.cluster("dgx-h100", gpus=128), presets.runtime("megatron-core")
    )


def routed_of(case: Case) -> tuple[float, float]:
    assert case.model.moe is not None
    forward, backward = routed_bytes(case, case.model.moe, BYTES)
    return float(forward), float(backward)


@pytest.mark.parametrize(
    ("ep", "reads_and_writes"),
    [
        (1, 2 * (1 + K)),  # sorted: a token read, its copies written; put back: the other way
        (8, 2 * (1 + K) + 4 * K),  # received rows are sorted by the rank's experts, and back
        (128, 2 * (1 + K)),  # one expert a rank: what arrives is its own
    ],
)
def test_rows_are_sorted_once_or_twice_and_put_back_as_often(ep: int, reads_and_writes: int) -> None:
    assert routed_of(case_of(ep=ep)) == (SEQ * reads_and_writes * ROW,) * 2


def test_sequence_parallelism_splits_the_tokens_before_they_are_routed() -> None:
    both = [routed_of(case_of(tp=tp, dp_shard=128 // tp, sequence_parallel=True))[0] for tp in (1, 4)]

    assert both[0] == 4 * both[1]


def test_columns_are_rows() -> None:
    degrees = np.array([1.0, 8.0, 128.0])
    columns = routed_bytes(case_of(ep=degrees, tp=np.ones(3), dp_shard=128 * np.ones(3)), QWEN.moe, BYTES)[0]

    assert columns.tolist() == [routed_of(case_of(ep=int(one)))[0] for one in degrees]


def test_a_backward_moves_rows_as_often_as_a_forward_and_recomputation_once_more() -> None:
    one, full = (unit_work(case_of(recompute=how))["layer"] for how in ("none", "full"))
    gates = one.forward.moved_bytes - routed_of(case_of())[0]

    assert gates > 0
    assert one.backward.moved_bytes == pytest.approx(2 * gates + routed_of(case_of())[1])
    assert full.again.moved_bytes == pytest.approx(one.forward.moved_bytes)


def test_experts_biases_move_fp32_copies_and_clamped_gates_copies_of_their_input() -> None:
    case = case_of("gpt-oss-120b", ep=64)
    bare = msgspec.structs.replace(case.model, moe=msgspec.structs.replace(case.model.moe, bias=False))
    rows = SEQ * 4
    with_bias, without = routed_of(case), routed_of(msgspec.structs.replace(case, model=bare))

    # forward: 4 + (2 + 4 + 4) + 8 + 6 and 2 x (4 + 4); backward: 6 + 4 + 6 + 24 and 2 x (6 + 4)
    assert with_bias[0] - without[0] == rows * 2880 * (28 + 16)
    assert with_bias[1] - without[1] == rows * 2880 * (40 + 20)


def test_a_bias_of_experts_is_no_product() -> None:
    work = unit_work(case_of("gpt-oss-120b", ep=8))["layer"]
    grouped = [one for one in work.forward.kernels if isinstance(one, Grouped)]

    assert [(one.experts, one.n, one.k) for one in grouped] == [(16, 5760, 2880), (16, 2880, 2880)]
    assert len([one for one in work.backward.kernels if isinstance(one, Grouped)]) == 4


def test_each_experts_bias_is_multiplied_and_added_by_itself() -> None:
    started = [float(unit_work(case_of("gpt-oss-120b", ep=ep))["layer"].forward.operations) for ep in (8, 16)]

    assert started[0] - started[1] == 8 * (2 + 2)  # of eight experts: two products, a multiplication, an addition


def test_rows_of_experts_are_cast_before_a_product_in_8_bits() -> None:
    device = named("b200-180gb")
    assert device is not None
    one = device.times.product("fp8")
    assert one is not None and one.cast_share is not None
    sizes = {"rows": 2048, "n": 3072, "k": 4096}
    cast, plain = (
        kernels_seconds([Grouped(16, **sizes, format=word)], device)
        - grouped_kernel_seconds(2048, 16, 3072, 4096, device, word)
        for word in ("fp8", "bf16")
    )

    assert float(plain) == 0.0
    assert float(cast) == pytest.approx(float(cast_seconds(16 * 2048, 4096, device.bytes_per_s, one.cast_share)))


def test_a_layer_of_experts_takes_its_bytes_longer_at_the_memorys_rate() -> None:
    case = case_of()
    known = coefficients(case, GUESSES)
    work = unit_work(case)
    device = device_for(case, work, known)
    assert device is not None
    layer = work["layer"]
    bare = msgspec.structs.replace(layer.forward, moved_bytes=layer.forward.moved_bytes - routed_of(case)[0])
    both = [loads_of(msgspec.structs.replace(layer, forward=load), device)[0].busy_s for load in (layer.forward, bare)]

    moved_s = memory_seconds(routed_of(case)[0], device.bytes_per_s, known.compute.memory_share)
    assert float(both[0] - both[1]) == pytest.approx(float(moved_s))


@pytest.mark.parametrize(("model", "each"), [("qwen3-235b-a22b", 3 * BYTES), ("gpt-oss-120b", 3 * BYTES + 16)])
def test_gates_alone_run_again_where_a_recipe_recomputes_them(model: str, each: int) -> None:
    """A gate reads two halves and writes one; gpt-oss clamps both halves first."""
    case = case_of(model, recompute_modules=("moe_act",))
    moe = case.model.moe
    assert moe is not None

    assert unit_work(case)["layer"].again.moved_bytes == SEQ * moe.top_k * moe.expert_ffn * each
    assert unit_work(case_of(model))["layer"].again.moved_bytes == 0
