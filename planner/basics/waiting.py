"""A person at a terminal while a search runs: a line that moves after two seconds, and Ctrl-C, which ends the search
with the best so far.

Not here: the search (search.py), what it tells (progress.py), or how an interruption ends the process (command.py).
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from planner.basics.command import INTERRUPTED
from planner.basics.progress import Cancelled, watching
from planner.basics.saying import say

SILENT_S = 2.0
"""A shorter search says nothing."""
EVERY_S = 0.2
ERASE = "\r\x1b[K"
HINT = "; Ctrl-C keeps the best"
"""Said wherever a terminal has room for it: of a later search the line is shortened first."""


class Waiting:
    """Watches the searches of one question: `interrupted` after Ctrl-C, which takes effect at the next look."""

    def __init__(self) -> None:
        self.interrupted = False
        self._asked_to_end = self._looked = False
        self._done = self._total = self._searches = 0
        self._counting = False
        self._begun = time.monotonic()
        self._next = self._begun + SILENT_S
        self._shows = sys.stderr.isatty()
        self._drawn = False

    def __call__(self, done: int, total: int) -> None:
        """A look of the search."""
        self._looked = True
        if self._asked_to_end:
            self.interrupted = True
            raise Cancelled
        if total:
            self._searches += not self._searches or self._counting
            self._done, self._total = done, total
        self._counting = not total
        if self._shows and (now := time.monotonic()) >= self._next:
            self._next = now + EVERY_S
            self._draw(now - self._begun)

    def end(self, number: int, frame: FrameType | None) -> None:
        """Ctrl-C: the next look ends the search; again, or where no search runs yet, it ends the command."""
        if self._asked_to_end or not self._looked:
            raise KeyboardInterrupt
        self._asked_to_end = True

    def code(self, otherwise: int) -> int:
        """The exit code of the command, and a line on stderr where the search was interrupted."""
        if not self.interrupted:
            return otherwise
        say(f"note: interrupted: the best so far is shown ({self._seen()}).", err=True)
        return INTERRUPTED

    def erase(self) -> None:
        """Leave no trace of the line."""
        if self._drawn:
            sys.stderr.write(ERASE)
            sys.stderr.flush()

    def _seen(self) -> str:
        seen = f"looked at {self._done:,} of {self._total:,} layouts" if self._total else "counting layouts"
        return seen if self._searches <= 1 else f"search {self._searches}: {seen}"

    def _draw(self, seconds: float) -> None:
        line, room = f"{self._seen()}, {seconds:.0f} s", columns() - 1
        brief = line.replace(" layouts", "")
        hinted = (f"{line}{HINT} so far", f"{brief}{HINT} so far", f"{brief}{HINT}")
        sys.stderr.write(ERASE + next((one for one in hinted if len(one) <= room), line[:room]))
        sys.stderr.flush()
        self._drawn = True


def columns() -> int:
    """Of the terminal behind stderr; 80 where it does not say."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or 80
    except OSError:
        return 80


@contextmanager
def searching() -> Iterator[Waiting]:
    """Searches asked for inside are shown, and Ctrl-C ends them (signals reach the main thread alone)."""
    waiting = Waiting()
    signalled = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGINT, waiting.end) if signalled else None
    try:
        with watching(waiting):
            yield waiting
    finally:
        if signalled:
            signal.signal(signal.SIGINT, before)
        waiting.erase()
