"""The ranks that share a run folder, and the messages between the first ranks of each folder while checkpoints are
written.

It goes through the store in which the ranks met, with a connection of its own: no collective, so nothing mixes with a
step's. Not here: writing (saver.py), or what makes a checkpoint whole over several folders
(executor/folder/holdings.py).
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from executor.folder import checkpoints
from executor.folder.checkpoints import CHECKPOINTS, Complete, File
from executor.folder.holdings import HeldCheckpoint
from executor.worker.world import words
from planner.basics.errors import PlannerError

MARK = "{}.{}.start"
LOOK_S = 0.1
T = TypeVar("T")


class FolderReply(msgspec.Struct, frozen=True, kw_only=True):
    """A leader's report of its folder's files, or why some are missing. `pause_s` as in RankReply."""

    host: str
    files: dict[str, File] = {}
    pause_s: float = 0.0
    error: str = ""


class Agreed(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's decision once all parts are known: COMPLETE, or why there is none."""

    complete: Complete | None = None
    error: str = ""


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """A leader's report once its folder is a checkpoint: the folder's files, or why it is not one."""

    held: tuple[HeldCheckpoint, ...] = ()
    error: str = ""


class Over(msgspec.Struct, frozen=True, kw_only=True):
    """Rank 0's last message: the steps whose checkpoints are deleted, or why this checkpoint does not count."""

    gone: tuple[int, ...] = ()
    error: str = ""


class Silent(OSError):
    """A leader has said nothing in time, or the store is gone."""


@dataclass(frozen=True)
class RunFolders:
    """The run folders of a start. `leaders` has for each rank the lowest one that sees the same folder; `word` is of
    this start alone."""

    word: str
    rank: int
    leaders: tuple[int, ...]
    store: Any = None

    @property
    def apart(self) -> bool:
        """Whether there are several."""
        return len(set(self.leaders)) > 1

    @property
    def leads(self) -> bool:
        """Whether this rank completes its folder."""
        return self.leaders[self.rank] == self.rank

    @property
    def own(self) -> tuple[int, ...]:
        """The ranks that see this rank's folder."""
        return tuple(rank for rank, leader in enumerate(self.leaders) if leader == self.leaders[self.rank])

    @property
    def others(self) -> tuple[int, ...]:
        """Leaders of other folders."""
        return tuple(sorted(set(self.leaders) - {self.leaders[self.rank]}))

    def say(self, step: int, what: msgspec.Struct) -> None:
        """Tell the other leaders."""
        self.store.set(self._key(step, type(what), self.rank), msgspec.json.encode(what))

    def heard(self, step: int, kind: type[T], rank: int, deadline: float) -> T:
        """A leader's message, once it has come; Silent where none comes until `deadline` (time.monotonic)."""
        key = self._key(step, kind, rank)
        try:
            while not self.store.check([key]):
                if time.monotonic() > deadline:
                    raise Silent(f"rank {rank} did not report its folder's part in time")
                time.sleep(LOOK_S)
            return msgspec.json.decode(self.store.get(key), type=kind)
        except RuntimeError as error:  # torch's own, where the store's process has ended
            raise Silent(f"the store of the ranks does not answer ({str(error).splitlines()[0]})") from None

    def forget(self, step: int) -> None:
        """Let go of what was said of a step."""
        for rank in {0, *self.leaders}:
            for kind in (FolderReply, Agreed, Committed, Over):
                self.store.delete_key(self._key(step, kind, rank))

    def _key(self, step: int, kind: type[Any], rank: int) -> str:
        return f"checkpoints/{self.word}/{step}/{kind.__name__}/{rank}"


def begun(run: Path, every: str, rank: int, world_size: int) -> tuple[RunFolders, list[str]]:
    """Make the folder of a run's checkpoints where it is missing, and find which ranks see the same; names of what had
    not been completed and was removed from this rank's. Every rank calls it, and all end alike."""
    word, leaders = seen(run, every, rank, world_size)
    removed: list[str] = []

    def begin() -> None:
        removed.extend(checkpoints.begin(run))
        checkpoints.listen(run)

    _raised(every, _trouble(begin) if leaders[rank] == rank else "")
    return RunFolders(word, rank, leaders, _store() if len(set(leaders)) > 1 else None), removed


def seen(run: Path, every: str, rank: int, world_size: int) -> tuple[str, tuple[int, ...]]:
    """(a word of this call on all ranks, for each rank the lowest one that sees the same run folder)."""
    word = str(words.of_rank_0(secrets.token_hex(4)))
    _raised(every, _trouble(lambda: _mark(run, word, rank)))
    leaders = words.gathered(min(_marked(run, word), default=rank), int)
    (run / CHECKPOINTS / MARK.format(word, rank)).unlink(missing_ok=True)
    return word, tuple(leaders)


def _mark(run: Path, word: str, rank: int) -> None:
    (run / CHECKPOINTS).mkdir(exist_ok=True)
    (run / CHECKPOINTS / MARK.format(word, rank)).touch()


def _marked(run: Path, word: str) -> list[int]:
    """Ranks whose marks are here. The folder is listed, since a network disk may remember for a while what was not
    there when it was asked for by name."""
    names = (path.name.split(".") for path in (run / CHECKPOINTS).iterdir())
    return [int(parts[1]) for parts in names if len(parts) == 3 and parts[0] == word and parts[1].isdigit()]


def _store() -> Any:
    """The store of the ranks' process group, over another connection where torch makes one."""
    from torch.distributed.distributed_c10d import _get_default_store

    store: Any = _get_default_store()
    return store.clone() if hasattr(store, "clone") else store


def _trouble(work: Callable[[], None]) -> str:
    try:
        work()
    except OSError as error:
        return f"{error.strerror or error} on {socket.gethostname()}"
    return ""


def _raised(every: str, trouble: str) -> None:
    """Refuse on all ranks where one is in trouble."""
    found = next(filter(None, words.gathered(trouble, str)), None)
    if found is not None:
        rule, fix = f"the folder of checkpoints cannot be made ({found})", "Make room, or name another run folder"
        raise PlannerError("--checkpoint-every", every, rule, fix, exit_code=3)
