"""What a run may go on with, and what is refused by name; and the files of its earlier starts.

Folders are made by hand here. Not here: training again (tests/cluster/test_resume.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kept import PLAN, checkpoint, record
from msgspec.structs import replace

from executor.folder import checkpoints, rundir
from executor.folder.alive import STEP, Said
from executor.measure import report
from executor.measure.report_text import attempt_text, goodput_text
from executor.run import attempts, resume
from planner.basics.errors import PlannerError
from planner.spec import Layout, TrainingJob
from planner.spec.plan import Plan


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run that failed after step 12, with checkpoints of steps 5 and 10."""
    folder = tmp_path / "run"
    rundir.create(folder, PLAN, {"config/x.json": "{}"})
    (folder / "checkpoints").mkdir()
    for name in ("states", "alive", "joined"):
        (folder / name).mkdir(exist_ok=True)
    for step in (5, 10):
        checkpoint(folder, step)
    lines = [{"step": step, "loss": 1.0, "step_s": 0.5, "time": 100.0 + step} for step in range(12)]
    lines.insert(10, {"step": 10, "validation_loss": 2.0, "validation_tokens": 3, "time": 109.5})
    lines.append({"step": 12, "validation_loss": 2.0, "validation_tokens": 3, "time": 111.5})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + '{"step": 12, "lo')
    rundir.write_json(folder / rundir.RECORD, record("training failed", 5))
    return folder


def test_the_highest_step_whose_checkpoint_is_whole_is_chosen_and_newer_ones_are_named(run):
    assert (resume.newest(run).step, resume.newest(run).skipped) == (10, ())
    (run / "checkpoints" / "step-10" / "rank-0.safetensors").write_bytes(b"numberz")

    place = resume.newest(run)

    assert place.step == 5 and place.skipped[0][0] == "step-10" and "is damaged" in place.skipped[0][1]
    (run / "checkpoints" / "step-5" / "COMPLETE").unlink()
    with pytest.raises(PlannerError, match="holds no whole checkpoint; step-10: rank-0") as caught:
        resume.newest(run)
    assert caught.value.exit_code == 3


def test_an_earlier_start_is_put_aside_and_its_steps_after_the_checkpoint_are_cut(run):
    folder = attempts.set_aside(run, 10, [("step-15", "was not completed")])

    assert folder == run / "attempts" / "1"
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [*range(10)]  # the validation after them is made again
    assert [json.loads(line)["step"] for line in (folder / "metrics.jsonl").read_text().splitlines()] == [
        10,
        10,
        11,
        12,
    ]
    assert not (run / "run.json").exists() and (folder / "run.json").is_file()
    assert sorted(path.name for path in run.iterdir()) == ["attempts", "checkpoints", "metrics.jsonl", "plan.json"]
    assert (folder / "plan.json").is_file() and (folder / "logs").is_dir()

    with (run / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": 10, "loss": 1.0, "step_s": 0.5, "time": 140.0}) + "\n")
    (one,) = attempts.read(run)
    assert (one.status, one.steps, one.resumed_from, one.repeated_s) == ("training failed", 12, 10, 1.0)
    assert one.down_s == pytest.approx(140.0 - 0.5 - 111.5)
    assert one.skipped == ("step-15: was not completed",)
    assert attempt_text(one) == (
        "training failed after step 12 (rank 1 failed first: killed by SIGKILL); resumed after step 10: "
        "2 steps trained again (1.00 s), 28.00 s until the next step"
    )


def test_a_failure_is_the_same_where_its_rank_was_at_the_same_step_whatever_rank_0_had_logged(run):
    where = run / "alive" / "rank-1"
    where.write_bytes(msgspec.json.encode(Said(rank=1, process="1:1", count=9, stage=STEP, step=13)))
    failed = replace(record("training failed", 5), failed_rank=1)
    first = attempts.failure_of(run, failed)
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join(lines[:11]))
    assert attempts.failure_of(run, failed) == first and first[-1] == 13
    where.write_bytes(msgspec.json.encode(Said(rank=1, process="1:1", count=9, stage=STEP, step=11)))
    assert attempts.failure_of(run, failed) != first


