"""A gradient norm that is not a number stops a run before its step is applied, under every engine.

Not here: losses that are numbers (test_equivalence.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from agents import make_plan, run_warm
from cases import CASES, Case
from msgspec.structs import replace

from planner.spec import Layout, Optimizer, Recipe, TrainingJob

SAMPLE = ("fsdp2-accum1", "zero2-accum1", "pp2-dp2-zero1")
"""In CI; DDP is trained below. All cases: make long."""
NORMS = {"none": 0.0, "clipped": 0.5}


def cases() -> list[object]:
    layouts = {case.layout: name for name, case in reversed(CASES.items()) if case.environment is None}
    named = [
        (name, precision, clip)
        for name in layouts.values()
        for precision in ("fp32", "bf16")
        for clip in NORMS
        if precision == "fp32" or CASES[name].job.method != "qlora"
    ]
    return [
        pytest.param(*one, marks=() if one[0] in SAMPLE and one[1:] == ("fp32", "clipped") else pytest.mark.long)
        for one in named
    ]


@pytest.mark.parametrize(("name", "precision", "clip"), cases())
def test_a_step_whose_norm_is_no_number_changes_no_weight(tmp_path: Path, name: str, precision: str, clip: str) -> None:
    case: Case = CASES[name]
    job = replace(case.job, precision=precision, recipe=replace(case.job.recipe, max_grad_norm=NORMS[clip]))
    plan = make_plan(case.layout, job, nodes=1, per_node=case.layout.world_size, model=case.model)

    finished = run_warm(plan, tmp_path, module="poisoned")

    assert finished.exit_codes == (0,), finished.output[-3000:]
    for rank in range(case.layout.world_size):
        found = finished.json(f"poisoned/rank-{rank}.json")
        assert found["norm"] > 0 and found["moved"] and found["kept"], found
        assert found["raised"] in ("nan", "inf"), found


def test_a_run_that_diverges_ends_at_that_step_and_says_that_it_was_not_applied(tmp_path: Path) -> None:
    job = TrainingJob(
        precision="fp32",
        seq_len=32,
        optimizer=Optimizer(name="sgd", lr=1e4),
        recipe=Recipe(steps=30, warmup_steps=0, max_grad_norm=0.0),
    )
    plan = make_plan(Layout(engine="ddp", dp_replicate=2), job, nodes=1, per_node=2)

    finished = run_warm(plan, tmp_path, "--no-meter")

    steps = finished.metrics
    assert finished.exit_codes == (5,) and all(abs(step["grad_norm"]) < float("inf") for step in steps)
    failed = finished.json("failed/rank-0.json")
    assert f"is not finite at step {len(steps) + 1}, which was not applied" in str(failed["message"])
    assert failed["exit_code"] == 5 and failed["refusal"]
