"""A step whose loss or gradient norm is bad: skipped, or gone back from, under every launched engine.

What is trained afterwards equals to the last bit what a process trains that never met the bad batch. Not here: what is
bad (tests/executor/test_badloss.py), or that a bad step changes no weight (test_notfinite.py).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from agents import Finished, make_plan, run_warm
from cases import CASES, FULL, Case
from msgspec.structs import replace
from test_resume import EXECUTOR, LAYOUTS
from test_views import in_precision

from executor.folder import badloss, checkpoints
from executor.run import attempts
from executor.worker.data.order import Order
from planner.ask.launchable import OWN, find_backend
from planner.spec import Layout
from planner.spec.plan import encode_plan

STEPS, EVERY, NAN, INF = 14, 3, 7, 11
TWO = {"micro_batch_size": 2}
SMALL = {name: Case(layout) for name, layout in LAYOUTS.items() if name != "fsdp2-lora"} | {
    "single": Case(Layout(engine="single", micro_batch_size=4)),
    "tp2": Case(Layout(engine="transformers-tp", tp=2, **TWO)),
    "autotp2-zero1": Case(Layout(engine="deepspeed-autotp", tp=2, zero_stage=1, **TWO)),
    "ulysses2": Case(Layout(engine="deepspeed-ulysses", cp=2, cp_method="ulysses", zero_stage=2, **TWO)),
    "pp2": Case(Layout(engine="deepspeed-pipeline", pp=2, zero_stage=1, grad_accum=2, **TWO)),
}
OTHERS = {
    name: CASES[name]
    for name in (
        "hsdp-2x2-accum2", "fsdp2-kept-accum1", "fsdp2-lora-accum1", "zero3-default-limits-accum1",
        "zero3-qlora-accum1",
        "zero2-offload-accum2", "zero3-offload-accum2", "fsdp2-offload-accum2", "pp2-dp2-zero1", "tied-pp4-zero1",
        "pp2-tp2-dp2-zero1", "ep2-accum1", "tp2-fsdp2-tied-accum2", "tp2-zero3-accum2", "cp2-zero3-recompute-accum2",
    )
} | {f"{name}-bf16": in_precision("bf16", name) for name in (
    "ddp-accum1", "fsdp2-accum1", "zero1-accum1", "zero2-accum2", "zero3-accum1", "pp2-dp2-zero1", "tp2-fsdp2-accum1",
)}  # fmt: skip
ALL = SMALL | OTHERS
IN_CI = (("ddp", "skip"), ("fsdp2", "rollback"), ("zero3", "skip"), ("pp2", "skip"))
"""ZeRO-1 goes back below. All cases: make long."""


def start(name: str, folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> Finished:
    case = ALL[name]
    job = replace(case.job, recipe=replace(case.job.recipe, steps=STEPS))
    plan = make_plan(case.layout, job, nodes=1, per_node=case.layout.world_size, model=case.model)
    return run_warm(
        plan, folder, *arguments, module="spoiled", environment=(case.environment or {}) | (environment or {})
    )


def only(name: str, folder: Path, taken: Sequence[tuple[int, int]]) -> list[list[float]]:
    """[step, loss, gradient norm] of a process that takes these steps on these batches."""
    done = start(name, folder, "--only", ",".join(f"{step}:{batch}" for step, batch in taken))
    assert set(done.exit_codes) == {0}, done.output[-3000:]
    return json.loads((folder / "steps.json").read_text())


def steps_of(done: Finished) -> list[list[float]]:
    assert set(done.exit_codes) == {0}, done.output[-3000:]
    return [[line["step"], line["loss"], line["grad_norm"]] for line in done.metrics]


def test_every_launched_engine_is_tried() -> None:
    launched = {engine for name in OWN if (backend := find_backend(name)) for engine in backend.engines}

    assert {case.layout.engine for case in SMALL.values()} == launched


@pytest.mark.parametrize(
    ("name", "action"),
    [
        pytest.param(name, action, marks=() if (name, action) in IN_CI else pytest.mark.long)
        for name in ALL
        for action in ("skip", "rollback")
    ],
)
def test_the_run_goes_on_as_if_the_bad_batches_had_never_been(tmp_path: Path, name: str, action: str) -> None:
    spoiled = {"NAN": str(NAN), "INF": str(INF)}
    saved = ("--checkpoint-every", str(EVERY))
    done = start(name, tmp_path / "run", "--no-meter", "--on-bad-loss", action, *saved, environment=spoiled)

    found = [(one.bad_step, one.action, one.left_out, one.step) for one in badloss.read(tmp_path / "run")]
    if action == "skip":
        assert found == [(bad + 1, "skipped", (bad, bad + 1), bad + 1) for bad in (NAN, INF)]
        taken = [(step, step) for step in range(STEPS) if step not in (NAN, INF)]
    else:
        assert found == [(8, "rolled back", (6, 8), 6), (10, "rolled back", (11, 12), 9)]
        batches = [batch for batch in range(STEPS + 3) if batch not in (6, NAN, INF)]
        taken = list(enumerate(batches))
    assert steps_of(done) == only(name, tmp_path / "only", taken)


@pytest.mark.parametrize(
    ("name", "action"), [("zero1", "rollback"), pytest.param("ddp", "skip", marks=pytest.mark.long)]
)
def test_a_run_that_goes_on_leaves_the_same_steps_out(tmp_path: Path, name: str, action: str) -> None:
    arguments = ("--no-meter", "--on-bad-loss", action, "--checkpoint-every", str(EVERY))
    spoiled, run = {"NAN": str(NAN), "INF": str(INF)}, tmp_path / "run"
    before = steps_of(start(name, run, *arguments, environment=spoiled))
    left_out = [one.left_out for one in badloss.read(run)]

    attempts.set_aside(run, 9)
    again = start(name, run, *arguments, "--resume", str(run / "checkpoints" / "step-9"), environment=spoiled)

    assert steps_of(again) == before
    assert [one.left_out for one in badloss.read(run)] == left_out
    updates = checkpoints.complete(run / "checkpoints" / "step-12").optimizer_step
    assert updates == (10 if action == "skip" else 12)


@pytest.mark.parametrize(
    ("arguments", "spoiled", "words"),
    [
        ((), {"NAN": "4"}, "grad_norm=nan: is not finite at step 5, which was not applied. Lower --lr or warm up"),
        (("--on-bad-loss", "stop", "--loss-spike", "9"), {"NAN": "4"}, "loss=nan: is not finite at step 5, which was"),
        (
            ("--on-bad-loss", "skip", "--max-skips", "2"),
            {"NAN": "4 5", "INF": "6"},
            "at step 7, which was not applied, like the 2 before it. Lower --lr, or look at the data",
        ),
        (
            ("--on-bad-loss", "rollback", "--checkpoint-every", str(EVERY)),
            {"INF": "1"},
            "at step 2, which was not applied, and there is no checkpoint to go back to yet",
        ),
        (
            ("--on-bad-loss", "rollback", "--checkpoint-every", str(EVERY)),
            {"NAN": "7 9"},
            "at step 8, which was not applied: going back to step 6 has not helped. Lower --lr, look at the data, or "
            "remove step-6",
        ),
    ],
    ids=["stop", "stop on an explosion", "too many skips", "no checkpoint yet", "the same spot"],
)
def test_a_run_that_nothing_helps_stops_and_says_what_to_do(
    tmp_path: Path, arguments: tuple[str, ...], spoiled: dict[str, str], words: str
) -> None:
    done = start("single", tmp_path, "--no-meter", *arguments, environment=spoiled)

    assert done.exit_codes == (5,), done.output[-3000:]
    failed = done.json("failed/rank-0.json")
    assert words in str(failed["message"])
    assert failed["cause"] == "bad loss" and failed["refusal"]


def test_a_step_that_one_rank_alone_did_not_take_ends_the_run_on_all(tmp_path: Path) -> None:
    done = start("ddp", tmp_path, "--no-meter", "--on-bad-loss", "skip", environment={"ALONE": "3"})

    assert done.exit_codes == (5,) and len(done.metrics) == 3
    for rank in range(2):
        said = str(done.json(f"failed/rank-{rank}.json")["message"])
        assert "1 of 2 ranks did not take this step, and their weights differ now" in said


def test_a_batch_whose_loss_explodes_is_skipped_from_the_command_line(tmp_path: Path) -> None:
    steps, spike = 18, 15
    job = replace(FULL, recipe=replace(FULL.recipe, steps=steps, data=str(tmp_path / "data.bin")))
    plan = make_plan(SMALL["ddp"].layout, job, nodes=1, per_node=2)
    rows, width = steps * plan.layout.global_batch_size, job.seq_len
    tokens = np.full(rows * width + 1, 7, "<u2")
    order = Order(np.full(rows, width), plan.layout.global_batch_size, job.recipe.seed, grouped=False)
    draws = np.random.default_rng(1)
    for row in order.batch(spike):
        tokens[row * width + 1 : (row + 1) * width] = draws.integers(0, plan.model.vocab, width - 1)
    tokens.tofile(tmp_path / "data.bin")
    (tmp_path / "plan.json").write_bytes(encode_plan(plan))
    words = ["run", "plan.json", "--run-dir", "run", "--yes", "--no-save-weights", "--json"]
    words += ["--on-bad-loss", "skip", "--spike-window", "5"]

    done = subprocess.run([EXECUTOR, *words], cwd=tmp_path, text=True, capture_output=True, check=False)

    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    (skipped,) = record["bad_steps"]
    assert skipped["bad_step"] == spike + 1 and skipped["bad_loss"] > 5 and "5 steps had" in skipped["why"]
    assert len(record["losses"]) == steps - 1 and max(record["losses"][-5:]) < 2
    assert record["report"]["bad_steps"] == record["bad_steps"] and record["report"]["goodput"] < 1
    shown = subprocess.run([EXECUTOR, "report", "run"], cwd=tmp_path, text=True, capture_output=True, check=True).stdout
    assert f"step {spike + 1} skipped (" in shown and "the last: loss" in shown