def test_goodput_counts_each_step_once_and_the_time_of_every_start(run):
    attempts.set_aside(run, 10)
    rundir.write_json(run / rundir.RECORD, replace(record("completed", 0), seconds=20.0))
    found = report.build(run)
    assert (found.training_s, found.run_s, found.goodput) == (5.0, 80.0, 0.0625)
    assert goodput_text(found) == "goodput 6.2%: 5.00 s of 1.3 min in 2 starts went into its steps"


def test_a_start_that_was_killed_while_it_put_things_aside_loses_nothing(run):
    attempts.set_aside(run, 10)
    attempts.set_aside(run, 10)

    first, second = attempts.read(run)
    assert first.status == "training failed" and second.status == "ended without a record"
    assert rundir.read_losses(run) == (1.0,) * 10


def another(**changes: Any) -> Plan:
    return replace(PLAN, **changes).sealed()


def recipe(**changes: Any) -> TrainingJob:
    return replace(PLAN.job, recipe=replace(PLAN.job.recipe, **changes))


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (another(model=replace(PLAN.model, layers=2)), r"model.layers=2: is 1 in the run"),
        (another(job=replace(PLAN.job, seq_len=16)), r"seq_len=16: is 8 in the run"),
        (another(job=replace(PLAN.job, precision="bf16")), r"precision=bf16: is fp32 in the run"),
        (another(job=replace(PLAN.job, packing="packed")), r"packing=packed: is padded in the run"),
        (another(job=recipe(seed=7)), r"recipe.seed=7: is 1234 in the run"),
        (another(job=recipe(group_by_length=False)), r"recipe.group_by_length=False: is True in the run"),
        (another(job=replace(PLAN.job, optimizer=replace(PLAN.job.optimizer, name="sgd"))), r"optimizer.name=sgd"),
        (
            another(layout=Layout(engine="ddp", dp_replicate=4)),
            r"global batch size=4: is 2 in the run, and the position",
        ),
        (another(inputs=(replace(PLAN.inputs[0], digest="sha256:2"),)), r"recipe.data=/d: differs"),
        (
            another(inputs=(replace(PLAN.inputs[0], field="tokenizer"),)),
            r"recipe.tokenizer=/d: is not given in the run",
        ),
    ],
)
def test_another_training_is_refused_by_the_name_of_what_differs(other, words):
    with pytest.raises(PlannerError, match=words) as caught:
        resume.with_layout(PLAN, other)
    assert caught.value.exit_code == 3


def test_another_layout_keeps_the_runs_steps_data_and_schedule():
    other = another(layout=Layout(engine="fsdp2", dp_shard=2, zero_stage=3), job=recipe(steps=99, data="/elsewhere"))

    found = resume.with_layout(PLAN, other)

    assert found.layout == other.layout and found.inputs == PLAN.inputs
    assert found.job.recipe == PLAN.job.recipe
    assert found.content_hash == found.sealed().content_hash


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (another(inputs=()), r"is of another recipe.data"),
        (another(job=recipe(seed=7)), r"is of seed 7, and the plan has 1234"),
        (another(layout=Layout(engine="ddp", dp_replicate=8)), r"is of batches of 8, the plan has 2"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_by_name(run, plan, words):
    foreign = checkpoint(run, 20, plan)

    with pytest.raises(PlannerError, match=words) as caught:
        resume.check_same(PLAN, checkpoints.complete(foreign), foreign)
    assert caught.value.exit_code == 3
    with pytest.raises(PlannerError, match=words):
        resume.going(run, PLAN, print)
    assert not (run / "attempts").exists()


def test_what_has_completed_or_is_a_script_of_your_own_does_not_go_on(run):
    rundir.write_json(run / rundir.RECORD, record("completed", 0))
    with pytest.raises(PlannerError, match="has completed: there is nothing to resume"):
        resume.check_ended(run)
    (run / "mesh" / "rank-0.json").write_text(json.dumps({"script": "train.py"}))
    with pytest.raises(PlannerError, match=r"train.py: ran your own script"):
        resume.check_ended(run)


def test_records_of_earlier_versions_have_no_earlier_starts(run):
    old = msgspec.json.decode((run / "run.json").read_bytes())
    del old["attempts"]
    (run / "run.json").write_text(json.dumps(old))

    found = rundir.read_record(run)
    assert found is not None and found.attempts == ()
