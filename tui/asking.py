"""Asking the planner: a question is checked at once, searched for in its turn, and given up when nobody wants it.

Checks and searches run in threads that end with the process, so a long one keeps neither the screen nor the shell.
Searches run one at a time, always for the newest question. Not here: what is asked (state.py), or any widget.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Thread
from typing import TYPE_CHECKING, Any, NamedTuple

from planner.basics.command import DEBUG_VARIABLE
from planner.basics.errors import PlannerError
from planner.basics.progress import Cancelled
from tui import inputs

if TYPE_CHECKING:  # the planner's cost models are imported after the first paint
    from tui.state import CheckedQuestion, Planned


class GivenUp(Exception):
    """Nobody wants the answer of this search any more."""


class SearchProgress:
    """How far a search is, in layouts: written by its thread and read by the screen, which ends it through `end_by`."""

    def __init__(self) -> None:
        self.done = self.total = 0
        self.end_by: type[Exception] | None = None

    def __call__(self, done: int, total: int) -> None:
        """The search tells how far it is. Cancelled ends it with the best so far, GivenUp with nothing."""
        self.done, self.total = done, total
        if self.end_by is not None:
            raise self.end_by

    @property
    def text(self) -> str:
        """Such as "1.2 of 4.5 M layouts"; nothing before they are counted, or where they are few."""
        return f"{self.done / 1e6:.1f} of {self.total / 1e6:.1f} M layouts" if self.total >= 1e5 else ""


class Checked(NamedTuple):
    """The check of question `number` is over: what is to be searched for, or what a person should change."""

    number: int
    outcome: CheckedQuestion | PlannerError


class Searched(NamedTuple):
    """The search for question `number` is over: its answer, a refusal, or how it was ended without one."""

    number: int
    outcome: Planned | PlannerError | Cancelled | GivenUp


Search = Callable[["CheckedQuestion", SearchProgress], "Planned"]


class ScreenQuestions:
    """The questions of one screen, counted. `tell` is called from the threads with Checked and Searched, which the
    screen hands to `checked` and `searched` from its own thread; these say whether the outcome is still wanted."""

    def __init__(self, tell: Callable[[Checked | Searched], Any], search: Search | None = None) -> None:
        self._tell, self._search = tell, search
        self.number = 0
        self.watch: SearchProgress | None = None
        """Of the search that runs."""
        self._next: CheckedQuestion | None = None

    @property
    def searching(self) -> bool:
        """Whether the newest question is searched for."""
        return self.watch is not None and self.watch.end_by is None

    def change(self) -> None:
        """The texts changed: nobody wants what is searched for, or what waits."""
        self.number += 1
        self._next = None
        if self.watch is not None:
            self.watch.end_by = GivenUp

    def cancel(self) -> bool:
        """End the search for the newest question with the best so far; False when there is none."""
        found = self.searching
        if found and self.watch is not None:
            self.watch.end_by = Cancelled
        return found

    def check(self, texts: inputs.Typed, *, fetch: bool) -> None:
        """Read the texts as a question; only with `fetch` the hub may be asked for the model."""
        number = self.number

        def work() -> Checked:
            from tui.state import ask

            return Checked(number, _outcome(lambda: ask(texts, fetch=fetch)))

        self._start(work)

    def checked(self, found: Checked) -> bool:
        """Whether this is the newest question; if so it is searched for, after the search that runs."""
        if found.number != self.number:
            return False
        if not isinstance(found.outcome, PlannerError):
            self._next = found.outcome
            self._search_next()
        return True

    def searched(self, found: Searched) -> bool:
        """Whether this is the newest question's; a search that waits begins."""
        self.watch = None
        self._search_next()
        return found.number == self.number and not isinstance(found.outcome, GivenUp)

    def _search_next(self) -> None:
        if self.watch is not None or self._next is None:
            return
        number, asked, watch, search = self.number, self._next, SearchProgress(), self._search
        self.watch, self._next = watch, None

        def work() -> Searched:
            from tui.state import plan

            return Searched(number, _outcome(lambda: (search or plan)(asked, watch)))

        self._start(work)

    def _start(self, work: Callable[[], Checked | Searched]) -> None:
        Thread(target=lambda: self._tell(work()), daemon=True).start()


def _outcome(work: Callable[[], Any]) -> Any:
    """What the work gives, or its refusal. Our own mistake is told in one line, as the command line does."""
    try:
        return work()
    except (PlannerError, Cancelled, GivenUp) as error:
        return error
    except Exception as error:
        if os.environ.get(DEBUG_VARIABLE) == "1":
            raise
        fix = f"Set {DEBUG_VARIABLE}=1 for the traceback"
        return PlannerError("internal error", None, f"{type(error).__name__}: {error}", fix)
