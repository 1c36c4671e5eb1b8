"""The rank that failed first, from the ranks' own reports and their agents' exit codes.

A rank's record (executor.worker.world.lastwords) has the type of its exception and the time; a rank that was killed, or
that left through `os._exit`, writes none, and only its agent knows its exit code. torchelastic's own error files are
not read: they have whole seconds, and a rank that was killed has none. Not here: how a run ended as a whole
(verdict.py).
"""

from __future__ import annotations

import errno
import re
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

import msgspec

from executor.folder import rundir
from executor.folder.rundir import RankError

OWN_KILL_S = 20.0
"""An agent ends its other ranks by SIGTERM and, 30 s later, by SIGKILL: a kill that late after another failure is its
own."""
LOST_PEER_TYPES = ("torch.distributed.Dist", "ConnectionError", "ConnectionResetError", "BrokenPipeError")
"""Beginnings of the names of exceptions by which a healthy rank learns that another one is gone."""
SILENT_TYPES = ("RuntimeError", "torch.AcceleratorError", "")
"""Types that say nothing of the cause: gloo's and NCCL's failures come as these, and so does much else."""
LOST_PEER = re.compile(
    r"gloo/(transport|rendezvous)/|connection (was )?(closed|reset|refused)|broken pipe|recvValue failed"
    r"|remote process exited|socket timeout|wait timeout|timed out (after )?waiting"
    r"|Dist(Backend|Network|Store)Error|nccl.*(abort|remote|timeout|watchdog)",
    re.IGNORECASE,
)
"""What gloo, NCCL and torch's store say of a peer that is gone; read only where the type is silent."""
ERROR_LINE = re.compile(r"^(?:\[rank\d+\]:\s*)?([A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)\b.*)")
DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT)


class Blame(IntEnum):
    """Kinds of ends of a rank, the likeliest cause of the run's end first."""

    OWN_END = 0
    """A signal, or an exit that no exception explains: no other rank's failure makes a rank end this way."""
    EXCEPTION = 1
    LOST_PEER = 2
    """It noticed that another rank was gone."""
    ENDED = 3
    """Its agent ended it, after another rank's failure."""


@dataclass(frozen=True)
class Failure:
    """One rank's end. `time_ns` is Unix time; `exit_code` is negative for a signal.

    `record` is what the rank wrote itself; None when it could not. `oom_kills` is how many processes the kernel's
    out-of-memory killer took meanwhile in the control group of the rank's node, None where that is not counted.
    """

    rank: int
    message: str
    exit_code: int | None
    time_ns: int
    blame: Blame
    record: RankError | None = None
    oom_kills: int | None = None

    @property
    def collateral(self) -> bool:
        """Whether it only followed from another rank's end."""
        return self.blame >= Blame.LOST_PEER

    @property
    def asked(self) -> bool:
        """Whether it ended after a checkpoint, since it was sent a signal."""
        return self.record is not None and self.record.cause == "interrupted"

    @property
    def signal(self) -> signal.Signals | None:
        """The signal that ended the rank."""
        return signal.Signals(-self.exit_code) if self.exit_code is not None and self.exit_code < 0 else None

    @property
    def no_space(self) -> bool:
        """Whether a write failed for want of room on a disk."""
        return self.record is not None and self.record.errno in DISK_ERRORS


class NodeFailure(msgspec.Struct, frozen=True):
    """One rank that its agent saw end badly. A negative exit code is a signal."""

    rank: int
    local_rank: int
    exit_code: int
    time: float


class NodeErrors(msgspec.Struct, frozen=True):
    """failed/node-N.json, as executor.worker.agent writes it. `oom_kills` as in Failure."""

    failures: tuple[NodeFailure, ...]
    oom_kills: int | None = None


def failures(folder: Path, ranks_per_node: int) -> tuple[Failure, ...]:
    """Every rank that ended badly, the one to blame first: by blame, then by time."""
    return tuple(sorted(_failures(folder, ranks_per_node), key=lambda one: (one.blame, one.time_ns, one.rank)))


def _failures(folder: Path, ranks_per_node: int) -> Iterator[Failure]:
    records = rundir.read_errors(folder)
    for path in sorted((folder / rundir.FAILED).glob("node-*.json")):
        node = rundir.read_json(path, NodeErrors)
        earliest = min((one.time for one in node.failures), default=0.0)
        for one in node.failures:
            log = rundir.rank_log(folder, *divmod(one.rank, ranks_per_node), "stderr")
            ended = one.exit_code == -signal.SIGKILL and one.time - earliest >= OWN_KILL_S
            record = records.pop(one.rank, None)
            yield _failure(one, record, log, ended_by_agent=ended, oom_kills=node.oom_kills)
    for rank, record in records.items():  # its agent has written nothing, or did not live to
        yield _of_record(rank, record, record.exit_code)


def _failure(
    seen: NodeFailure, record: RankError | None, log: Path | None, *, ended_by_agent: bool, oom_kills: int | None
) -> Failure:
    """The agent's report of a rank, with the rank's own message where it left one: a later signal is not the cause."""
    if record is not None:
        return _of_record(seen.rank, record, seen.exit_code)
    # The agent knows whole seconds; of two ranks that were killed within one, either may be named.
    time_ns = int(seen.time * 1e9)
    line = last_error_line(log) if log else None
    noticed = bool(line and LOST_PEER.search(line))
    if seen.exit_code >= 0:
        blame = Blame.LOST_PEER if noticed else Blame.OWN_END
        return Failure(seen.rank, line or f"exit code {seen.exit_code}", seen.exit_code, time_ns, blame)
    number = signal.Signals(-seen.exit_code)
    blame = Blame.OWN_END
    if number == signal.SIGTERM or ended_by_agent:
        blame = Blame.ENDED
    elif number == signal.SIGABRT and noticed:  # NCCL's watchdog aborts a rank that waits in vain
        blame = Blame.LOST_PEER
    return Failure(seen.rank, _of_signal(number, oom_kills), seen.exit_code, time_ns, blame, oom_kills=oom_kills)


def _of_record(rank: int, record: RankError, exit_code: int) -> Failure:
    return Failure(rank, record.message, exit_code, record.time_ns, _blame(record), record=record)


def _blame(record: RankError) -> Blame:
    if record.kind in SILENT_TYPES:
        return Blame.LOST_PEER if LOST_PEER.search(record.message) else Blame.EXCEPTION
    return Blame.LOST_PEER if record.kind.startswith(LOST_PEER_TYPES) else Blame.EXCEPTION


def _of_signal(number: signal.Signals, oom_kills: int | None) -> str:
    if number != signal.SIGKILL:
        return f"killed by {number.name}"
    if oom_kills is None:
        return "killed by SIGKILL (often the kernel's out-of-memory killer)"
    if oom_kills:
        return "killed by SIGKILL of the kernel's out-of-memory killer"
    return "killed by SIGKILL, and not by the kernel's out-of-memory killer"


def last_error_line(log: Path) -> str | None:
    """The last line that reads like a Python error, else the last line with anything on it."""
    lines = [line.strip() for line in rundir.last_text(log).splitlines() if line.strip()]
    for line in reversed(lines):
        if match := ERROR_LINE.match(line):
            return match[1]
    return lines[-1] if lines else None
