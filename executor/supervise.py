"""Watch the agents of one run: follow rank 0's log, end everything together, and name the rank that failed first.

Not here: starting agents (launchers/) or what a run folder holds (rundir.py). Nothing outside the run is ever
signalled: a process belongs to it only if it carries the run's id in its environment.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

import msgspec

from executor import rundir

RUN_ID_VARIABLE = "MESHWRIGHT_RUN_ID"
POLL_S = 0.1
SETTLE_S = 1.5
GRACE_S = 8.0
PR_SET_CHILD_SUBREAPER = 36

# What a healthy rank says when another one has gone away: never the cause while any other explanation exists.
COLLATERAL = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|recvValue failed|remote process exited|socket timeout"
    r"|wait timeout|timed out (after )?waiting|DistBackendError|DistNetworkError|DistStoreError|nccl.*abort",
    re.IGNORECASE,
)
PYTHON_ERROR = re.compile(r"^(?:\[rank\d+\]:\s*)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b.*)")

Echo = Callable[[str], None]


@dataclass(frozen=True)
class Agent:
    """One node's torchrun: its process, whose process group it leads, and the names shown for it."""

    node: int
    host: str
    process: subprocess.Popen[bytes]
    log: Path


@dataclass(frozen=True)
class Ending:
    """How the agents ended.

    `signal` is set when the person (or the system) asked for the end, `lost` when an agent itself was killed.
    """

    ok: bool
    signal: int | None = None
    timed_out: bool = False
    lost: Agent | None = None


@dataclass(frozen=True)
class Failure:
    """One rank's end as far as its own words, its agent's record and its log tell."""

    rank: int
    message: str
    exit_code: int | None
    time: float
    collateral: bool


def supervise(
    agents: list[Agent],
    folder: Path,
    run_id: str,
    echo: Echo,
    *,
    signals: list[int],
    met: Callable[[], bool],
    meet_s: float,
) -> Ending:
    """Wait for every agent; when one fails, a signal comes or the ranks do not meet within `meet_s`, end them all.

    `signals` grows while we wait (`received_signals`). `met` says whether every rank has reported in; it is asked
    until it says yes.
    """
    follower = LogFollower(folder, agents[0].host, echo)
    deadline, together = time.monotonic() + meet_s, False
    with subreaper():
        try:
            while True:
                follower.poll()
                codes = [agent.process.poll() for agent in agents]
                if signals:
                    return Ending(ok=False, signal=signals[0])
                if any(code not in (None, 0) for code in codes):
                    _let_settle(agents)
                    lost = [agent for agent in agents if (agent.process.returncode or 0) < 0]
                    return Ending(ok=False, lost=lost[0] if lost else None)
                if all(code == 0 for code in codes):
                    return Ending(ok=True)
                together = together or met()
                if not together and time.monotonic() > deadline:
                    return Ending(ok=False, timed_out=True)
                time.sleep(POLL_S)
        finally:
            tear_down(agents, run_id, impatient=lambda: len(signals) > 1)
            follower.poll(final=True)


def _let_settle(agents: list[Agent]) -> None:
    """Let other agents see for themselves what failed: the first to end may only have noticed that a peer was gone."""
    deadline = time.monotonic() + SETTLE_S
    while any(agent.process.poll() is None for agent in agents) and time.monotonic() < deadline:
        time.sleep(POLL_S / 2)


