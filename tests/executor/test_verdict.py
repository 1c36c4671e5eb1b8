"""The exit-code contract of a run as a table: every kind of ending, and which of two that came together is told."""

from __future__ import annotations

import errno
import signal
from dataclasses import replace
from typing import Any

import pytest

from executor.folder.rundir import RankError
from executor.watch.failures import Blame, Failure
from executor.watch.verdict import Ending, Evidence, LostAgent, judge, mesh_differences
from planner.basics.errors import PlannerError

OK, ENDED = Ending(ok=True), Ending(ok=False)
BOTH = {0: {"world_size": 2}, 1: {"world_size": 2}}
KILLED = LostAgent("node-1", signal.SIGKILL)
CUT = ("data=/d/t.bin was cut short while the run read it, from 40,000 to 4,096 bytes",)


def failure(code: int = 1, blame: Blame = Blame.EXCEPTION, oom_kills: int | None = None, **record: Any) -> Failure:
    """Rank 1's end; with a record of its own where one is given."""
    said = RankError(message="what it said", exit_code=code, **record) if record else None
    return Failure(1, "what it said", code, 0, blame, record=said, oom_kills=oom_kills)


def refusal(code: int, **more: Any) -> Failure:
    return failure(code, kind="planner.basics.errors.PlannerError", refusal=True, **more)


def evidence(ending: Ending = ENDED, *failures: Failure, **more: Any) -> Evidence:
    known = {"mesh": BOTH, "hosts": ("node-0", "node-1"), "folder_name": "runs/r", "meet_s": 12.0}
    return Evidence(ending, 2, failures=failures, **known | more)


EXCEPTION, SIGBUS = failure(kind="ValueError"), failure(-signal.SIGBUS, Blame.OWN_END)
NO_ROOM = failure(5, kind="planner.basics.errors.PlannerError", refusal=True, errno=errno.ENOSPC)
OOM_KILL = failure(-signal.SIGKILL, Blame.OWN_END, oom_kills=1)
PEER = failure(1, Blame.LOST_PEER, kind="RuntimeError")

