"""A failing rank's report of its own end: failed/rank-N.json, which executor.watch.failures reads.

A rank that is killed, or that leaves through `os._exit`, writes nothing: its agent knows its exit code. Not here: who
is to blame (executor/watch/failures.py), or what the file holds (executor.folder.rundir.RankError).
"""

from __future__ import annotations

import errno
import os
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from executor.folder.rundir import FAILED, RankError, write_of_rank
from planner.basics.errors import PlannerError

CRASHED, TRAINING_FAILED = 1, 5
LONGEST = 400
"""Characters kept of a message: a verdict is one line."""


@contextmanager
def recorded(folder: Path) -> Iterator[None]:
    """Record an exception of the code inside, and re-raise it."""
    try:
        yield
    except BaseException as error:
        write(folder, error)
        raise


def write(folder: Path, error: BaseException, *, out_of_memory: bool = False) -> None:
    """failed/rank-N.json of this rank, at this moment. A folder that takes no file any more is not a second failure."""
    if isinstance(error, SystemExit) and error.code in (None, 0):
        return
    rank = os.environ.get("RANK", "0")
    record = {"schema": "failed/1", "rank": int(rank)} | msgspec.structs.asdict(said(error))
    record |= {"out_of_memory": out_of_memory}
    with suppress(PlannerError, OSError):
        write_of_rank(folder, FAILED, rank, record)


def said(error: BaseException) -> RankError:
    """An exception as this rank's record."""
    now, number, code = time.time_ns(), system_error(error), CRASHED
    if isinstance(error, PlannerError):
        # A file that could not be written under way is not a mistake of the command line.
        code = TRAINING_FAILED if error.field == "output" and number is not None else error.exit_code
    elif isinstance(error, SystemExit) and isinstance(error.code, int):
        code = error.code
    kind = type(error)
    return RankError(
        message=sentence(error)[:LONGEST],
        exit_code=code,
        kind=kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}",
        time_ns=now,
        host=socket.gethostname(),
        errno=number,
        refusal=isinstance(error, PlannerError),
        cause=getattr(error, "cause", ""),
    )


def sentence(error: BaseException) -> str:
    """One line, as a traceback ends with it."""
    if isinstance(error, PlannerError):
        return error.sentence
    if isinstance(error, SystemExit):
        return f"exit code {error.code}" if isinstance(error.code, int) else str(error.code)
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def system_error(error: BaseException) -> int | None:
    """The system's number of the error, or of the one that it came of; a full disk before all others."""
    found: list[int] = []
    seen: BaseException | None = error
    while seen is not None and len(found) < 10:
        if isinstance(seen, OSError) and seen.errno is not None:
            found.append(seen.errno)
        elif os.strerror(errno.ENOSPC) in str(seen):  # safetensors, among others, has no number of it
            found.append(errno.ENOSPC)
        seen = seen.__cause__ or seen.__context__
    full = [number for number in found if number in (errno.ENOSPC, errno.EDQUOT)]
    return next(iter(full or found), None)
