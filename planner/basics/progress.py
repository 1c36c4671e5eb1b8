"""How far a search is, told to whoever watches it, and how the watcher ends it early.

A search reads the watch of its own context, so the functions between a command and the search need not pass it on; a
thread has a context of its own. Not here: what a watcher shows (command line, explorer), or the search (search.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

Watch = Callable[[int, int], None]
"""Called as watch(done, total) between pieces of work: layouts of the present search that are settled, and those of its
space (0: not counted yet). Calls come at intervals from microseconds to a few tenths of a second. A question may need
several searches; each counts from 0. It raises `Cancelled` to end the search with the best layout found so far; any
other exception goes through and leaves no answer."""


class Cancelled(Exception):
    """A watcher ended the search. It comes out of a question only where no layout that fits had been found; the text
    then is a sentence for the person, without its full stop."""

    def __init__(self, told: str = "no layout that fits had been found") -> None:
        super().__init__(told)


_watch: ContextVar[Watch | None] = ContextVar("watch", default=None)


@contextmanager
def watching(watch: Watch) -> Iterator[None]:
    """Searches asked for inside tell `watch` how far they are."""
    token = _watch.set(watch)
    try:
        yield
    finally:
        _watch.reset(token)


class Progress:
    """One search's count of settled layouts; it never goes back."""

    def __init__(self) -> None:
        self.done = self.total = 0
        self._watch = _watch.get()

    def at(self, done: int) -> None:
        """Tell the watcher; raises what it raises."""
        if self._watch is not None:
            self.done = max(self.done, done)
            self._watch(self.done, self.total)