ENDINGS: dict[str, tuple[Evidence, str, int, str, str]] = {
    # name: evidence, status, exit code, words of the message, cause
    "all well": (evidence(OK), "completed", 0, "", ""),
    "Ctrl-C": (evidence(Ending(ok=False, signal=2)), "interrupted", 130, "stopped by SIGINT", "interrupted"),
    "Ctrl-C, and ranks died of it": (
        evidence(Ending(ok=False, signal=15), EXCEPTION), "interrupted", 143, "stopped by SIGTERM", "interrupted"),
    "another world": (
        evidence(OK, differences=("rank 0 trained in a world of 1, the plan has 2",)),
        "launch failed", 4, "rank 0 trained in a world of 1", "another world"),
    "an exception while training": (
        evidence(ENDED, EXCEPTION), "training failed", 5, "rank 1 on node-1 failed first: what it said", ""),
    "an exception before all had met": (
        evidence(ENDED, EXCEPTION, mesh={0: {"world_size": 2}}), "launch failed", 4, "rank 1 on node-1", ""),
    "a script's exception, which reports later": (
        evidence(ENDED, EXCEPTION, mesh={}, reports_when_met=False), "training failed", 5, "rank 1", ""),
    "a refusal keeps its code 2": (evidence(ENDED, refusal(2)), "launch failed", 2, "what it said", ""),
    "a refusal keeps its code 3": (evidence(ENDED, refusal(3)), "launch failed", 3, "what it said", ""),
    "a refusal keeps its code 4": (evidence(ENDED, refusal(4)), "launch failed", 4, "what it said", ""),
    "a refusal keeps its code 5": (evidence(ENDED, refusal(5)), "training failed", 5, "what it said", ""),
    "out of device memory": (
        evidence(ENDED, refusal(5, out_of_memory=True)), "training failed", 5, "what it said", "out of memory"),
    "a program's own exit code 3": (
        evidence(ENDED, failure(3, kind="SystemExit")), "training failed", 5, "what it said", ""),
    "a signal": (evidence(ENDED, failure(-signal.SIGSEGV, Blame.OWN_END)), "training failed", 5, "what it said", ""),
    "the out-of-memory killer": (evidence(ENDED, OOM_KILL), "training failed", 5, "what it", "out-of-memory killer"),
    "somebody's kill": (
        evidence(ENDED, replace(OOM_KILL, oom_kills=0)), "training failed", 5, "what it said", "killed"),
    "a kill where nothing counts": (
        evidence(ENDED, replace(OOM_KILL, oom_kills=None)), "training failed", 5, "what it said", ""),
    "SIGBUS, and a file that shrank": (
        evidence(ENDED, SIGBUS, changed_inputs=CUT), "training failed", 5, f"what it said: {CUT[0]}", "input changed"),
    "SIGBUS alone": (evidence(ENDED, SIGBUS), "training failed", 5, "failed first: what it said", ""),
    "a file that shrank is not why a rank raised": (
        evidence(ENDED, EXCEPTION, changed_inputs=CUT), "training failed", 5, "failed first: what it said", ""),
    "no rank could say why, and the disk is full": (
        evidence(ENDED, folder="full"), "training failed", 5, "no space is left on the disk of runs/r", "disk full"),
    "a rank that could not write its record, and the disk is full": (
        evidence(ENDED, failure(5, Blame.OWN_END), folder="full"), "training failed", 5, "no space", "disk full"),
    "a rank said that there was no room": (
        evidence(ENDED, NO_ROOM, folder="full"), "training failed", 5, "no space is left", "disk full"),
    "no room on another disk than the run's": (
        evidence(ENDED, NO_ROOM), "training failed", 5, "rank 1 on node-1 failed first: what it said", "disk full"),
    "no room before all had met": (
        evidence(ENDED, mesh={}, folder="full"), "launch failed", 4, "no space is left", "disk full"),
    "a rank was killed on a full disk": (
        evidence(ENDED, OOM_KILL, folder="full"), "training failed", 5, "what it said", "out-of-memory killer"),
    "a rank raised on a full disk": (
        evidence(ENDED, EXCEPTION, folder="full"), "training failed", 5, "failed first: what it said", ""),
    "the folder was deleted": (
        evidence(ENDED, mesh={}, folder="deleted"), "training failed", 5, "runs/r was deleted", "folder deleted"),
    "the folder was deleted, and all ended well": (
        evidence(OK, mesh={}, folder="deleted"), "training failed", 5, "runs/r was deleted", "folder deleted"),
    "Ctrl-C after the folder was deleted": (
        evidence(Ending(ok=False, signal=2), folder="deleted"), "interrupted", 130, "stopped by SIGINT", "interrupted"),
    "an agent was killed": (
        evidence(Ending(ok=False, lost=KILLED)), "node lost", 7, "the agent of node-1 was killed", "node lost"),
    "an agent was killed, and a peer noticed": (
        evidence(Ending(ok=False, lost=KILLED), PEER), "node lost", 7, "the agent of node-1", "node lost"),
    "an agent was killed after a rank's own failure": (
        evidence(Ending(ok=False, lost=KILLED), EXCEPTION), "training failed", 5, "rank 1 on node-1", ""),
    "the out-of-memory killer took an agent that trained": (
        evidence(Ending(ok=False, lost=KILLED), oom_kills=1),
        "training failed", 5, "node-1 was killed by SIGKILL of the kernel's out-of-memory", "out-of-memory killer"),
    "the out-of-memory killer took an agent that started": (
        evidence(Ending(ok=False, lost=KILLED), oom_kills=1, mesh={}),
        "launch failed", 4, "out-of-memory killer", "out-of-memory killer"),
    "an agent was killed, and nobody was for memory": (
        evidence(Ending(ok=False, lost=KILLED), oom_kills=0), "node lost", 7, "the agent of node-1", "node lost"),
    "ranks that never met": (
        evidence(Ending(ok=False, timed_out=True), mesh={1: {}}),
        "launch failed", 4, "ranks [0] had not joined after 12 s", ""),
    "a rank for whom the others waited": (
        evidence(Ending(ok=False, timed_out=True), mesh={}, awaited="rank 1 on blue has not joined", came="some"),
        "launch failed", 4, "after 12 s rank 1 on blue has not joined", "did not join"),
    "ranks that came and did not meet": (
        evidence(Ending(ok=False, timed_out=True), mesh={}, awaited="ranks 0, 1 came", came="all"),
        "launch failed", 4, "after 12 s ranks 0, 1 came", "not met"),
    "ranks that lost each other before they met": (
        evidence(ENDED, PEER, mesh={}), "launch failed", 4, "failed first", "not met"),
    "ranks that lost each other before they met, and said why": (
        evidence(ENDED, PEER, mesh={}, network="/dev/shm is full. Make it larger"),
        "launch failed", 4, ": /dev/shm is full. Make it larger", "network"),
    "a rank that raised before they met, beside words of the network": (
        evidence(ENDED, EXCEPTION, mesh={}, network="/dev/shm is full"), "launch failed", 4, "what it said", ""),
    "ranks that lost each other while they trained": (
        evidence(ENDED, PEER, network="/dev/shm is full"), "training failed", 5, "failed first", ""),
    "an agent that said something": (
        evidence(ENDED, log_line="ImportError: no"), "launch failed", 4, "without naming a rank: ImportError: no", ""),
    "the launcher was refused": (
        evidence(ENDED, refusal=PlannerError("port", "2", "none is free", exit_code=4)),
        "launch failed", 4, "port=2: none is free", ""),
    "the launcher was refused by a full disk": (
        evidence(ENDED, refusal=PlannerError("output", "x", "cannot be written"), mesh={}, folder="full"),
        "launch failed", 4, "no space is left", "disk full"),
}  # fmt: skip


@pytest.mark.parametrize("name", ENDINGS)
def test_every_ending_has_its_status_its_exit_code_and_its_cause(name):
    given, status, code, words, cause = ENDINGS[name]
    found = judge(given)

    assert (found.status, found.exit_code, found.cause) == (status, code, cause)
    assert words in found.message and "\n" not in found.message
    assert found.rank in (None, 1)


def test_no_ending_hides_that_a_person_asked_for_it():
    for given, *_ in ENDINGS.values():
        stopped = judge(replace(given, ending=replace(given.ending, signal=2)))
        assert (stopped.status, stopped.exit_code) == ("interrupted", 130)


def test_a_rank_in_another_world_and_a_rank_that_says_nothing_are_named():
    assert mesh_differences(BOTH, 2, 2) == []
    assert mesh_differences({0: {"world_size": 1}}, 2, 2) == [
        "ranks [1] never reported the process group they joined",
        "rank 0 trained in a world of 1, the plan has 2",
    ]
    assert mesh_differences({0: {"world_size": 64}}, 1, 64) == []  # one rank of a fake world
