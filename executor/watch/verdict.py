"""The verdict on a run, in the terms of run.json and with the command's exit code: one pure function of evidence.

Not here: gathering the evidence (launch.py), which rank failed first (failures.py), or watching a run (supervise.py).
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from executor.folder.rundir import FolderState
from executor.watch.failures import Failure
from executor.watch.hangs import Hang, blamed, sentence
from planner.basics.errors import PlannerError

LAUNCH_FAILED, TRAINING_FAILED, NODE_LOST, HUNG, INTERRUPTED = 4, 5, 7, 8, 128

Came = Literal["none", "some", "all"]


@dataclass(frozen=True)
class LostAgent:
    """An agent that was itself killed: its node's name, and the signal's number."""

    host: str
    signal: int


@dataclass(frozen=True)
class Ending:
    """The end of the agents.

    `signal` is set when the person (or the system) asked for the end, `lost` when an agent itself was killed, `hang`
    when the ranks would have ended by themselves no more.
    """

    ok: bool
    signal: int | None = None
    timed_out: bool = False
    lost: LostAgent | None = None
    hang: Hang | None = None


@dataclass(frozen=True)
class Evidence:
    """Evidence about a run that has ended: facts, each read once.

    `started` ranks were started, `hosts` are the names of their nodes by rank. `mesh` is what ranks reported of the
    process group they found themselves in (`reports_when_met`: as soon as they are in it), and `differences` is what
    they have otherwise than the plan. `failures` has the rank to blame first. `refusal` is the error that stopped the
    launcher itself. `folder` is the state of the run folder and `folder_name` its name in messages. `changed_inputs`
    are sentences about input files that changed while they were read. `oom_kills` counts processes that the kernel's
    out-of-memory killer took in the launcher's own control group, None where nothing counts them. `log_line` is the
    last that the first node's agent said. `elsewhere` are ranks that write into another machine's copy of the folder:
    nothing of them is known here. `awaited` is a sentence about ranks that did not come, where more is known than who
    had not met. `came`: who of the ranks had begun to join when the wait ended. `network` is what the libraries said of
    why ranks do not reach each other. `hung` is what the nodes saw of ranks that did not go on. `finished`: all steps
    were done and the weights are whole."""

    ending: Ending
    started: int
    hosts: Sequence[str] = ()
    mesh: Mapping[int, Mapping[str, Any]] | None = None
    differences: Sequence[str] = ()
    failures: Sequence[Failure] = ()
    refusal: PlannerError | None = None
    folder: FolderState = "whole"
    folder_name: str = "the run folder"
    changed_inputs: Sequence[str] = ()
    oom_kills: int | None = None
    meet_s: float = 0.0
    log_line: str | None = None
    reports_when_met: bool = True
    elsewhere: frozenset[int] = frozenset()
    awaited: str = ""
    came: Came = "none"
    network: str = ""
    hung: Sequence[Hang] = ()
    finished: bool = False


@dataclass(frozen=True)
class RunVerdict:
    """The verdict on a run, in the terms of run.json. `rank` is the one that caused the end, `cause` a word for
    programs."""

    status: str
    exit_code: int
    message: str
    rank: int | None = None
    cause: str = ""


NOT_MET = "not met"
"""The cause of a failed start whose ranks all came, lost each other, and said nothing of the reason."""
COMPLETED = RunVerdict("completed", 0, "")
UNKNOWN = RunVerdict("internal error", 1, "the executor itself failed")


def interrupted(number: int) -> RunVerdict:
    """The verdict of a run that a signal of this number ended."""
    message = f"stopped by {signal.Signals(number).name}"
    return RunVerdict("interrupted", INTERRUPTED + number, message, cause="interrupted")


def judge(evidence: Evidence) -> RunVerdict:
    """The verdict: a signal to the launcher decides first, then damage to the run folder, then the first failure."""
    ending, failure = evidence.ending, next(iter(evidence.failures), None)
    if ending.signal is not None:
        return _with_checkpoint(interrupted(ending.signal), failure)
    if evidence.folder == "deleted":
        message = f"{evidence.folder_name} was deleted while the run was under way, so nothing of it is kept"
        return _failed(evidence, message, cause="folder deleted")
    if ending.ok:
        if not evidence.differences:
            return COMPLETED
        return RunVerdict("launch failed", LAUNCH_FAILED, "; ".join(evidence.differences), cause="another world")
    if evidence.hung:
        return _of_hang(evidence)
    if _lacked_room(evidence, failure):
        return _failed(evidence, _no_space(evidence, failure), failure, cause="disk full")
    if evidence.refusal is not None:
        return RunVerdict("launch failed", evidence.refusal.exit_code, evidence.refusal.sentence)
    if ending.lost is not None and (failure is None or failure.collateral):
        return _of_lost(evidence, ending.lost)
    if failure is None:
        message = f"an agent ended without naming a rank: {evidence.log_line or 'no output'}"
        if not ending.timed_out:
            return RunVerdict("launch failed", LAUNCH_FAILED, message)
        message = f"ranks {_absent(evidence)} had not joined after {evidence.meet_s:g} s"
        if evidence.awaited:
            message = f"after {evidence.meet_s:g} s {evidence.awaited}"
        found = RunVerdict("launch failed", LAUNCH_FAILED, message, cause="did not join" * (evidence.came == "some"))
        return _by_network(evidence, found) if evidence.came == "all" else found
    found = _of_failure(evidence, failure)
    return _by_network(evidence, found) if failure.collateral and found.exit_code == LAUNCH_FAILED else found


def _by_network(evidence: Evidence, found: RunVerdict) -> RunVerdict:
    """Of ranks that all came and did not reach each other: with the libraries' reason, where it is known."""
    if not evidence.network:
        return replace(found, cause=NOT_MET)
    return replace(found, message=f"{found.message.rstrip('.')}: {evidence.network}", cause="network")


