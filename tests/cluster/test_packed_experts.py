"""Claims about experts in 4 bits that are trained: the peak is as planned, and two ranks train what one process does.

Not here: what is planned (tests/planner/test_packed_experts.py).
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
from agents import TINY_MIXTRAL, TINY_QWEN3_MOE, make_plan, run_warm
from cases import job
from imports import imported_case, refused
from msgspec.structs import replace
from safetensors.torch import load_file
from test_equivalence import LARGEST_METRIC_ERROR, deviations
from test_prediction import join_memory, read_measured, size_of_error

from planner.spec import Layout, Lora, Quantization, TrainingJob
from planner.spec.job import Precision
from planner.spec.plan import Plan

STEPS = 4
WIDE = {
    one.family: replace(one, hidden=128, ffn=256, layers=3, moe=replace(one.moe, experts=8, expert_ffn=256))
    for one in (TINY_MIXTRAL, TINY_QWEN3_MOE)
    if one.moe is not None
}
"""Experts are most of what the fullest moment holds."""
IMPORTED = ("glm4_moe", "llama4_text")
QUICK = ("mixtral-ddp-bf16-full-True", "llama4_text-single-fp32-none-True")
DRAWN = {
    "-".join(map(str, one)): one
    for one in (
        *product(WIDE, ("single", "ddp"), ("fp32", "bf16", "pure-bf16"), ("none", "full"), (True, False)),
        *product(IMPORTED, ("single",), ("fp32", "bf16"), ("none", "full"), (True,)),
    )
}


def packing(precision: Precision, double: bool = True) -> TrainingJob:
    plain = job("qlora")
    quantization = Quantization(double=double, experts=True)
    recipe = replace(plain.recipe, steps=STEPS)
    return replace(plain, precision=precision, quantization=quantization, lora=Lora(rank=4), recipe=recipe)


def plan_of(family: str, engine: str, precision: Precision, recompute: str, double: bool) -> Plan:
    ranks = 2 if engine == "ddp" else 1
    layout = Layout(engine=engine, dp_replicate=ranks, micro_batch_size=1, grad_accum=2, recompute=recompute)
    trained = packing(precision, double)
    if family in WIDE:
        return make_plan(layout, trained, nodes=1, per_node=ranks, model=WIDE[family])
    case = imported_case(family, layout, trained)
    return make_plan(layout, case.job, nodes=1, per_node=ranks, model=case.model)


@pytest.mark.parametrize("name", [one if one in QUICK else pytest.param(one, marks=pytest.mark.long) for one in DRAWN])
def test_the_peak_is_as_planned(name: str, tmp_path: Path) -> None:
    plan = plan_of(*DRAWN[name])
    assert refused(plan) is None

    run = run_warm(plan, tmp_path)

    assert set(run.exit_codes) == {0}, run.output[-3000:]
    peak = join_memory(plan.prediction.memory, tuple(read_measured(run.folder))).peak
    print(name, peak)
    assert size_of_error(peak) <= 0.5, peak


def test_two_ranks_train_what_one_process_does(tmp_path: Path) -> None:
    both = {
        ranks: run_warm(
            make_plan(
                Layout(engine=engine, dp_replicate=ranks, micro_batch_size=2 // ranks),
                packing("fp32"),
                nodes=1,
                per_node=ranks,
                model=WIDE["qwen3_moe"],
            ),
            tmp_path / engine,
            "--no-meter",
            "--save-weights",
        )
        for engine, ranks in (("single", 1), ("ddp", 2))
    }

    assert all(set(run.exit_codes) == {0} for run in both.values())
    base = load_file(both[2].folder / "weights" / "model.safetensors")
    assert {name: tuple(weight.shape) for name, weight in base.items() if "experts" in name} == {
        f"model.layers.{layer}.mlp.experts.{role}_proj": shape
        for layer in range(3)
        for role, shape in (("gate_up", (8, 512, 128)), ("down", (8, 128, 256)))
    }
    loss, norm, weights = deviations(both[1], both[2], STEPS)
    assert max(loss, norm, weights) <= LARGEST_METRIC_ERROR
