"""The standard streams and the working folder that a command finds, made fit for use before it begins.

Not here: how a command ends (command.py).
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

from planner.basics.errors import PlannerError
from planner.basics.names import check_path

GIVE_STDOUT = "Redirect it to a file or to /dev/null"


class MessageStream(io.FileIO):
    """Where messages go. They are lost where it takes none, on a full disk or a terminal that is gone: what a command
    does is worth more than what it says on the way. A reader that has seen enough still ends the command."""

    def write(self, data: Any, /) -> int:
        """The bytes, written or not."""
        try:
            return super().write(data) or 0
        except BrokenPipeError:
            raise
        except OSError:
            return len(data)


class AnswerStream(io.FileIO):
    """Where answers go; it remembers why it took not all of one."""

    lost: OSError | None = None

    def write(self, data: Any, /) -> int:
        """The bytes that were written."""
        try:
            return super().write(data) or 0
        except OSError as error:
            self.lost = error
            raise


def prepare() -> None:
    """Make the streams of this process fit for use; PlannerError for a stdout that is closed, a working folder that is
    deleted or whose name is not UTF-8."""
    closed = [number for number in range(3) if not _is_open(number)]
    for number in closed:  # else the next file that is opened gets the number of a stream
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    if 0 in closed or sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115  # for as long as the process lives
    if 2 in closed or sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    elif sys.stderr is sys.__stderr__ and isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = _text(MessageStream(2, "wb", closefd=False), sys.stderr)
    if 1 in closed or sys.stdout is None:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        raise PlannerError("stdout", None, "is closed, and the answer is written there", GIVE_STDOUT)
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _text(AnswerStream(1, "wb", closefd=False), sys.stdout)
    try:
        here = os.getcwd()
    except OSError as error:
        fix = "Change to a folder that exists"
        raise PlannerError("working folder", None, f"cannot be found ({error.strerror})", fix) from None
    check_path(here, "working folder", "Change to another folder, or rename it")


def lost() -> OSError | None:
    """Why stdout took not all that was written, where it did not. What is left of that is dropped, so that nothing else
    fails over it when the process ends."""
    why = getattr(getattr(getattr(sys.stdout, "buffer", None), "raw", None), "lost", None)
    if isinstance(why, OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return why
    return None


def _text(raw: io.FileIO, like: io.TextIOWrapper) -> io.TextIOWrapper:
    """A stream for text on these bytes. Names of files need be no UTF-8, and a terminal may know ASCII alone."""
    line, through = like.line_buffering, like.write_through
    return io.TextIOWrapper(io.BufferedWriter(raw), like.encoding, "backslashreplace", None, line, through)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True
