"""Watch the agents of one run: follow rank 0's log, and end everything together.

Not here: starting agents (launchers/), which rank failed first (failures.py), or what a run's end is called
(verdict.py). Nothing outside the run is ever signalled (processes.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO

from executor.folder import checkpoints, rundir
from executor.folder.outcome import RANK_PREFIX, TRACEBACK
from executor.system.processes import identity, processes_of
from executor.watch import hangs
from executor.watch.verdict import Ending, LostAgent
from planner.basics import reading

POLL_S = 0.1
SETTLE_S = 1.5
GRACE_S = 8.0
GENTLE = (signal.SIGTERM, signal.SIGUSR1)
"""Signals of schedulers. A run that writes checkpoints is asked for one and ends by itself."""
CHECKPOINT_S = 120.0
"""How long it may take for that; a second signal ends it at once."""
PR_SET_CHILD_SUBREAPER = 36
FRAMEWORK = re.compile(
    r"-packages/\S+\.py:\d+: \w*Warning: "  # Python's warnings module
    r"|^\[20\d\d-[\d :,-]+\] \[(?:WARNING|INFO)\] \["  # DeepSpeed's logger
    r"|^(?:\[rank\d+\]:)?[WI]\d{4} \d\d:\d\d:\d\d\.\d+ .*\] "  # torch's
)
"""What frameworks write of themselves between the lines of steps."""
CHAINED = ("During handling of the above exception", "The above exception was the direct cause")

Echo = Callable[[str], None]


@dataclass(frozen=True)
class Followed:
    """A rank whose output is passed on, and the name that its lines begin with."""

    node: int
    local_rank: int
    label: str


@dataclass(frozen=True)
class Agent:
    """One node's torchrun: its process, whose process group it leads, and the names shown for it. `answers` is the end
    of the pipe on which it says what it has read (worker/agent.py)."""

    node: int
    host: str
    process: subprocess.Popen[bytes]
    log: Path
    answers: IO[bytes]


def supervise(
    agents: list[Agent],
    folder: Path,
    run_id: str,
    echo: Echo,
    *,
    signals: list[int],
    met: Callable[[], bool],
    meet_s: float,
    look: Callable[[], object] = lambda: None,
    follow: Sequence[Followed] = (),
    watch: hangs.HangWatch | None = None,
) -> Ending:
    """Wait for every agent; when one fails, a signal comes, the ranks do not meet within `meet_s` or `watch` finds that
    they hang, end them all.

    `signals` grows while we wait (`received_signals`). `met` says whether every rank has reported in; it is asked
    until it says yes, and what it raises ends the run. `look` is called all the while. `follow` are the ranks whose
    output is passed on, the first of the first agent by default. A scheduler's signal first asks the ranks for a
    checkpoint, where they write any.
    """
    follower = LogFollower(folder, tuple(follow) or (Followed(0, 0, f"{agents[0].host}:0"),), echo)
    deadline, together, leave_by = time.monotonic() + meet_s, False, 0.0
    hang: hangs.Hang | None = None
    checkpoints.forget(folder)  # what a killed run left
    with subreaper():
        try:
            while True:
                follower.poll()
                codes = [agent.process.poll() for agent in agents]
                if signals and not leave_by:
                    asked = signals[0] in GENTLE and checkpoints.ask_to_stop(folder)
                    leave_by = time.monotonic() + (CHECKPOINT_S if asked else 0.0)
                if signals and (len(signals) > 1 or time.monotonic() >= leave_by or None not in codes):
                    return Ending(ok=False, signal=signals[0])
                if any(code not in (None, 0) for code in codes):
                    _let_settle(agents)
                    if signals:
                        return Ending(ok=False, signal=signals[0])
                    lost = [LostAgent(one.host, -code) for one in agents if (code := one.process.returncode or 0) < 0]
                    return Ending(ok=False, lost=lost[0] if lost else None)
                if all(code == 0 for code in codes):
                    return Ending(ok=True)
                together = together or met()
                look()
                if not together and time.monotonic() > deadline:
                    return Ending(ok=False, timed_out=True)
                if watch is not None and (hang := watch.look([agent.process.pid for agent in agents])):
                    hangs.keep(folder, hang)
                    return Ending(ok=False, hang=hang)
                time.sleep(POLL_S)
        finally:
            # Ranks that hang end themselves no more.
            tear_down(
                agents,
                run_id,
                impatient=lambda: hang is not None or len(signals) > 1 or not _have_ranks(folder, agents),
            )
            follower.poll(final=True)


def _have_ranks(folder: Path, agents: list[Agent]) -> bool:
    """Whether an agent has started its ranks. One that has none, and waits for other nodes, hears no SIGTERM."""
    return any(rundir.rank_log(folder, agent.node, 0, "stderr") for agent in agents)


def _let_settle(agents: list[Agent]) -> None:
    """Let other agents see for themselves what failed: the first to end may only have noticed that a peer was gone."""
    deadline = time.monotonic() + SETTLE_S
    while any(agent.process.poll() is None for agent in agents) and time.monotonic() < deadline:
        time.sleep(POLL_S / 2)


def tear_down(
    agents: list[Agent], run_id: str, grace_s: float = GRACE_S, impatient: Callable[[], bool] = lambda: False
) -> None:
    """End every process of the run that this one started: SIGTERM, a grace, SIGKILL. Returns when none is left."""
    for agent in agents:
        _signal_group(agent.process, signal.SIGTERM)
    deadline = time.monotonic() + grace_s
    while any(agent.process.poll() is None for agent in agents) and time.monotonic() < deadline and not impatient():
        time.sleep(POLL_S / 2)
    for agent in agents:
        _signal_group(agent.process, signal.SIGKILL)
    for agent in agents:
        agent.process.wait()
        agent.answers.close()
    # torchrun gives every rank a session of its own: ranks whose agent was killed are in no group of ours.
    deadline, killed = time.monotonic() + grace_s, set[int]()
    while (left := set(processes_of(run_id, identity())) | _unreaped(killed)) and time.monotonic() < deadline:
        for pid in left - killed:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        killed |= left
        time.sleep(POLL_S / 2)


@contextlib.contextmanager
def received_signals() -> Iterator[list[int]]:
    """Collect SIGINT, SIGTERM, SIGHUP and SIGUSR1 instead of dying of them; off the main thread none can be."""
    got: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield got
        return

    def note(number: int, _: FrameType | None) -> None:
        got.append(number)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield got
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def hang_up(signals: list[int], stream: int) -> Iterator[None]:
    """Append SIGHUP to `signals` when the reader of `stream` is gone: over ssh without a terminal, that is the only
    sign that the caller has ended. A file or a device has no reader to lose."""
    poll = select.poll()
    poll.register(stream, 0)  # poll reports a lost reader without being asked for any event

    def lost() -> bool:
        found = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
        signals.extend([signal.SIGHUP] * found)
        return found

    with meanwhile(lost, POLL_S):
        yield


@contextlib.contextmanager
def meanwhile(work: Callable[[], object], every_s: float) -> Iterator[None]:
    """Call `work` periodically in a thread, while inside, until it returns a value."""
    ended = threading.Event()

    def repeat() -> None:
        while not ended.wait(every_s) and not work():
            pass

    worker = threading.Thread(target=repeat, daemon=True)
    worker.start()
    try:
        yield
    finally:
        ended.set()
        worker.join()


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


@dataclass
class LogFollower:
    """Stdout and stderr of the ranks `follow`, line by line to `echo`, prefixed host:rank; a line repeated at once is
    folded, and of a traceback the last line is passed on: most are of ranks that lost another. The rest is in the log.
    """

    folder: Path
    follow: Sequence[Followed]
    echo: Echo
    _places: dict[tuple[Followed, str], tuple[Path, int, bytes]] = field(default_factory=dict)
    _last: tuple[str, str] = ("", "")
    _repeats: int = 0
    _warned: dict[Followed, bool] = field(default_factory=dict)
    _in_traceback: set[tuple[Followed, str]] = field(default_factory=set)

    def poll(self, final: bool = False) -> None:
        """Pass on what was written since; with `final`, unfinished lines and pending repeats too."""
        for one in self.follow:
            for stream in ("stdout", "stderr"):
                self._read(one, stream, final)
        if final:
            self._flush_repeats()

    def skip(self) -> None:
        """Pass on nothing of the whole lines that are there now."""
        for one in self.follow:
            for stream in ("stdout", "stderr"):
                path = rundir.rank_log(self.folder, one.node, one.local_rank, stream)
                if path is not None:
                    with reading.opened(path) as file:
                        size = file.seek(0, os.SEEK_END)
                        file.seek(max(0, size - rundir.TAIL_BYTES))
                        self._places[one, stream] = (
                            path,
                            size - len(file.read(rundir.TAIL_BYTES).rpartition(b"\n")[2]),
                            b"",
                        )

    def moved(self, folder: Path) -> None:
        """The logs are in this folder now, and are gone on with where they were read to."""
        for place, (path, offset, rest) in self._places.items():
            self._places[place] = folder / path.relative_to(self.folder), offset, rest
        self.folder = folder

    def _read(self, one: Followed, stream: str, final: bool) -> None:
        place = self._places.get((one, stream))
        path, offset, rest = place or (rundir.rank_log(self.folder, one.node, one.local_rank, stream), 0, b"")
        if path is None:
            return
        try:
            with reading.opened(path) as file:
                file.seek(offset)
                fresh = file.read(reading.LINE_BYTES)
        except OSError:  # the run folder was deleted
            return
        *lines, rest_now = (rest + fresh).split(b"\n")
        more = final and len(fresh) == reading.LINE_BYTES
        if (final and rest_now and not more) or len(rest_now) > reading.LINE_BYTES:
            lines, rest_now = [*lines, rest_now], b""
        self._places[one, stream] = (path, offset + len(fresh), rest_now)
        for line in lines:
            text = line.decode(errors="replace").rsplit("\r", 1)[-1]
            if self._of_warning(one, text):
                continue
            if not self._of_traceback((one, stream), text):
                self._pass_on(one.label, text)
        if more:
            self._read(one, stream, final)

    def _of_warning(self, one: Followed, line: str) -> bool:
        """Whether a line is a framework's warning, or the line of code that Python shows below it. That there are any
        is said once."""
        if FRAMEWORK.search(line):
            if one not in self._warned:
                self._pass_on(one.label, "(warnings of frameworks are in its log)")
            self._warned[one] = True
            return True
        below = self._warned.get(one, False) and line.startswith("  ")
        self._warned.update({one: False} if one in self._warned else {})
        return below

    def _of_traceback(self, source: tuple[Followed, str], line: str) -> bool:
        """Whether a line is one of a traceback, before its last."""
        bare = RANK_PREFIX.sub("", line)
        if bare.startswith(TRACEBACK):
            self._in_traceback.add(source)
        elif bare and not bare[0].isspace() and not bare.startswith(CHAINED):
            self._in_traceback.discard(source)
            return False
        return source in self._in_traceback or bare.startswith(CHAINED)

    def _pass_on(self, label: str, line: str) -> None:
        if (label, line) == self._last:
            self._repeats += bool(line)
            return
        self._flush_repeats()
        self._last = label, line
        if line:
            self.echo(f"{label}  {line}")

    def _flush_repeats(self) -> None:
        if self._repeats:
            self.echo(f"{self._last[0]}  (last line repeated x{self._repeats})")
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
