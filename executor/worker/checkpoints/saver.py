"""Writes this rank's part of checkpoints beside the training: its views are copied, and a thread writes the copies.

No collective here: ranks tell the first rank of their folder of their parts through the folder that they write, and
where hosts have folders of their own, these first ranks tell each other (folders.py). So nothing mixes with a step's
collectives. Not here: when a checkpoint is due (checkpointing.py), its folder (executor/folder/checkpoints.py), its
files (shards.py).
"""

from __future__ import annotations

import dataclasses
import shutil
import socket
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import msgspec
import torch

from executor.folder import checkpoints, holdings
from executor.folder.checkpoint_policy import CheckpointSchedule
from executor.folder.checkpoints import Complete, File, RankReply
from executor.worker.checkpoints import shards
from executor.worker.checkpoints.folders import Agreed, Committed, FolderReply, Over, RunFolders, Silent
from executor.worker.model.pieces import StateView
from planner.basics.errors import PlannerError
from planner.spec.plan import Plan

POLL_S = 0.05
ANSWERS_S, FAILED_S = 1800.0, 60.0
"""How long a folder's first rank waits for the others' parts after its own, and after it knows that one has failed:
then it removes what they wrote, and a rank that is still writing would leave something behind."""
NAME = "rank-{}.safetensors"


