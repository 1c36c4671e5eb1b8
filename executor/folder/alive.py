"""A rank's progress file, RUN/alive/rank-N, and the file of its Python stacks, RUN/alive/rank-N.stacks.

A rank writes one short line in place, over and over: it costs microseconds and no room. Not here: judging from it
whether a run hangs (hangs.py).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import statistics
from collections import deque
from contextlib import suppress
from pathlib import Path

import msgspec

from executor.system import processes
from planner.basics.reading import NOT_JSON, read_bytes

ALIVE = "alive"
STACKS_SIGNAL = signal.SIGUSR2
"""Asks a rank for the stacks of all its threads. Neither torchrun, NCCL nor Slurm (SIGUSR1) sends it."""
LINE_BYTES = 256
KEPT_STEPS = 101

START, FIRST_STEP, STEP, VALIDATION, CHECKPOINT, RESTORE, END = (
    "start", "first step", "step", "validation", "checkpoint", "restore", "end",
)  # fmt: skip
"""Stages: until the ranks have met; the first step (with whatever is compiled or measured in it); a later one; a batch
of validation data; a checkpoint that training waits for; loading one; after the last step, weights included."""


class Said(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's last report: `count` grows with every report, `step` counts from 1, `median_s` is its own median time
    from one step's begin to the next (0: not yet known). `process` is its identity (processes.py)."""

    rank: int
    process: str
    count: int
    stage: str
    step: int = 0
    median_s: float = 0.0


class Voice:
    """The files of one rank, and its answer to `STACKS_SIGNAL`."""

    def __init__(self, folder: Path, rank: int) -> None:
        place = folder / ALIVE
        place.mkdir(exist_ok=True)
        self._stacks = (place / f"rank-{rank}.stacks").open("w")
        faulthandler.register(STACKS_SIGNAL, self._stacks, all_threads=True)
        self._file = os.open(place / f"rank-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        self._rank, self._process, self._count = rank, processes.identity(), 0
        self._seconds: deque[float] = deque(maxlen=KEPT_STEPS)
        self.say(START)

    def say(self, stage: str, step: int = 0) -> None:
        """Report this rank's stage. A full disk is reported by others."""
        self._count += 1
        median_s = statistics.median(self._seconds) if self._seconds else 0.0
        said = Said(
            rank=self._rank, process=self._process, count=self._count, stage=stage, step=step, median_s=median_s
        )
        with suppress(OSError):
            os.pwrite(self._file, msgspec.json.encode(said).ljust(LINE_BYTES), 0)

    def stepped(self, seconds: float) -> None:
        """Record the seconds of one more step."""
        self._seconds.append(seconds)


_voice: Voice | None = None


def begin(folder: Path, rank: int) -> None:
    """Say from now on in `folder` where this process is, as rank `rank`."""
    global _voice
    with suppress(OSError):  # a folder that takes no file loses the report and ends no training
        _voice = Voice(folder, rank)


def say(stage: str, step: int = 0) -> None:
    """Progress: this rank begins `stage` (of optimizer step `step`, from 1), or continues it."""
    if _voice is not None:
        _voice.say(stage, step)


def stepped(seconds: float) -> None:
    """Record the seconds of one optimizer step and of the work before the next one."""
    if _voice is not None:
        _voice.stepped(seconds)


def read(folder: Path, rank: int) -> Said | None:
    """A rank's last report; None where it has none, or is just writing it."""
    try:
        return msgspec.json.decode(read_bytes(folder / ALIVE / f"rank-{rank}"), type=Said)
    except (OSError, *NOT_JSON):
        return None
