"""What a rank converts to 8 bits for its products, and what tensor ranks gather of it.

Not here: a product's seconds (test_kernel_seconds.py), or memory of narrow copies (test_narrow.py).
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from planner.engines import engine_of
from planner.engines.common import parallel_calls
from planner.figures.kernels.products import named
from planner.figures.kernels.step import Grouped, Product, kernels_seconds
from planner.figures.unitkernels import conversions, scores_code
from planner.figures.work import unit_work
from planner.inventory import is_layer, narrow
from planner.parallelism.case import Case
from planner.parallelism.rule import check
from planner.spec import Layout, TrainingJob, presets

MODELS = ("llama-3-8b", "gpt2", "falcon-7b", "opt-1.3b", "gemma-2-9b", "mixtral-8x7b", "gpt-oss-20b", "deepseek-v3")
RUNTIMES = presets.names("runtimes")
PRECISIONS = ("bf16", *narrow.RECIPES)


def case_of(runtime: str, model: str = "llama-3-8b", precision: Any = "bf16", **fields: Any) -> Case:
    found = presets.runtime(runtime)
    tp = fields.get("tp", 1)
    shape: dict[str, Any] = {
        "dp_replicate": 1,
        "dp_shard": 8 // tp if isinstance(tp, int) else 8,
        "sequence_parallel": True,
    }
    layout = Layout(engine=found.engine, **shape | fields)
    job = TrainingJob(seq_len=4096, precision=precision)
    return Case(presets.model(model), job, layout, presets.cluster("dgx-b200", gpus=8), found)


def flops(kernels: Any) -> float:
    return float(
        sum(
            2 * one.times * one.n * one.k * (one.m if isinstance(one, Product) else one.experts * one.rows)
            for one in kernels
            if isinstance(one, Product | Grouped)
        )
    )


@pytest.mark.parametrize("runtime", RUNTIMES)
@pytest.mark.parametrize("model", MODELS)
def test_products_one_by_one_have_the_flops_of_all(runtime: str, model: str) -> None:
    for tp, precision in itertools.product((1, 4), ("bf16", "fp8")):
        case = case_of(runtime, model, precision, tp=tp)
        for unit, one in unit_work(case).items():
            for kernels, work in ((one.forward.kernels, one.forward), (one.backward.kernels, one.backward)):
                wanted = work.product_flops
                if scores_code(case) and is_layer(unit):  # products of attention, which skip no pair
                    wanted = wanted + work.attention_flops + work.masked_flops
                assert flops(kernels) == pytest.approx(wanted), unit


def converted(case: Case) -> dict[str, tuple[Any, Any]]:
    return {
        weight.name.rpartition(".")[2]: (inputs, back)
        for weight, inputs, back in conversions(case, case.units()["layer"])
        if len(weight.shape) > 1
    }


@pytest.mark.parametrize("tp", [1, 4])
def test_a_compiled_layer_converts_an_input_once_and_each_rank_only_its_part(tp: int) -> None:
    part = 1 / tp
    found = converted(case_of("torchtitan-compiled", precision="fp8", tp=tp))

    # torch.compile makes one conversion of the three that torchao's linears of one input ask for (docs/decisions/0058).
    assert found == {
        "q_proj": (part, 1.0), "k_proj": (0.0, 1.0), "v_proj": (0.0, 1.0), "o_proj": (1.0, part),
        "gate_proj": (part, 1.0), "up_proj": (0.0, 1.0), "down_proj": (1.0, part),
    }  # fmt: skip
    eager = converted(case_of("torchtitan", precision="fp8", tp=tp))
    assert list(eager.values()) == [(part, 1.0)] * 3 + [(1.0, part)] + [(part, 1.0)] * 2 + [(1.0, part)]


def test_an_input_that_is_converted_already_costs_no_pass_over_it() -> None:
    device = named("b200-180gb")
    assert device is not None
    asked = Product(8192, 1024, 8192, format="fp8")
    whole, half, none = (float(kernels_seconds([asked._replace(converted=share)], device)) for share in (1.0, 0.5, 0.0))
    assert none < half < whole
    assert whole - half == pytest.approx(half - none)
    plain = asked._replace(format="bf16")
    assert kernels_seconds([plain], device) == kernels_seconds([plain._replace(converted=0.0)], device)


def sent(case: Case) -> dict[tuple[str, str], float]:
    found: dict[tuple[str, str], float] = {}
    for call in parallel_calls(case):
        if call.axis == "tp" and is_layer(call.unit):
            found[call.op, call.phase] = found.get((call.op, call.phase), 0.0) + float(call.payload_bytes)
    return found


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("runtime", ["torchtitan", "torchtitan-compiled"])
def test_tensor_ranks_of_torchao_gather_8_bits_and_sum_16(runtime: str, recompute: str) -> None:
    fields = {"tp": 4, "recompute": recompute, "zero_stage": 3}
    case = case_of(runtime, precision="fp8", **fields)
    check(case, engine_of(case.layout.engine).rules)
    narrowed, plain = sent(case), sent(case_of(runtime, precision="bf16", **fields))

    assert narrowed.keys() == plain.keys() and len(plain) == 4
    for (op, phase), payload in plain.items():
        assert narrowed[op, phase] == pytest.approx(payload * (0.5 if op == "all_gather" else 1.0)), (op, phase)


@pytest.mark.parametrize("precision", narrow.RECIPES)
def test_what_is_not_known_of_transformer_engine_s_conversions_is_counted_in_16_bits(precision: str) -> None:
    """With 8-bit gathers and conversions of a part its published runs are predicted worse (docs/decisions/0058)."""
    fields = {"tp": 4, "zero_stage": 1}
    case = case_of("megatron-core", precision=precision, **fields)
    assert sent(case) == sent(case_of("megatron-core", precision="bf16", **fields))
    assert set(converted(case).values()) == {(1.0, 1.0)}


@pytest.mark.parametrize("runtime", ["megatron-core", "torchtitan-compiled", "nanotron"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_columns_of_tensor_groups_are_worked_out_as_their_layouts_are(runtime: str, precision: str) -> None:
    device = named("b200-180gb")
    assert device is not None
    degrees = (1, 2, 8)
    together = unit_work(case_of(runtime, precision=precision, tp=np.array(degrees, dtype=float)))["layer"]
    for place, tp in enumerate(degrees):
        alone = unit_work(case_of(runtime, precision=precision, tp=tp))["layer"]
        for load, one in ((together.forward, alone.forward), (together.backward, alone.backward)):
            seconds: Any = kernels_seconds(load.kernels, device)
            assert seconds[place] == pytest.approx(float(kernels_seconds(one.kernels, device)))
            assert np.broadcast_to(load.operands, 3)[place] == pytest.approx(float(one.operands))
