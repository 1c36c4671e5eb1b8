"""What ranks print, followed from elsewhere: all or one, from the start or from now on, over restarts; the last lines.

Folders and logs are made by hand. Not here: a real run that is watched (tests/cluster/test_watch.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from test_rundir import make_plan
from test_view import record

from executor.folder import rundir
from executor.follow import attach
from planner.basics.errors import PlannerError
from planner.spec import Layout

PLAN = make_plan(Layout(engine="ddp", dp_replicate=4))
PLAN = msgspec.structs.replace(PLAN, cluster=msgspec.structs.replace(PLAN.cluster, nodes=2)).sealed()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of two nodes of two ranks, each of which has printed a line."""
    rundir.create(tmp_path / "run", PLAN, {})
    for rank in range(4):
        printed(tmp_path / "run", rank, f"rank {rank} begins")
    return tmp_path / "run"


def printed(folder: Path, rank: int, *lines: str, stream: str = "stdout") -> None:
    node, local = divmod(rank, 2)
    place = folder / rundir.LOGS / f"node-{node}" / "none_x" / "attempt_0" / str(local)
    place.mkdir(parents=True, exist_ok=True)
    for name in ("stdout", "stderr"):
        with (place / f"{name}.log").open("a") as log:
            log.write("".join(line + "\n" for line in lines) if name == stream else "")


def put_aside(folder: Path, number: int) -> None:
    begin_putting_aside(folder, number)
    os.rename(folder / rundir.LOGS, folder / "attempts" / str(number) / rundir.LOGS)


def begin_putting_aside(folder: Path, number: int) -> None:
    (folder / "attempts" / str(number)).mkdir(parents=True, exist_ok=True)
    (folder / "attempts" / str(number) / rundir.PLAN).write_bytes((folder / rundir.PLAN).read_bytes())


@pytest.fixture
def follow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """What is passed on of a run that does one thing after the other between looks, and completes after the last."""

    def followed(*meanwhile: Callable[[], object], rank: int | None = None, from_start: bool = False) -> list[str]:
        said: list[str] = []
        left = list(meanwhile)

        def sleep(seconds: float) -> None:
            assert seconds == 0.5
            left.pop(0)()
            if not left:
                record(folder)

        monkeypatch.setattr(attach.time, "sleep", sleep)
        if not left:
            record(folder)
        view = attach.follow(folder, rank, from_start=from_start, echo=said.append)
        assert (view.over, view.status, left) == (True, "completed", [])
        return said

    return followed


def begun(*ranks: int) -> list[str]:
    return [f"node-{rank // 2}:{rank}  rank {rank} begins" for rank in ranks]


def test_a_run_that_is_over_says_all_that_its_ranks_printed_or_one_s_or_nothing(follow) -> None:
    assert follow(from_start=True) == begun(0, 1, 2, 3)
    assert follow(from_start=True, rank=3) == begun(3)
    assert follow(rank=3) == []


def test_from_now_on_only_what_comes_is_passed_on_with_its_unfinished_end(folder: Path, follow) -> None:
    def ends() -> None:
        log = rundir.rank_log(folder, 1, 1, "stderr")
        assert log is not None
        log.write_text("no line")

    assert follow(lambda: printed(folder, 2, "on"), ends) == ["node-1:2  on", "node-1:3  no line"]


def test_earlier_starts_come_first_and_one_that_is_put_aside_meanwhile_is_read_to_its_end(folder: Path, follow) -> None:
    put_aside(folder, 1)
    printed(folder, 0, "second")

    def restart() -> None:
        printed(folder, 0, "its last")
        put_aside(folder, 2)
        printed(folder, 0, "third")
        printed(folder, 3, "third")

    said = follow(restart, from_start=True)
    assert said == [
        *begun(0, 1, 2, 3), "node-0:0  second", "node-0:0  its last", "node-0:0  third", "node-1:3  third"]  # fmt: skip


def test_a_start_that_is_being_put_aside_is_waited_for(folder: Path, follow) -> None:
    def begins() -> None:
        printed(folder, 0, "its last")
        begin_putting_aside(folder, 1)

    def moved() -> None:
        put_aside(folder, 1)
        printed(folder, 1, "anew")

    assert follow(begins, moved) == ["node-0:0  its last", "node-0:1  anew"]


def test_a_rank_is_one_of_the_run_s(folder: Path) -> None:
    assert list(attach.ranks_of(folder, None)) == [0, 1, 2, 3] and attach.ranks_of(folder, 3) == (3,)
    with pytest.raises(PlannerError, match=r"--rank=4: is not a rank of a run of 4. Give one from 0 to 3"):
        attach.ranks_of(folder, 4)
    assert attach.ranks_of(folder, 4, there=False) == (4,)


def test_the_last_lines_are_of_each_rank_s_output_and_then_its_errors(folder: Path) -> None:
    printed(folder, 1, "a", "b")
    printed(folder, 1, "c", stream="stderr")
    assert list(attach.last_lines(folder, 1, 2)) == ["node-0:1  b", "node-0:1  c"]
    assert list(attach.last_lines(folder, None, 1)) == [
        *begun(0), "node-0:1  c", *begun(2, 3)]  # fmt: skip