class Saved(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a checkpoint after `step` steps, as rank 0 knows it; `error` is why there is none.

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
    """One rank's writer into its folder of a run whose ranks see `folders`; `first` steps were done by earlier starts
    of the run."""

    def __init__(self, plan: Plan, run: Path, folders: RunFolders, policy: CheckpointSchedule, first: int = 0) -> None:
        self._plan, self._run, self._rank = plan, run, folders.rank
        self._folders, self._policy, self._first = folders, policy, first
        self._thread: threading.Thread | None = None
        self._buffers: list[torch.Tensor] = []
        self._news: deque[Saved] = deque()
        self._told: deque[int] = deque()
        self.last_bytes = 0
        """Of the last checkpoint that was completed; 0 before the first, and on other ranks than 0."""

    @property
    def busy(self) -> bool:
        """Whether this rank still writes; the first of a folder until the checkpoint is complete."""
        return self._thread is not None and self._thread.is_alive()

    def save(self, step: int, updates: int, views: Iterable[StateView]) -> None:
        """Copy the views, and write them while training goes on. Waits first for the previous checkpoint."""
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

    def _copied(self, views: Iterable[StateView]) -> Iterator[StateView]:
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

    def _write(self, step: int, updates: int, copies: list[StateView], pause_s: float) -> None:
        """The thread: this rank's file, then on the first rank of a folder the whole."""
        begin = time.perf_counter()
        folder = checkpoints.partial(self._run, step, self._folders.word)
        name = NAME.format(self._rank)
        try:
            folder.mkdir(exist_ok=True)
            done = shards.write(folder / name, copies, {"step": str(step), "rank": str(self._rank)})
            seconds = time.perf_counter() - begin
            said = RankReply(name=name, size=done.size, sha256=done.sha256, pause_s=pause_s, write_s=seconds)
        except Exception as error:  # whatever it is, it ends no training
            with suppress(OSError):
                (folder / name).unlink(missing_ok=True)  # makes room for the answer on a full disk
            said = RankReply(name=name, error=_reason(error))
        if not self._folders.leads:
            with suppress(OSError):
                checkpoints.answer(folder, self._rank, said)
        elif self._rank:
            self._followed(folder, step, self._part(folder, said))
        else:
            self._news.append(self._completed(folder, step, updates, self._part(folder, said), begin))

    def _part(self, folder: Path, own: RankReply) -> FolderReply:
        """The checkpoints in this rank's folder."""
        host = socket.gethostname()
        try:
            said = self._answers(folder, own)
        except Exception as error:
            return FolderReply(host=host, error=_reason(error))
        files = {one.name: File(one.size, one.sha256) for one in said.values()}
        return FolderReply(host=host, files=files, pause_s=max(one.pause_s for one in said.values()))

    def _completed(self, folder: Path, step: int, updates: int, own: FolderReply, begin: float) -> Saved:
        """On rank 0: the whole of all folders, then the older ones that go."""
        found: Complete | None = None
        try:
            self._forget(step)
            parts = self._parts(step, own)
            files = {name: file for one in parts.values() for name, file in one.files.items()}
            places = {name: one.host for one in parts.values() for name in one.files} if self._folders.apart else {}
            found = checkpoints.described(self._plan, step, updates, files, places)
            held = self._committed(folder, found, own)
            self.last_bytes = sum(one.size for one in own.files.values())
            pause_s = max(one.pause_s for one in parts.values())
            write_s = time.perf_counter() - begin
        except Exception as error:
            self._gave_up(folder, step, found, _reason(error))
            return Saved(step=step, error=_reason(error))
        deleted: list[str] = []
        with suppress(Exception):  # the next one tries again
            deleted = self._thinned(step, held)
        return Saved(step=step, bytes=found.bytes, pause_s=pause_s, write_s=write_s, deleted=tuple(deleted))

    def _parts(self, step: int, own: FolderReply) -> dict[int, FolderReply]:
        """Of all folders, by their first rank; an OSError where one has failed or says nothing."""
        parts, deadline = {0: own}, time.monotonic() + ANSWERS_S
        for rank in self._folders.others:
            if any(one.error for one in parts.values()):
                deadline = min(deadline, time.monotonic() + FAILED_S)
            parts[rank] = self._folders.heard(step, FolderReply, rank, deadline)
        for one in parts.values():
            if one.error:
                raise OSError(one.error + (f" on {one.host}" if self._folders.apart else ""))
        return parts

    def _committed(self, folder: Path, found: Complete, own: FolderReply) -> holdings.Holdings:
        """Make checkpoints of all folders; what they hold then, where there are several."""
        if not self._folders.apart:
            checkpoints.commit(folder, found)
            return {}
        self._folders.say(found.step, Agreed(complete=found))
        checkpoints.commit(folder, found, own.files)
        held = {"0": holdings.held(self._run)}
        deadline = time.monotonic() + ANSWERS_S
        for rank in self._folders.others:
            said = self._folders.heard(found.step, Committed, rank, deadline)
            if said.error:
                raise OSError(said.error)
            held[str(rank)] = said.held
        return held

    def _forget(self, step: int) -> None:
        """Let go of what was said two checkpoints ago, which every leader has heard: each has said its part since."""
        if self._folders.apart:
            self._told.append(step)
            if len(self._told) > 2:
                self._folders.forget(self._told.popleft())

    def _gave_up(self, folder: Path, step: int, found: Complete | None, why: str) -> None:
        """There is no such checkpoint, in no folder."""
        if self._folders.apart:
            with suppress(Exception):  # the store is gone, and with it the run
                self._folders.say(step, Agreed(error=why))
                self._folders.say(step, Over(error=why))
        self._removed(folder, found if self._folders.apart else None)

    def _removed(self, folder: Path, found: Complete | None) -> None:
        """Remove what this rank's folder has of a checkpoint that did not come about elsewhere."""
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError, PlannerError):
            target = checkpoints.steps_of(self._run).get(found.step) if found is not None else None
            if target is not None and checkpoints.complete(target) == found:
                checkpoints.delete(target)

    def _thinned(self, step: int, held: holdings.Holdings) -> list[str]:
        """Delete what is not to be kept, in all folders; the names."""
        keep_last, keep_every = self._policy.keep_last, self._policy.keep_every
        if not self._folders.apart:
            return checkpoints.thin(self._run, keep_last, keep_every)
        gone = holdings.retired(held, keep_last, keep_every, first=self._first)
        self._folders.say(step, Over(gone=tuple(gone)))
        self._deleted(gone)
        return [checkpoints.STEP.format(one) for one in gone]

    def _deleted(self, steps: Iterable[int]) -> None:
        named = checkpoints.steps_of(self._run)
        for step in steps:
            if step in named:
                checkpoints.delete(named[step])

    def _followed(self, folder: Path, step: int, own: FolderReply) -> None:
        """On the first rank of another folder than rank 0's: follow rank 0's messages."""
        found: Complete | None = None
        try:
            self._folders.say(step, own)
            found = self._agreed(step)
            checkpoints.commit(folder, found, own.files)
            self._folders.say(step, Committed(held=holdings.held(self._run)))
            over = self._folders.heard(step, Over, 0, time.monotonic() + 2 * ANSWERS_S)
            if over.error:
                raise OSError(over.error)
        except Silent:  # rank 0 is gone: what is complete in its folder is not known here
            return
        except Exception as error:
            self._removed(folder, found)
            with suppress(Exception):
                self._folders.say(step, Committed(error=f"{_reason(error)} on {own.host}"))
            return
        with suppress(OSError):  # the next one tries again
            self._deleted(over.gone)

    def _agreed(self, step: int) -> Complete:
        agreed = self._folders.heard(step, Agreed, 0, time.monotonic() + 2 * ANSWERS_S)
        if agreed.complete is None:
            raise OSError(agreed.error)
        return agreed.complete

    def _answers(self, folder: Path, own: RankReply) -> dict[int, RankReply]:
        """Of all ranks of this folder; an OSError where one has failed or says nothing."""
        deadline = time.monotonic() + ANSWERS_S
        said, ranks = {self._rank: own}, self._folders.own
        while True:
            said |= checkpoints.answers(folder, ranks)
            failed = [f"rank {rank}: {one.error}" for rank, one in sorted(said.items()) if one.error]
            if failed:
                deadline = min(deadline, time.monotonic() + FAILED_S)
            over = time.monotonic() > deadline
            if failed and (over or len(said) == len(ranks)):
                raise OSError(failed[0])
            if len(said) == len(ranks):
                return said
            if over:
                absent = sorted(set(ranks) - said.keys())
                raise OSError(f"ranks {absent[:8]} had not written their parts after {ANSWERS_S:g} s")
            time.sleep(POLL_S)


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or [type(error).__name__])[0]
