"""Collectives of tensor ranks that run beside products: what is waited for, worked out by hand; what is refused.

Each product's seconds are asked of the kernel times, each call's of the link times; what of them meets is the claim.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from planner.basics.errors import PlannerError
from planner.engines import engine_of
from planner.engines.common import parallel_calls
from planner.figures.accumulation import FUSED_BYTES, added_up_bytes
from planner.figures.comm import collective_seconds, traffic
from planner.figures.kernels.products import Product, named
from planner.figures.kernels.step import kernels_seconds
from planner.figures.passes import coefficients, device_of, waited_of, waiting_of
from planner.figures.steptime import step_time
from planner.figures.timeline import timeline
from planner.figures.work import unit_work
from planner.parallelism.case import Case
from planner.parallelism.rule import check
from planner.spec import Layout, TrainingJob, presets
from planner.spec.calibration import UNCALIBRATED, Calibration, OverlapEntry, calibration
from planner.spec.plan import read_plan
from planner.views.render import layout_text

GUESSES = calibration(UNCALIBRATED)
TP, SEQ = 4, 8192
LLAMA = presets.model("llama-3-70b")
OLD_PLAN = Path(__file__).parents[1] / "executor" / "old" / "run" / "plan.json"


def case_of(
    model: str = "llama-3-70b", engine: str = "megatron", runtime: str = "megatron-core", **fields: Any
) -> Case:
    shape = {"tp": TP, "dp_shard": 16 // TP, "sequence_parallel": True, "zero_stage": 1, "grad_accum": 2}
    layout = Layout(engine=engine, **shape | fields)  # type: ignore[arg-type]
    gpus = 16 if isinstance(layout.tp, int) else 64
    cluster = presets.cluster("dgx-h100", gpus=gpus)
    return Case(presets.model(model), TrainingJob(seq_len=SEQ), layout, cluster, presets.runtime(runtime))


def waited(case: Case, known: Calibration = GUESSES) -> dict[str, tuple[float, float]]:
    """Seconds that one layer waits for its groups, forward and backward."""
    looked_up = coefficients(case, known)
    device = device_of(case, unit_work(case), looked_up)
    assert device is not None
    return {unit: (float(one[0]), float(one[1])) for unit, one in waited_of(case, looked_up, device).items()}


def call_s(case: Case, op: str) -> float:
    """Seconds of one gather or scatter of a layer."""
    found = [one for one in traffic(case, parallel_calls(case)) if (one.unit, one.op) == ("layer", op)]
    seconds = collective_seconds(found[0], case.cluster.levels, coefficients(case, GUESSES))
    return float(seconds) / float(found[0].count)


def product_s(out: int, into: int, rows: int = SEQ) -> float:
    device = named("h100-sxm-80gb")
    assert device is not None
    return float(kernels_seconds([Product(rows, out, into)], device))


HIDDEN, QUERIES, KEYS, FFN = LLAMA.hidden, LLAMA.hidden // TP, LLAMA.kv_heads * LLAMA.head_dim // TP, LLAMA.ffn // TP
PAIRS = (((QUERIES, KEYS, KEYS), QUERIES), ((FFN, FFN), FFN))
"""Outputs of the column-parallel linears of attention and of the MLP, and inputs of the row-parallel one."""


def test_without_the_switch_a_forward_waits_for_all_and_a_backward_hides_its_scatters_beside_weight_gradients() -> None:
    case = case_of()
    gather, scatter = call_s(case, "all_gather"), call_s(case, "reduce_scatter")
    forward, backward = waited(case)["layer"]
    regathers = case.parts.column_input != "kept"

    hidden = sum(min(scatter, sum(product_s(out, HIDDEN) for out in outs)) for outs, _ in PAIRS)
    hidden += regathers * sum(min(gather, sum(product_s(HIDDEN, out) for out in outs)) for outs, _ in PAIRS)
    sent = (2 + 2 * regathers) * gather + 2 * scatter

    assert forward == pytest.approx(2 * gather + 2 * scatter)
    # The weights' gradients have the products' sizes in another order, whose tiles take within a tenth as long.
    assert backward == pytest.approx(sent - hidden, rel=0.1)


def test_with_it_gathers_hide_beside_all_but_one_part_and_scatters_beside_three_of_four() -> None:
    case = case_of(tp_comm_overlap=True)
    gather, scatter = call_s(case, "all_gather"), call_s(case, "reduce_scatter")
    forward, backward = waited(case)["layer"]

    hidden = sum(min(gather, 3 / 4 * sum(product_s(out, HIDDEN) for out in outs)) for outs, _ in PAIRS)
    hidden += sum(min(3 / 4 * scatter, 3 / 4 * product_s(HIDDEN, into)) for _, into in PAIRS)

    assert forward == pytest.approx(2 * gather + 2 * scatter - hidden)
    assert forward > 2 * scatter / 4 * (1 - 1e-9)  # the last part of each scatter
    without = waited(case_of())["layer"]
    assert without[1] - backward == pytest.approx(
        sum(min(gather, 3 / 4 * product_s(into, HIDDEN)) for _, into in PAIRS), rel=1e-6
    )


def test_what_an_overlap_hides_is_the_share_that_a_calibration_says() -> None:
    none, half = (
        Calibration(
            name="some", base=GUESSES, overlap=(OverlapEntry(runtime="megatron-core", hidden_share=share, source="x"),)
        )
        for share in (0.0, 0.5)
    )
    on = case_of(tp_comm_overlap=True)
    sent, all_of_it = waiting_of(on, coefficients(on, GUESSES))["layer"], waited(on)["layer"]

    assert waited(on, none)["layer"] == pytest.approx((float(sent[0]), float(sent[1])))
    assert waited(on, half)["layer"][0] == pytest.approx((float(sent[0]) + all_of_it[0]) / 2)


def test_where_the_forward_runs_again_it_hides_again() -> None:
    on, off = (waited(case_of(recompute="full", tp_comm_overlap=switch))["layer"] for switch in (True, False))
    once_on, once_off = (waited(case_of(tp_comm_overlap=switch))["layer"] for switch in (True, False))

    assert off[1] - on[1] == pytest.approx((once_off[0] - once_on[0]) + (once_off[1] - once_on[1]))


def test_experts_have_no_collective_beside_their_products() -> None:
    mixture = {"model": "qwen3-235b-a22b", "ep": 4}
    on, off = (waited(case_of(tp_comm_overlap=switch, **mixture))["layer"] for switch in (True, False))
    model = presets.model("qwen3-235b-a22b")
    queries = model.heads * model.head_dim // TP

    assert (
        0
        < off[0] - on[0]
        < product_s(model.hidden, queries)
        + sum(product_s(out, model.hidden) for out in (queries, *[model.kv_heads * model.head_dim // TP] * 2))
    )


def test_nanotron_multiplies_its_own_part_of_the_tokens_while_it_gathers_the_others() -> None:
    case = case_of(engine="nanotron", runtime="nanotron")
    gather, scatter = call_s(case, "all_gather"), call_s(case, "reduce_scatter")
    own = sum(min(gather, sum(product_s(out, HIDDEN) for out in outs) / TP) for outs, _ in PAIRS)

    assert waited(case)["layer"][0] == pytest.approx(2 * gather + 2 * scatter - own)


def test_columns_wait_as_their_layouts_do() -> None:
    degrees = np.array([1.0, 2.0, 4.0, 8.0])
    columns = case_of(tp=degrees, dp_shard=64 / degrees, tp_comm_overlap=True)
    time = step_time(columns, GUESSES)
    for place, tp in enumerate((1, 2, 4, 8)):
        one = case_of(tp=tp, dp_shard=64 // tp, tp_comm_overlap=tp > 1)
        cluster = presets.cluster("dgx-h100", gpus=64)
        alone = step_time(msgspec.structs.replace(one, cluster=cluster), GUESSES)
        assert time.step_s is not None
        assert alone.step_s is not None
        assert time.step_s[place] == pytest.approx(float(alone.step_s))  # type: ignore[index]


def test_a_timeline_shows_what_is_hidden_beside_its_pass() -> None:
    spans = timeline(case_of(tp_comm_overlap=True), GUESSES)
    assert spans is not None
    inside = [span for span in spans.stages[0].spans if span.kind == "collective" and span.name == "tp"]

    assert any(not span.exposed and span.seconds > 0 for span in inside)
    assert max(span.end_s for span in spans.stages[0].spans) == pytest.approx(spans.step_s)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"sequence_parallel": False}, "sequence parallelism"),
        ({"tp": 1, "dp_shard": 16, "sequence_parallel": False}, "tp"),
        ({"engine": "nanotron", "runtime": "nanotron"}, "the nanotron engine has no tp_comm_overlap"),
        (
            {"engine": "fsdp2", "runtime": "accelerate-fsdp2", "tp": 1, "zero_stage": 3, "sequence_parallel": False},
            "the fsdp2 engine has no tp_comm_overlap",
        ),
    ],
)
def test_it_is_refused_where_nobody_overlaps(fields: dict[str, Any], says: str) -> None:
    case = case_of(tp_comm_overlap=True, **fields)

    with pytest.raises(PlannerError, match=says):
        check(case, engine_of(case.layout.engine).rules)


def test_megatron_s_own_modules_have_no_user_buffers() -> None:
    case = case_of(tp_comm_overlap=True)
    parts = presets.kernels("megatron")
    own = msgspec.structs.replace(case, runtime=msgspec.structs.replace(case.runtime, kernels="megatron", parts=parts))

    check(case, engine_of("megatron").rules)
    with pytest.raises(PlannerError, match="user buffers"):
        check(own, engine_of("megatron").rules)


def test_plans_of_before_have_it_off_and_a_layout_s_text_says_that_it_is_on() -> None:
    assert not read_plan(OLD_PLAN).layout.tp_comm_overlap
    assert "tensor collectives overlapped" in layout_text(case_of(tp_comm_overlap=True).layout)
    assert "tensor collectives overlapped" not in layout_text(case_of().layout)


# -- gradients that products add up themselves -----------------------------------------------------------------------


@pytest.mark.parametrize("narrow", [True, False])
def test_megatron_adds_gradients_inside_its_products_and_others_beside_them(narrow: bool) -> None:
    case = case_of(model="qwen3-235b-a22b", ep=4)
    case = msgspec.structs.replace(case, job=msgspec.structs.replace(case.job, narrow_gradients=narrow))
    weights = case.units()["layer"]
    experts = sum(one.elements for one in weights if one.expert)
    plain = sum(one.elements for one in weights) - experts
    plain_bytes, expert_bytes = FUSED_BYTES["bf16" if narrow else "fp32"]

    assert added_up_bytes(case, weights, 2.0) == pytest.approx(plain * plain_bytes + experts * expert_bytes)
    other = case_of(engine="nanotron", runtime="nanotron")
    trained = sum(one.elements for one in other.units()["layer"])
    # Two micro-batches: the first one's is kept, the second's added to it, with two reads and a write of 2 bytes.
    assert added_up_bytes(other, other.units()["layer"], 2.0) == pytest.approx(3 * 2 * trained / 2)


@pytest.mark.parametrize(("precision", "each"), [("bf16", 1), ("mxfp8", 2)])
def test_transformer_engine_starts_each_expert_s_product_alone_and_in_8_bits_its_conversion(
    precision: Any, each: int
) -> None:
    """pytorch/module/grouped_linear.py and common/gemm/cublaslt_gemm.cu, multi_stream_cublas_gemm, of d0067d0da."""
    counted = []
    for ep in (4, 8):
        case = case_of(model="qwen3-235b-a22b", ep=ep)
        case = msgspec.structs.replace(case, job=msgspec.structs.replace(case.job, precision=precision))
        counted.append(float(unit_work(case)["layer"].forward.operations))
    matrices = sum(one.expert for one in case.units()["layer"])

    assert counted[0] - counted[1] == (128 / 4 - 128 / 8) * matrices * each


def test_an_engine_is_not_told_the_work_of_another_with_the_same_modules() -> None:
    megatron = case_of(model="qwen3-235b-a22b", ep=4)
    other = msgspec.structs.replace(megatron, layout=msgspec.structs.replace(megatron.layout, engine="torchtitan"))
    both = [unit_work(one)["layer"] for one in (megatron, other)]

    assert both[0].forward.operations > both[1].forward.operations
    assert both[0].backward.fixed_bytes != both[1].backward.fixed_bytes