def tear_down(
    agents: list[Agent], run_id: str, grace_s: float = GRACE_S, impatient: Callable[[], bool] = lambda: False
) -> None:
    """End every process of the run: SIGTERM, a grace, SIGKILL. Returns when none is left."""
    for agent in agents:
        _signal_group(agent.process, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any(agent.process.poll() is None for agent in agents) and time.monotonic() < deadline and not impatient():
        time.sleep(POLL_S / 2)
    for agent in agents:
        _signal_group(agent.process, signal.SIGKILL)
    for agent in agents:
        agent.process.wait()
    # torchrun gives every rank a session of its own: ranks whose agent was killed are in no group of ours.
    deadline, killed = time.monotonic() + grace_s, set[int]()
    while (left := set(processes_of(run_id)) | _unreaped(killed)) and time.monotonic() < deadline:
        for pid in left - killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= left
        time.sleep(POLL_S / 2)


def processes_of(run_id: str) -> list[int]:
    """Living processes (zombies are not) that were started by the run, by the id in their environment."""
    mark = f"{RUN_ID_VARIABLE}={run_id}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:  # gone meanwhile, or somebody else's
            continue
    return [pid for pid in found if pid != os.getpid()]


@contextlib.contextmanager
def received_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM and SIGHUP instead of dying of them. Off the main thread none can be collected."""
    got: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield got
        return

    def note(number: int, _: FrameType | None) -> None:
        got.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def subreaper() -> Iterator[None]:
    """Inherit orphans while inside (Linux): ranks whose agent was killed become our children, and can be reaped."""
    if sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def first_failure(folder: Path, ranks_per_node: int) -> Failure | None:
    """The rank to blame: the earliest failure that is not merely another rank noticing the loss."""
    failures = sorted(_failures(folder, ranks_per_node), key=lambda one: (one.collateral, one.time))
    return failures[0] if failures else None


class NodeFailure(msgspec.Struct, frozen=True):
    """One rank that its agent saw end badly. A negative exit code is a signal."""

    rank: int
    local_rank: int
    exit_code: int
    time: float


class NodeErrors(msgspec.Struct, frozen=True):
    """failed/node-N.json, as executor.worker.agent writes it."""

    failures: tuple[NodeFailure, ...]


def _failures(folder: Path, ranks_per_node: int) -> Iterator[Failure]:
    said = rundir.read_errors(folder)
    seen: dict[int, NodeFailure] = {}
    for path in (folder / rundir.FAILED).glob("node-*.json"):
        seen |= {one.rank: one for one in msgspec.json.decode(path.read_bytes(), type=NodeErrors).failures}
    for rank in sorted(said.keys() | seen.keys()):
        own, agent = said.get(rank), seen.get(rank)
        node, local_rank = divmod(rank, ranks_per_node)
        log = rundir.rank_log(folder, node, local_rank, "stderr")
        written = log.stat().st_mtime if log else float("inf")
        if own is not None:
            words, when = own
            yield Failure(rank, words.message, words.exit_code, when, collateral=bool(COLLATERAL.search(words.message)))
        elif agent is not None and agent.exit_code < 0:
            # Died of a signal: nobody's collateral, unless it is the SIGTERM with which an agent ends its other ranks.
            name = signal.Signals(-agent.exit_code).name
            hint = " (often the kernel's out-of-memory killer)" if name == "SIGKILL" else ""
            yield Failure(rank, f"killed by {name}{hint}", agent.exit_code, agent.time, collateral=name == "SIGTERM")
        elif agent is not None:
            line = last_error_line(log) if log else None
            # The agent knows whole seconds only; a traceback is the last thing a log gets, so the log's age is finer.
            message = line or f"exit code {agent.exit_code}"
            yield Failure(
                rank,
                message,
                agent.exit_code,
                min(written, agent.time + 1),
                collateral=bool(COLLATERAL.search(message)),
            )


def last_error_line(log: Path) -> str | None:
    """The last line that reads like a Python error, else the last line with anything on it."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - 65536))
        lines = [line.strip() for line in stream.read().decode(errors="replace").splitlines() if line.strip()]
    for line in reversed(lines):
        if match := PYTHON_ERROR.match(line):
            return match[1]
    return lines[-1] if lines else None


@dataclass
class LogFollower:
    """Rank 0's stdout and stderr, line by line to `echo`, prefixed host:rank; a line repeated at once is folded."""

    folder: Path
    host: str
    echo: Echo
    _places: dict[str, tuple[Path, int, bytes]] = field(default_factory=dict)
    _last: str = ""
    _repeats: int = 0

    def poll(self, final: bool = False) -> None:
        """Pass on what was written since; with `final`, unfinished lines and pending repeats too."""
        for stream in ("stdout", "stderr"):
            path, offset, rest = self._places.get(stream) or (rundir.rank_log(self.folder, 0, 0, stream), 0, b"")
            if path is None:
                continue
            with path.open("rb") as file:
                file.seek(offset)
                fresh = file.read()
            *lines, rest_now = (rest + fresh).split(b"\n")
            if final and rest_now:
                lines, rest_now = [*lines, rest_now], b""
            self._places[stream] = (path, offset + len(fresh), rest_now)
            for line in lines:
                self._pass_on(line.decode(errors="replace").rsplit("\r", 1)[-1])
        if final:
            self._flush_repeats()

    def _pass_on(self, line: str) -> None:
        if line == self._last:
            self._repeats += bool(line)
            return
        self._flush_repeats()
        self._last = line
        if line:
            self.echo(f"{self.host}:0  {line}")

    def _flush_repeats(self) -> None:
        if self._repeats:
            self.echo(f"{self.host}:0  (last line repeated x{self._repeats})")
        self._repeats = 0


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)


def _unreaped(pids: set[int]) -> set[int]:
    """Collect those inherited children that have ended; the ones that are still to."""
    waiting = set()
    for pid in pids:
        with contextlib.suppress(ChildProcessError):  # not ours, or collected before
            if os.waitpid(pid, os.WNOHANG)[0] == 0:
                waiting.add(pid)
    return waiting