def _with_checkpoint(found: RunVerdict, failure: Failure | None) -> RunVerdict:
    """The verdict, with the ranks' reports of the checkpoint that was requested."""
    if failure is None or failure.record is None or not failure.asked:
        return found
    return replace(found, message=f"{found.message}: {failure.record.message}")


def may_pass(evidence: Evidence, found: RunVerdict) -> bool:
    """Whether another start of the run may do better: a rank or a node died, or hung. What our own code refused (a loss
    that is not a number), a full disk, want of memory or a changed input stay as they are."""
    failure = next(iter(evidence.failures), None)
    if evidence.finished or evidence.ending.ok or evidence.ending.signal is not None or evidence.folder != "whole":
        return False
    if found.status in ("hung", "node lost"):
        return True
    refused = failure is not None and failure.record is not None and failure.record.refusal
    return found.status == "training failed" and not refused and found.cause not in ("disk full", "input changed")


def _of_hang(evidence: Evidence) -> RunVerdict:
    """Found before any rank ended: what ranks and agents say afterwards comes of their being ended."""
    message = sentence(evidence.hung, evidence.hosts, evidence.folder_name)
    stopped = any(one.kind == "stopped" for one in evidence.hung)
    rank = next((one.rank for one in blamed(evidence.hung)), None)
    return RunVerdict("hung", HUNG, message, rank, "rank stopped" if stopped else "rank stuck")


def _of_failure(evidence: Evidence, failure: Failure) -> RunVerdict:
    message = f"rank {failure.rank} on {evidence.hosts[failure.rank]} failed first: {failure.message}"
    record = failure.record
    if record is not None and failure.asked:  # a signal that the launcher did not get
        return RunVerdict("interrupted", record.exit_code, record.message, cause="interrupted")
    if record is not None and record.refusal:
        status = "training failed" if record.exit_code == TRAINING_FAILED else "launch failed"
        cause = "out of memory" if record.out_of_memory else record.cause
        return RunVerdict(status, record.exit_code, message, failure.rank, cause)
    if failure.signal == signal.SIGBUS and evidence.changed_inputs:
        message += f": {'; '.join(evidence.changed_inputs)}"
        return _failed(evidence, message, failure, cause="input changed")
    cause = ""
    if failure.signal == signal.SIGKILL and failure.oom_kills is not None:
        cause = "out-of-memory killer" if failure.oom_kills else "killed"
    return _failed(evidence, message, failure, cause=cause)


def _of_lost(evidence: Evidence, lost: LostAgent) -> RunVerdict:
    name = signal.Signals(lost.signal).name
    if lost.signal == signal.SIGKILL and evidence.oom_kills:
        message = f"the agent of {lost.host} was killed by SIGKILL of the kernel's out-of-memory killer"
        return _failed(evidence, message, cause="out-of-memory killer")
    message = f"the agent of {lost.host} was killed by {name}"
    return RunVerdict("node lost", NODE_LOST, message, cause="node lost")


def _failed(evidence: Evidence, message: str, failure: Failure | None = None, *, cause: str) -> RunVerdict:
    """Training failed where all ranks had met, the launch where they had not."""
    met = not evidence.reports_when_met or (evidence.mesh is not None and not _absent(evidence))
    # What ranks had reported is gone with a folder; that they had a folder at all is what training needs.
    met = met or evidence.folder == "deleted"
    status, code = ("training failed", TRAINING_FAILED) if met else ("launch failed", LAUNCH_FAILED)
    return RunVerdict(status, code, message, failure.rank if failure else None, cause)


def _lacked_room(evidence: Evidence, failure: Failure | None) -> bool:
    """Whether a disk without room explains the end: a rank said so, or the run folder's disk is full and no rank could
    say anything else."""
    if failure is None:
        return evidence.folder == "full"
    if failure.no_space:
        return True
    silent = failure.record is None and failure.signal in (None, signal.SIGBUS, signal.SIGTERM)
    return evidence.folder == "full" and silent and not evidence.changed_inputs


def _no_space(evidence: Evidence, failure: Failure | None) -> str:
    who = f"rank {failure.rank} on {evidence.hosts[failure.rank]} failed first: {failure.message}" if failure else ""
    if evidence.folder != "full":
        return who
    room = f"no space is left on the disk of {evidence.folder_name}: free some, or give --run-dir on another disk"
    return f"{room} ({who.rstrip('.')})" if who else room


def mesh_differences(
    mesh: Mapping[int, Mapping[str, Any]], started: int, world: int, elsewhere: frozenset[int] = frozenset()
) -> list[str]:
    """Differences between the ranks' process groups and the plan; usually a world of one rank. Ranks `elsewhere` are
    not judged."""
    wrong = []
    if absent := sorted(set(range(started)) - set(mesh) - elsewhere):
        wrong.append(f"ranks {absent} never reported the process group they joined")
    for rank, seen in sorted(mesh.items()):
        if seen.get("world_size") != world:
            wrong.append(f"rank {rank} trained in a world of {seen.get('world_size')}, the plan has {world}")
    return wrong


def _absent(evidence: Evidence) -> list[int]:
    return sorted(set(range(evidence.started)) - set(evidence.mesh or ()) - evidence.elsewhere)
