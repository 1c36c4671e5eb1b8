"""What a bad step is, on which batch a step trains, and that what was asked for reaches every way to launch a run.

Not here: withholding a step in an engine (tests/cluster/test_bad_loss.py).
"""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from test_rundir import make_plan

from executor.folder import badloss, joining, rundir
from executor.folder.badloss import BadLossPolicy, History
from executor.folder.checkpoint_policy import CheckpointSchedule
from executor.run import attempts, dryrun, join, slurm_run
from executor.run.launch import worker_arguments
from executor.run.prepare import RunOptions, decided
from planner.basics.errors import PlannerError
from planner.spec import Layout, Recipe
from planner.spec.plan import Plan
from planner.spec.record import BadStep, RunRecord

SKIP = BadLossPolicy(action="skip", factor=4.0, window=5, max_skips=2)


def test_a_loss_explodes_beyond_so_many_robust_deviations_and_not_before_there_are_enough_steps():
    losses = [1.0, 1.1, 1.2, 1.3, 9.0]  # median 1.2, median distance 0.1
    limit = 1.2 + 4 * 1.4826 * 0.1

    assert badloss.limit(losses, SKIP) == pytest.approx(limit)
    assert badloss.limit([100.0, *losses], SKIP) == pytest.approx(limit)  # the last five count
    assert badloss.judged(limit * 0.999, losses, SKIP) is None
    bad = badloss.judged(limit * 1.001, losses, SKIP)
    assert bad is not None and (bad.field, bad.rule) == ("loss", "is above 1.793 (5 steps had 1.2 in the median)")
    assert badloss.limit(losses[1:], SKIP) is None and badloss.judged(1e9, losses[1:], SKIP) is None


def test_losses_that_are_all_the_same_leave_room_for_the_next():
    assert badloss.judged(2.07, [2.0] * 5, SKIP) is None
    assert badloss.judged(2.09, [2.0] * 5, SKIP) is not None


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_is_bad_from_the_first_step(loss):
    assert badloss.judged(loss, (), BadLossPolicy()) == ("loss", loss, "is not finite")


def test_normal_noise_over_a_falling_loss_is_never_taken_for_an_explosion():
    draws = random.Random(1)
    losses = [2 + 4 / (1 + step / 20) + draws.gauss(0, 0.05) for step in range(2000)]
    asked = badloss.policy("skip", None, None, None)

    assert asked == BadLossPolicy(action="skip", factor=10.0, window=32, max_skips=5)
    assert not any(badloss.judged(loss, losses[:step], asked) for step, loss in enumerate(losses))


@pytest.mark.parametrize(
    "given",
    [
        ("stop", 10.0, None, None), (None, 6.0, 50, None), ("skip", None, None, None), ("skip", 0.0, None, 3),
        ("skip", 2.5, 10, 1), ("rollback", None, None, None), ("rollback", 0.0, None, None),
    ],
)  # fmt: skip
def test_what_is_asked_for_reaches_the_ranks_as_arguments(given):
    asked = badloss.policy(*given)
    words = dict(zip(asked.arguments()[::2], asked.arguments()[1::2], strict=True))

    again = badloss.policy(
        words["--on-bad-loss"],
        float(words["--loss-spike"]),
        int(words["--spike-window"]) if "--spike-window" in words else None,
        int(words["--max-skips"]) if "--max-skips" in words else None,
    )
    assert again == asked and asked.looks_first


def test_a_run_is_started_as_before_where_nothing_is_asked_for():
    assert badloss.policy(None, None, None, None) is None
    assert badloss.STOP.arguments() == () and not badloss.STOP.looks_first
    assert badloss.policy("stop", None, None, None) == badloss.STOP


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((None, None, None, 3), "--max-skips=3: applies to --on-bad-loss skip only. Add --on-bad-loss skip"),
        (("rollback", None, None, 3), "--max-skips=3: applies to --on-bad-loss skip only"),
        (("stop", None, 10, None), "--spike-window=10: applies to --loss-spike only. Add --loss-spike 10"),
        (("skip", 0.0, 10, None), "--spike-window=10: applies to --loss-spike only"),
    ],
)
def test_an_option_without_the_one_that_it_belongs_to_is_refused(given, words):
    with pytest.raises(PlannerError) as caught:
        badloss.policy(*given)
    assert caught.value.sentence.startswith(words) and caught.value.exit_code == 2


def asked_for(tmp_path: Path, **changes: object) -> tuple[Plan, RunOptions]:
    data = tmp_path / "data.txt"
    data.write_text("some words to train on " * 200)
    plan = make_plan(Layout(engine="ddp", dp_replicate=2))
    job = msgspec.structs.replace(plan.job, precision="fp32", seq_len=16, recipe=Recipe(steps=9, data=str(data)))
    plan = msgspec.structs.replace(plan, job=job).sealed()
    options = RunOptions(run_dir=tmp_path / "run", nodes=1, hosts="loopback", bad_loss=SKIP)
    return plan, replace(options, **changes)


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        (None, "the run writes none"),
        (CheckpointSchedule(every="signal"), "--checkpoint-every signal writes one at its end only"),
    ],
)
def test_a_rollback_of_a_run_without_checkpoints_is_refused_before_it_starts(tmp_path, saved, words):
    plan, options = asked_for(tmp_path, bad_loss=BadLossPolicy(action="rollback", factor=10.0), checkpoints=saved)

    with pytest.raises(PlannerError) as caught:
        decided(plan, options, print)

    assert words in caught.value.sentence and "Add --checkpoint-every 20" in caught.value.sentence
    assert caught.value.field == "--on-bad-loss" and caught.value.exit_code == 2
    decided(plan, replace(options, checkpoints=CheckpointSchedule(every="20")), print)


