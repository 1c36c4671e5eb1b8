"""Processes of a run and its launcher: identified and ended.

A run's processes carry its id and their launcher's identity in their environment; nothing else is ever signalled. Not
here: starting them (launchers/), or watching them (supervise.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from planner.basics.errors import PlannerError

RUN_ID_VARIABLE = "MESHWRIGHT_RUN_ID"
LAUNCHER_VARIABLE = "MESHWRIGHT_SUPERVISOR"
PROC = Path("/proc")
PR_SET_PDEATHSIG = 1
POLL_S = 0.05
START_TIME = 19
"""Field of /proc/PID/stat, counted from the process's state on: clock ticks from boot to its start."""


def answer_of(module: str, *words: str, env: Mapping[str, str] | None = None) -> tuple[dict[str, Any], str]:
    """(what a module of the worker says as JSON, ""), or why it said nothing. Its refusal is raised."""
    command = [sys.executable, "-m", f"executor.worker.{module}", *words]
    done = subprocess.run(command, capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        return {}, done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
    said: dict[str, Any] = msgspec.json.decode(done.stdout.splitlines()[-1])
    if "refused" in said:
        raise PlannerError(*said["refused"])
    return said, ""


def die_with_parent(number: int) -> None:
    """Ask Linux for this signal when the process that started this one dies: nothing is left of it then."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def identity(pid: int | None = None) -> str:
    """ "PID:START" of a process, this one by default: a number that is used again has another start."""
    pid = os.getpid() if pid is None else pid
    return f"{pid}:{_started(pid) or 0}"


def alive(who: str) -> bool:
    """Whether the process of that identity runs here (and is not a zombie)."""
    pid, _, start = who.partition(":")
    return pid.isdigit() and _started(int(pid)) == int(start or 0)


def has_open(who: str, path: Path) -> bool:
    """Whether the process of that identity has a file open."""
    try:
        named = path.stat()
        return alive(who) and any(_same(one, named) for one in (PROC / who.partition(":")[0] / "fd").iterdir())
    except OSError:
        return False


def processes_of(run_id: str, launcher: str | None = None) -> list[int]:
    """Living processes (zombies are not) that were started by the run, by the id in their environment; of several nodes
    in this PID namespace only those that the process of identity `launcher` started, where it is given."""
    return [
        pid
        for pid, environment in _others()
        if environment.get(RUN_ID_VARIABLE) == run_id and launcher in (None, environment.get(LAUNCHER_VARIABLE))
    ]


def launchers_of(run_id: str) -> set[str]:
    """The identities of the processes that started what `processes_of` finds."""
    found = (environment for _, environment in _others() if environment.get(RUN_ID_VARIABLE) == run_id)
    return {one for environment in found if (one := environment.get(LAUNCHER_VARIABLE))}


def ranks_of(run_id: str) -> dict[int, str]:
    """The identity of each rank's process of a run, by rank: of processes with one rank in their environment the first,
    since those that it started inherit it."""
    found: dict[int, tuple[int, int]] = {}
    for pid, environment in _others():
        rank, started = environment.get("RANK", ""), _started(pid)
        if environment.get(RUN_ID_VARIABLE) == run_id and rank.isdigit() and started is not None:
            found[int(rank)] = min(found.get(int(rank), (started, pid)), (started, pid))
    return {rank: f"{pid}:{started}" for rank, (started, pid) in found.items()}


def orphans() -> list[int]:
    """Processes of runs whose launcher, which was on this machine, no longer lives."""
    found = []
    for pid, environment in _others():
        launcher = environment.get(LAUNCHER_VARIABLE, "")
        if RUN_ID_VARIABLE in environment and ":" in launcher and not alive(launcher):
            found.append(pid)
    return found


def end(find: Callable[[], list[int]], grace_s: float) -> set[int]:
    """End what `find` finds, again and again: SIGTERM, after `grace_s` SIGKILL. The processes that were signalled."""
    signalled: set[int] = set()
    for number in (signal.SIGTERM, signal.SIGKILL):
        deadline = time.monotonic() + grace_s
        sent: set[int] = set()
        while (left := set(find())) and time.monotonic() < deadline:
            for pid in left - sent:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, number)
            sent |= left
            time.sleep(POLL_S)
        signalled |= sent
    return signalled


def _others() -> Iterator[tuple[int, dict[str, str]]]:
    """Processes of this person in this PID namespace, with the environment that each was started with."""
    here = namespace(os.getpid())
    for entry in PROC.glob("[0-9]*"):
        pid = int(entry.name)
        if pid == os.getpid():
            continue
        try:
            raw = (entry / "environ").read_bytes()
        except OSError:  # gone meanwhile, or another user's
            continue
        # A container's processes have numbers of its own: their record of a launcher means nothing here.
        if raw and RUN_ID_VARIABLE.encode() in raw and namespace(pid) == here:
            pairs = (item.partition("=") for item in raw.decode(errors="replace").split("\0"))
            yield pid, {name: value for name, _, value in pairs}


def _same(descriptor: Path, named: os.stat_result) -> bool:
    try:
        return os.path.samestat(descriptor.stat(), named)
    except OSError:  # closed meanwhile
        return False


def namespace(pid: int) -> str:
    """The PID namespace that a process is in; nothing where the system does not say."""
    try:
        return os.readlink(PROC / str(pid) / "ns" / "pid")
    except OSError:
        return ""


def said(path: Path) -> str:
    """Content of a small system file; empty where it does not exist or cannot be read."""
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""


def stat_of(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the process's state on; none where there is no such process."""
    return said(PROC / str(pid) / "stat").rpartition(")")[2].split()


def _started(pid: int) -> int | None:
    """When a living process was started; None when there is none."""
    fields = stat_of(pid)
    return None if not fields or fields[0] in ("Z", "X") else int(fields[START_TIME])
