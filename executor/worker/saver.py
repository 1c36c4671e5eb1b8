"""Writes this rank's part of checkpoints beside the training: its views are copied, and a thread writes the copies.

No collective here: ranks tell rank 0 of their parts through the folder that they write, so nothing mixes with a step's
collectives. Not here: when a checkpoint is due (checkpointing.py), its folder (executor/checkpoints.py), its files
(shards.py).
"""

from __future__ import annotations

import dataclasses
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from executor import checkpoints
from executor.checkpoints import Answer, File, Policy
from executor.worker import shards
from executor.worker.pieces import View
from planner.plan import Plan

POLL_S = 0.05
ANSWERS_S, FAILED_S = 1800.0, 60.0
"""How long rank 0 waits for the other ranks' parts after its own, and after it knows that one has failed: then it
removes what they wrote, and a rank that is still writing would leave something behind."""
NAME = "rank-{}.safetensors"


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a checkpoint after `step` steps, as rank 0 knows it; `error` is why there is none.

    `pause_s` is the longest time that a rank's training stood still for it, `write_s` from its start until it was
    complete on the disk, `deleted` the older checkpoints that went for it.
    """

    step: int
    bytes: int = 0
    pause_s: float = 0.0
    write_s: float = 0.0
    deleted: tuple[str, ...] = ()
    error: str = ""


class Saver:
    """One rank's writer. `attempt` is a word that all ranks share and no earlier start of them had."""

    def __init__(self, plan: Plan, run: Path, rank: int, world_size: int, attempt: str, policy: Policy) -> None:
        self._plan, self._run, self._rank, self._world_size = plan, run, rank, world_size
        self._attempt, self._policy = attempt, policy
        self._thread: threading.Thread | None = None
        self._buffers: list[torch.Tensor] = []
        self._news: deque[Saved] = deque()
        self.last_bytes = 0
        """Of the last checkpoint that was completed; 0 before the first, and on other ranks than 0."""

    @property
    def busy(self) -> bool:
        """Whether this rank still writes; rank 0 until the checkpoint is complete."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, updates: int, views: Iterable[View]) -> None:
        """Copy the views, and write them while training goes on. Waits first for the one before."""
        begin = time.perf_counter()
        self.wait()
        copies = list(self._copied(views))
        pause_s = time.perf_counter() - begin
        self._thread = threading.Thread(target=self._write, args=(step, updates, copies, pause_s), daemon=True)
        self._thread.start()

    def wait(self) -> None:
        """Until what is being written is complete, or has failed."""
        if self._thread is not None:
            self._thread.join()

    def news(self) -> list[Saved]:
        """On rank 0 what became of checkpoints since the last call."""
        return [self._news.popleft() for _ in range(len(self._news))]  # the thread may append meanwhile

    def _copied(self, views: Iterable[View]) -> Iterator[View]:
        """This rank's shares of the views, in host memory that is used again by the next checkpoint."""
        shares = [share for view in views if (share := view.share()) is not None]
        if [(one.numel(), one.dtype) for one in self._buffers] != [(s.tensor.numel(), s.tensor.dtype) for s in shares]:
            self._buffers = [
                torch.empty(s.tensor.numel(), dtype=s.tensor.dtype, pin_memory=s.tensor.is_cuda) for s in shares
            ]
        devices = set()
        for buffer, share in zip(self._buffers, shares, strict=True):
            buffer.copy_(share.tensor, non_blocking=share.tensor.is_cuda)
            devices |= {share.tensor.device} if share.tensor.is_cuda else set()
        for device in devices:
            torch.cuda.synchronize(device)
        for buffer, share in zip(self._buffers, shares, strict=True):
            yield dataclasses.replace(share, tensor=buffer)

    def _write(self, step: int, updates: int, copies: list[View], pause_s: float) -> None:
        """The thread: this rank's file, then on rank 0 the whole."""
        begin = time.perf_counter()
        folder = checkpoints.partial(self._run, step, self._attempt)
        name = NAME.format(self._rank)
        try:
            folder.mkdir(exist_ok=True)
            done = shards.write(folder / name, copies, {"step": str(step), "rank": str(self._rank)})
            seconds = time.perf_counter() - begin
            said = Answer(name=name, size=done.size, sha256=done.sha256, pause_s=pause_s, write_s=seconds)
        except Exception as error:  # whatever it is, it ends no training
            with suppress(OSError):
                (folder / name).unlink(missing_ok=True)  # makes room for the answer on a full disk
            said = Answer(name=name, error=_reason(error))
        if self._rank == 0:
            self._news.append(self._completed(folder, step, updates, said, begin))
        else:
            with suppress(OSError):
                checkpoints.answer(folder, self._rank, said)

    def _completed(self, folder: Path, step: int, updates: int, own: Answer, begin: float) -> Saved:
        try:
            said = self._answers(folder, own)
            files = {one.name: File(one.size, one.sha256) for one in said.values()}
            found = checkpoints.described(self._plan, step, updates, files)
            checkpoints.commit(folder, found)
            self.last_bytes = found.bytes
            pause_s = max(one.pause_s for one in said.values())
            write_s = time.perf_counter() - begin
        except Exception as error:
            shutil.rmtree(folder, ignore_errors=True)
            return Saved(step=step, error=_reason(error))
        deleted: list[str] = []
        with suppress(OSError):  # the next one tries again
            deleted = checkpoints.thin(self._run, self._policy.keep_last, self._policy.keep_every)
        return Saved(step=step, bytes=found.bytes, pause_s=pause_s, write_s=write_s, deleted=tuple(deleted))

    def _answers(self, folder: Path, own: Answer) -> dict[int, Answer]:
        """Of all ranks; an OSError where one has failed or says nothing."""
        deadline = time.monotonic() + ANSWERS_S
        said = {0: own}
        while True:
            said |= checkpoints.answers(folder, self._world_size)
            failed = [f"rank {rank}: {one.error}" for rank, one in sorted(said.items()) if one.error]
            if failed:
                deadline = min(deadline, time.monotonic() + FAILED_S)
            over = time.monotonic() > deadline
            if failed and (over or len(said) == self._world_size):
                raise OSError(failed[0])
            if len(said) == self._world_size:
                return said
            if over:
                absent = sorted(set(range(self._world_size)) - said.keys())
                raise OSError(f"ranks {absent[:8]} had not written their parts after {ANSWERS_S:g} s")
            time.sleep(POLL_S)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]