@pytest.mark.slow
def test_what_is_asked_for_travels_with_the_run_by_every_launcher(tmp_path):
    plan, options = asked_for(tmp_path)
    assert worker_arguments(options)[-8:] == SKIP.arguments()
    assert slurm_run.again_words(plan, options)[-8:] == SKIP.arguments()

    folder = tmp_path / "joined"
    dryrun.write(dryrun.dry_run(plan, options, print), folder)
    assert joining.read(folder).bad_loss == SKIP
    node = join.prepared(folder, join.NodeRequest(0), print)
    assert node.ready.options.bad_loss == SKIP

    attempts.keep_asked(replace(node.ready, options=replace(node.ready.options, run_dir=folder)))
    assert attempts.read_asked(folder).bad_loss == SKIP


def test_folders_of_earlier_versions_stop_at_a_bad_step():
    asked = msgspec.json.decode(b'{"schema": "asked/1", "hosts": "auto"}', type=attempts.RunRequest)
    assert asked.bad_loss == badloss.STOP
    old = {"plan_hash": "x", "status": "completed", "exit_code": 0, "started": "", "seconds": 1.0, "backend": "b",
           "launcher": "l", "world_size": 1, "nodes": 1}  # fmt: skip
    assert msgspec.convert(old, RunRecord).bad_steps == ()


def test_a_step_trains_on_the_next_batch_that_is_not_left_out():
    assert [badloss.batch_of(step, ()) for step in range(3)] == [0, 1, 2]
    left_out = [(9, 10), (2, 4), (4, 5), (12, 14)]
    seen = [badloss.batch_of(step, left_out) for step in range(8)]
    assert seen == [0, 1, 5, 6, 7, 8, 10, 11]
    assert badloss.batch_of(8, left_out) == 14


def bad(step: int, action: str, left_out: tuple[int, int], **figures: object) -> BadStep:
    return BadStep(step=step, bad_step=9, action=action, why="loss nan is not finite", left_out=left_out, **figures)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Steps 0 to 8, of which 3 and 8 were skipped, and a checkpoint after 6."""
    lines = [{"step": step, "loss": 5.0 - step / 10, "step_s": 1.0} for step in range(8)]
    lines[3] = msgspec.to_builtins(bad(4, "skipped", (3, 4)))
    lines.insert(6, {"step": 6, "checkpoint_bytes": 1, "pause_s": 0.1, "write_s": 0.1})
    lines.append(msgspec.to_builtins(bad(9, "skipped", (8, 9))))
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path


def test_a_start_goes_on_with_the_losses_and_the_skips_before_it(run):
    assert badloss.history(run, 3) == History((4.5, 4.4, 4.3), (), None, 1)
    assert rundir.read_losses(run) == (5.0, 4.9, 4.8, 4.6, 4.5, 4.4, 4.3)
    assert badloss.history(run / "nowhere", 3) == History()


def test_a_rollback_takes_the_later_steps_out_and_stays_when_the_run_is_cut_again(run):
    badloss.go_back(run, bad(6, "rolled back", (6, 9), again=2, seconds=7.0))

    assert badloss.history(run, 3) == History((4.8, 4.6, 4.5), ((6, 9),), 6, 0)
    assert len((run / badloss.TAKEN_BACK).read_text().splitlines()) == 3
    assert [one.action for one in badloss.read(run)] == ["skipped", "rolled back"]
    (run / "plan.json").write_text("{}")
    attempts.set_aside(run, 5)
    assert badloss.history(run, 3).left_out == ((6, 9),)
    assert rundir.read_losses(run) == (5.0, 4.9, 4.8, 4.6)


def test_what_became_of_a_step_is_said_with_its_cost():
    assert badloss.text(bad(9, "skipped", (8, 9))) == "skipped: loss nan is not finite"
    back = bad(6, "rolled back", (6, 9), again=2, seconds=7.0)
    assert badloss.text(back) == "went back to step 6 (2 steps, 7.00 s) without batches 7 to 9: loss nan is not finite"
    assert "(1 step, 7.00 s) without batch 9:" in badloss.text(msgspec.structs.replace(back, again=1, left_out=(8, 9)))


def test_the_history_of_a_run_is_of_steps_with_a_loss_and_of_the_last_batches_left_out(tmp_path):
    def line(step: int, **more: object) -> dict[str, object]:
        return {"step": step, "time": 1.0 * step, **more}

    lines = [
        line(0, loss=3.0, step_s=0.5),
        line(1, loss=None, step_s=0.5),
        line(1, validation_loss=7.0, loss=9.0),
        line(2, loss=2.0, step_s=0.5),
        line(3, action="rolled back", left_out=[3, 5]),
        line(3, loss=1.0, step_s=0.5),
        line(4, loss=50.0, action="skipped"),
        line(5, loss=60.0, action="skipped"),
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))

    found = badloss.history(tmp_path, 2)

    assert found == History(losses=(2.0, 1.0), left_out=((3, 5),), back_to=3, skips=2)
    assert badloss.history(tmp_path, 9).losses == (3.0, 2.0, 1.0)
