"""Who is awaited, read from the files that agents and ranks leave in a run folder. No process is started."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from executor.folder import alive
from executor.watch import rollcall
from executor.watch.rollcall import RollCall

PLAIN = re.compile("waiting: ranks 0, 1 on red, blue: importing PyTorch, 1[01] s so far")
STAGES = ("START", "FIRST_STEP", "STEP", "VALIDATION", "CHECKPOINT", "RESTORE", "END")
NAMES = {0: "red", 1: "blue"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds that a test moves on itself."""
    now = [100.0]
    monkeypatch.setattr(rollcall.time, "monotonic", lambda: now[0])
    return now


def agent_ready(folder: Path, node: int) -> None:
    (folder / "states").mkdir(exist_ok=True)
    (folder / "states" / f"node-{node}.json").write_text("{}")


def started(folder: Path, rank: int) -> None:
    agent_ready(folder, rank)
    (log := folder / "logs" / f"node-{rank}" / "run" / "attempt_0" / "0" / "stderr.log").parent.mkdir(parents=True)
    log.touch()


def says(folder: Path, rank: int, state: str) -> None:
    (folder / "states" / f"rank-{rank}.json").write_text(json.dumps({"rank": rank, "state": state}))


def test_an_agent_that_is_not_ready_is_named_alone(tmp_path: Path) -> None:
    agent_ready(tmp_path, 0)
    said = RollCall(tmp_path, 1, lambda: NAMES, print).missing()
    assert said.startswith("rank 1 on blue was not started: the agent of the node is still importing PyTorch. Look at ")
    assert "logs/node-1" in said and "node-0" not in said


def test_a_rank_that_does_not_join_is_named_alone_within_15_s_of_the_last_that_came(
    tmp_path: Path, clock: list[float]
) -> None:
    told: list[str] = []
    roll = RollCall(tmp_path, 1, lambda: NAMES, told.append)
    for rank in NAMES:
        started(tmp_path, rank)
    begun = clock[0]
    while not told:
        roll.call()
        clock[0] += 0.1
    assert clock[0] - begun < 15 and PLAIN.fullmatch(told[0]), told

    says(tmp_path, 0, "joining")
    came = clock[0]
    while len(told) < 2:
        roll.call()
        clock[0] += 0.1
    assert clock[0] - came < 15
    assert told[1].startswith("waiting: rank 1 on blue: importing PyTorch, 1")
    assert told[1].endswith(" s so far; 1 rank waits")
    clock[0] += 30
    roll.call()
    assert len(told) == 2, "the same is not said again and again"
    while len(told) < 3:
        roll.call()
        clock[0] += 0.1
    assert clock[0] - came < 75
    assert told[2] == (
        "waiting: rank 1 on blue was started and has not joined; 1 rank waits. "
        "Look at logs/node-1, or at its stack (py-spy dump)"
    )


@pytest.mark.parametrize("stage", [None, *(getattr(alive, name) for name in STAGES)])
@pytest.mark.parametrize("ready", [False, True])
@pytest.mark.parametrize("script", [False, True])
def test_who_may_still_import_is_no_alarm_and_who_has_begun_is(
    tmp_path: Path, clock: list[float], stage: str | None, ready: bool, script: bool
) -> None:
    told: list[str] = []
    roll = RollCall(tmp_path, 1, lambda: {0: "red"}, told.append, others_first=script)
    if ready:
        started(tmp_path, 0)
    if stage is not None:
        (tmp_path / "alive").mkdir()
        said = alive.Said(rank=0, process="1:1", count=1, stage=stage)
        (tmp_path / "alive" / "rank-0").write_bytes(msgspec.json.encode(said))
    for _ in range(130):
        roll.call()
        clock[0] += 0.1
    if script:
        assert told == []
        return
    imports = not ready or stage in (None, alive.START)
    assert len(told) == 1 and ("importing PyTorch" in told[0]) == imports == ("py-spy" not in told[0]), told


def test_ranks_that_came_and_do_not_meet_are_no_rank_that_is_missing(tmp_path: Path) -> None:
    roll = RollCall(tmp_path, 1, lambda: NAMES, print)
    for rank in NAMES:
        started(tmp_path, rank)
        says(tmp_path, rank, "joining")
    assert roll.missing().startswith(
        "ranks 0, 1 on red, blue started to join the process group, but did not meet the others."
    )
    for rank in NAMES:
        says(tmp_path, rank, "joined")
    assert roll.missing() == "" and roll.done


def test_of_a_script_nothing_is_said_before_a_rank_has_joined(tmp_path: Path) -> None:
    roll = RollCall(tmp_path, 1, lambda: NAMES, print, others_first=True)
    for rank in NAMES:
        started(tmp_path, rank)
    assert roll.missing() == ""
    says(tmp_path, 0, "joining")
    assert roll.missing().startswith("rank 1 on blue was started and has not joined; ")


def test_nodes_that_do_not_show_come_first(tmp_path: Path) -> None:
    assert RollCall(tmp_path, 1, lambda: NAMES, print, lambda: "blue has not joined").missing() == "blue has not joined"


def test_ranks_are_looked_for_once_a_second_however_often_that_is_asked_for(tmp_path: Path, clock: list[float]) -> None:
    looks: list[float] = []
    roll = RollCall(tmp_path, 1, lambda: looks.append(clock[0]) or NAMES, print)  # type: ignore[func-returns-value]
    for now in (100.0, 100.9, 101.0, 101.9):
        clock[0] = now
        roll.call()
    assert sorted(set(looks)) == [100.0, 101.0]
