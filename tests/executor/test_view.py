"""What a run's folder shows of it, and how that is drawn. Runs that really go are in tests/cluster/test_watch.py."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import msgspec
import pytest
from test_reap import ended, launched
from test_rundir import make_plan

from executor.cli import executor
from executor.folder import alive, joining, rundir
from executor.follow import view
from executor.follow.view import Lookout, RankView, RunView
from executor.follow.view_text import Changes, Screen, screen, summary
from executor.run import attempts
from executor.system import processes
from planner.basics.command import exit_code
from planner.basics.errors import PlannerError
from planner.spec import Layout
from planner.spec.record import RunRecord


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rundir.create(tmp_path / "run", make_plan(Layout(engine="ddp", dp_replicate=2)), {})
    return tmp_path / "run"


def record(folder: Path, **changed: object) -> None:
    one = RunRecord(
        plan_hash="", status="completed", exit_code=0, started="2026", seconds=1.0, backend="", launcher="",
        world_size=2, nodes=1,
    )  # fmt: skip
    rundir.write_json(folder / rundir.RECORD, msgspec.structs.replace(one, **changed))


def logged(folder: Path, *steps: int) -> None:
    lines = [
        {"step": step, "loss": 6.0 - step, "tokens": 64, "step_s": 0.4, "time": 100.0 + 2 * step} for step in steps
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"step": 9, "lo')


def say(folder: Path, rank: int, **said: object) -> None:
    (folder / "alive").mkdir(exist_ok=True)
    one = alive.Said(**{"rank": rank, "process": "1:1", "count": 1, "stage": "step"} | said)
    (folder / "alive" / f"rank-{rank}").write_bytes(msgspec.json.encode(one))


class Clock:
    """A clock that a test moves."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_a_folder_that_is_none_is_refused_in_one_line(tmp_path, capsys):
    assert exit_code(executor, ["watch", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(PlannerError, match=r"holds no plan\.json"):
        Lookout(tmp_path)


def test_a_run_that_has_not_begun_is_waited_for_and_one_without_any_word_is_over_after_a_while(folder):
    clock = Clock()
    lookout = Lookout(folder, clock)
    assert (lookout.look().status, lookout.look().exit_code) == ("not started", None)
    clock.now += view.MAKING_S
    assert (lookout.look().status, lookout.look().exit_code) == ("ended without a record", 7)

    joining.write(folder, joining.Joining(run_id="r", plan_hash="", version="", code="", port=1))
    clock.now += 100
    waits = lookout.look()
    assert (waits.status, waits.message, waits.exit_code) == ("not started", "no node has joined", None)


def test_state_and_progress_of_a_run_that_goes(folder):
    launched(folder)
    clock = Clock()
    lookout = Lookout(folder, clock)
    first = lookout.look()
    assert (first.status, first.message, first.step) == ("starting", "0 of 2 ranks have joined", 0)
    assert first.loss is None and first.left_s is None and first.ranks[1].stage == ""

    logged(folder, 0, 1, 2)
    say(folder, 0, step=4)
    say(folder, 1, step=3)
    os.utime(folder / "alive" / "rank-1", (0, 0))
    seen = Lookout(folder, clock).look()
    clock.now += 5
    after = lookout.look()

    assert (after.status, after.step, after.steps, after.loss) == ("running", 3, 20, 4.0)
    assert (after.tokens_per_s, after.left_s) == (32.0, 17 * 2.0)  # two seconds from one step's end to the next's
    assert [(one.rank, one.step, one.stage) for one in after.ranks] == [(0, 4, "step"), (1, 3, "step")]
    assert seen.ranks[1].age_s is not None and seen.ranks[1].age_s > 1e9  # by the disk's clock, at first sight
    clock.now += 7
    say(folder, 1, step=4, count=2)
    ages = [one.age_s for one in lookout.look().ranks]
    assert ages[0] is not None and 7.0 <= ages[0] < 60.0 and ages[1] == 0.0


@pytest.mark.parametrize(
    ("restarts", "code", "follows"),
    [(0, 5, False), (1, 5, True), (1, 0, False), (1, 1, True), (1, 127, True), (1, 128, False), (1, 130, False)],
)
def test_another_start_follows_a_failure_that_was_no_signal_where_any_was_asked_for(folder, restarts, code, follows):
    launched(folder)
    (folder / attempts.ASKED).write_text(json.dumps({"max_restarts": restarts}))
    record(folder, status="ended", exit_code=code)

    assert Lookout(folder, Clock()).look().exit_code == (None if follows else code)


def test_a_run_starts_until_all_its_ranks_have_met(folder):
    launched(folder)
    said = []
    for rank in (0, 1):
        (folder / rundir.MESH).mkdir(exist_ok=True)
        (folder / rundir.MESH / f"rank-{rank}.json").write_text("{}")
        seen = Lookout(folder).look()
        said.append((seen.status, seen.message))

    assert said == [("starting", "1 of 2 ranks have joined"), ("running", "")]


def test_a_launcher_that_is_gone_ends_the_watching_and_one_elsewhere_does_not(folder):
    launched(folder, process=ended())
    lost = Lookout(folder).look()
    assert (lost.status, lost.exit_code) == ("launcher lost", 7) and f"executor stop {folder} ends" in lost.message
    assert rundir.read_record(folder) is None  # nothing is buried by looking

    launched(folder, namespace="pid:[1]", process=ended())
    away = Lookout(folder).look()
    assert away.exit_code is None and "is not visible from here" in away.message


def test_a_failed_start_is_the_end_unless_another_follows(folder):
    launched(folder)
    record(folder, status="failed", exit_code=5, message="rank 1 was killed", cause="killed")
    assert Lookout(folder).look().exit_code == 5

    (folder / attempts.ASKED).write_text('{"max_restarts": 2}')
    clock = Clock()
    lookout = Lookout(folder, clock)
    assert (lookout.look().status, lookout.look().exit_code) == ("failed", None)
    attempts.set_aside(folder, 0)
    again = lookout.look()
    assert (again.status, again.exit_code, again.restarts[0].message) == ("starting again", None, "rank 1 was killed")

    launched(folder)
    record(folder, status="interrupted", exit_code=130)
    assert lookout.look().exit_code == 130
    record(folder, status="failed", exit_code=5)
    assert lookout.look().exit_code is None
    clock.now += view.SETTLED_S
    assert lookout.look().exit_code == 5
    launched(folder, process=ended())
    assert Lookout(folder).look().exit_code == 5


def test_the_command_ends_with_the_run_and_its_exit_code(folder, capsys):
    launched(folder)
    record(folder, status="hung", exit_code=8, message="rank 1 is stopped")
    logged(folder, 0, 1)
    (folder / "checkpoints" / "step-2").mkdir(parents=True)

    assert exit_code(executor, ["watch", str(folder)]) == 8
    assert capsys.readouterr().out == ("hung: rank 1 is stopped  step 2/20  loss 5.0000  32 tok/s  checkpoint step-2\n")
    assert exit_code(executor, ["watch", str(folder), "--json"]) == 8
    said = json.loads(capsys.readouterr().out)
    assert (said["schema"], said["status"], said["exit_code"], said["step"]) == ("watch/1", "hung", 8, 2)
    assert said["checkpoint"]["step"] == 2 and said["left_s"] is None


def made(step: int = 1, ranks: int = 2, **changed: object) -> RunView:
    words = tuple(RankView(rank=rank, host="a", stage="step", step=step, age_s=0.1 * rank) for rank in range(ranks))
    return msgspec.structs.replace(
        RunView(run_dir="run", status="running", step=step, steps=9, loss=2.0, ranks=words), **changed
    )


def test_changes_are_lines_and_ages_are_none():
    out = io.StringIO()
    changes = Changes(out)
    older = tuple(msgspec.structs.replace(one, age_s=99.0) for one in made().ranks)
    for one in (made(), made(ranks=2, **{"message": ""}), msgspec.structs.replace(made(), ranks=older), made(2)):
        changes.show(one)
    assert out.getvalue().splitlines() == ["running  step 1/9  loss 2.0000", "running  step 2/9  loss 2.0000"]


def test_a_terminal_is_drawn_in_place_and_shows_the_ranks_that_are_behind(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("LINES", "12")
    out = io.StringIO()
    drawn = Screen(out)
    many = made(ranks=64)
    behind = msgspec.structs.replace(many.ranks[50], step=0)
    many = msgspec.structs.replace(many, ranks=(*many.ranks[:50], behind, *many.ranks[51:]))
    drawn.show(many)
    first = out.getvalue()
    drawn.show(made(2))
    assert out.getvalue()[len(first) :].startswith(f"\x1b[{first.count(chr(10))}A")
    assert first.count("\n") <= 11 and max(map(len, first.splitlines())) < 44
    assert first.split("\n")[3].split()[0] == "50" and "ranks that are further" in first
    assert screen(made(), 20)[-1].startswith("Ctrl-C") and not screen(made(exit_code=0), 20)[-1].startswith("Ctrl-C")
    assert summary(made(exit_code=0, status="completed")) == "completed  step 1/9  loss 2.0000"


def test_processes_are_not_looked_for_where_the_launcher_is_seen(folder, monkeypatch):
    launched(folder)
    monkeypatch.setattr(processes, "processes_of", lambda _: pytest.fail("looked"))
    assert Lookout(folder).look().status == "starting"


@pytest.mark.parametrize("columns", [24, 40, 80])
def test_a_line_that_is_longer_than_the_terminal_is_broken_between_words(columns: int, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setenv("LINES", "24")
    out = io.StringIO()
    view = msgspec.structs.replace(made(2), message="rank 1 on node a did not answer for a minute and is gone")
    Screen(out).show(view)

    lines = out.getvalue().removeprefix("\r\x1b[J").splitlines()
    assert max(map(len, lines)) < columns and len(lines) < 24
    assert set(view.message.split()) <= set(" ".join(lines).split())
