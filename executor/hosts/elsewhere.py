"""The checkpoint from which a run resumes on ssh hosts that do not see the run folder: each host reports its files.

Not here: what makes a checkpoint whole over several folders (holdings.py), or the answer of a host (node.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from executor.folder import holdings
from executor.folder.checkpoints import CHECKPOINTS, STEP
from executor.folder.holdings import HeldCheckpoint
from executor.hosts import ssh
from executor.hosts.hosts import HostEntry
from executor.hosts.ssh import Connections
from executor.run import attempts
from executor.run.attempts import ResumePoint, read_asked
from planner.basics.errors import PlannerError

LIST_S, READ_S = 60.0, 3600.0
"""For a host to say what it has, and to read all files of a checkpoint."""
HERE = "this machine"


def newest(run: Path, machines: Sequence[HostEntry]) -> ResumePoint:
    """The highest step whose checkpoint is whole over the folders of these hosts. PlannerError (exit code 3) where none
    is, and hosts that do not answer may have what is missing."""
    asked = read_asked(run)
    if asked.checkpoints is None or not asked.kept or asked.tool:  # whose hosts share the folder
        return attempts.newest(run)
    request = {"kind": "held", "folder": str(run.absolute()), "place": asked.place, "kept": asked.kept}
    with ssh.contact(machines, lambda _: None) as contact:
        shared, found, silent = _asked(contact, request, LIST_S)
        if len(shared) == len(machines):
            return attempts.newest(run)
        return _whole(run, contact, request, found, silent, here=bool(shared))


def _whole(
    run: Path,
    contact: Connections,
    request: Mapping[str, object],
    listed: holdings.Holdings,
    silent: list[str],
    *,
    here: bool,
) -> ResumePoint:
    """The newest one whose files have been read by the hosts that have them."""
    read: list[int] = []
    while True:
        holding = dict(listed) | ({HERE: holdings.held(run, read)} if here else {})
        best, skipped = holdings.newest(holding, silent)
        if best is None or best.step in read:
            break
        read.append(best.step)
        _, listed, silent = _asked(contact, {**request, "contents": read}, READ_S)
    if best is not None:
        return ResumePoint(run / CHECKPOINTS / STEP.format(best.step), best.step, tuple(skipped), best)
    if why := holdings.lost(holding, silent):
        fix = "Bring the host back, or start anew with the run folder on a disk that all hosts share"
        raise PlannerError("checkpoint", None, why, fix, exit_code=3)
    return ResumePoint(None, 0, tuple(skipped))


def _asked(
    contact: Connections, request: Mapping[str, object], timeout_s: float
) -> tuple[list[str], dict[str, tuple[HeldCheckpoint, ...]], list[str]]:
    """(hosts that see the run folder, what the others hold, hosts that do not answer)."""
    shared, found, silent = [], {}, []
    for one in contact.ask(request, timeout_s):
        name = one.machine.name if one.machine.port is None else f"{one.machine.name}:{one.machine.port}"
        if one.value is None:
            silent.append(name)
        elif one.value["shared"]:
            shared.append(name)
        else:
            found[name] = msgspec.convert(one.value["held"], tuple[HeldCheckpoint, ...])
    return shared, found, silent
