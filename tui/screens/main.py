"""The one screen: fields, strategies, ranking, details, the command line that asks the same.

Planning runs in a thread, one question at a time and always the newest: a key is answered at once, whatever the planner
does. Not here: what an answer is (tui/state.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar

from textual import on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Footer, Input, Static

from planner.command import DEBUG_VARIABLE
from planner.errors import PlannerError
from tui import bars, inputs
from tui.messages import Changed, Entered, Picked, Replanned
from tui.widgets.details import Details
from tui.widgets.fields import Fields
from tui.widgets.layouts import Layouts, Ranking, Strategies

if TYPE_CHECKING:  # as in messages.py
    from tui.state import Planned, Screenful, Shown

PAUSE_S = 0.01
"""Wait this long for the next key before planning: pasted text is one question, and nobody sees the wait."""

PLANNING = "planning ..."
STALE_S = 0.25
"""An answer turns grey when the next one takes longer than this; sooner it would only flicker."""


class MainScreen(Screen[None]):
    """Everything on one screen, at 80x24 and up; wide ones show ranking and details side by side."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (150, "-wide")]  # noqa: RUF012  # declared by Textual, in a way that mypy
    VERTICAL_BREAKPOINTS = [(0, "-low"), (36, "-high")]  # noqa: RUF012  # takes for an instance's
    AUTO_FOCUS = "Ranking"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("slash", "search", "Search", key_display="/"),
        Binding("tab", "app.focus_next", "Next"),
        Binding("d", "details", "Details"),
        Binding("a", "engines", "Engines"),
        Binding("ctrl+s", "save", "Save"),
        Binding("ctrl+y", "copy", "Copy"),
        Binding("escape", "back", "Back"),
        Binding("q", "app.quit", "Quit"),
    ]

    def __init__(self, texts: Mapping[str, str], planner: Callable[[inputs.Typed], Planned] | None) -> None:
        super().__init__()
        self.texts = dict(texts)
        self.planner = planner
        self.planned: Planned | None = None
        self.kind, self.place = "ranked", 0
        self._asked, self._answered = 0, -1
        self._planning, self._waiting = False, False
        self._pause: Timer | None = None
        self._grey: Timer | None = None

    def compose(self) -> ComposeResult:
        """From the question down to its command line."""
        yield Static(PLANNING, id="headline", markup=False)
        yield Fields(self.texts)
        with Vertical(id="answer"):
            yield Static("STRATEGIES", classes="heading", id="legend", markup=False)
            yield Strategies()
            with Horizontal(id="below"):
                with Vertical(id="ranking"):
                    yield Static("LAYOUTS", classes="heading", id="head", markup=False)
                    yield Ranking()
                yield Details()
        yield Static(id="command", markup=False)
        yield Footer(show_command_palette=False)

    # -- asking ----------------------------------------------------------------------------------------------------

    @on(Changed)
    def _changed(self, message: Changed) -> None:
        if self.texts.get(message.name) == message.text:
            return  # a field says its first text too
        self.texts[message.name] = message.text
        self._asked += 1
        if self._pause is not None:
            self._pause.stop()
        self._pause = self.set_timer(PAUSE_S, self.start)
        if self._grey is None:
            self._grey = self.set_timer(STALE_S, lambda: self._turn_grey(PLANNING))

    def _turn_grey(self, headline: str) -> None:
        self.query_one("#headline", Static).update(headline)
        self.query_one("#answer").add_class("stale")

    def start(self) -> None:
        """Plan for the fields as they are; when a plan is being made, after it."""
        if self._planning:
            self._waiting = True
            return
        self._planning, self._waiting = True, False
        asked, texts = self._asked, dict(self.texts)
        self.run_worker(lambda: self._plan(asked, texts), thread=True, exit_on_error=True)

    def _plan(self, asked: int, texts: inputs.Typed) -> None:
        """In the thread."""
        if self.planner is None:
            from tui.state import plan

            self.planner = plan
        outcome: Planned | PlannerError
        try:
            outcome = self.planner(texts)
        except PlannerError as error:
            outcome = error
        except Exception as error:  # our mistake: said in one line, as the command line does, and the screen goes on
            if os.environ.get(DEBUG_VARIABLE) == "1":
                raise
            fix = f"Set {DEBUG_VARIABLE}=1 for the traceback"
            outcome = PlannerError("internal error", None, f"{type(error).__name__}: {error}", fix)
        self.post_message(Replanned(asked, outcome))

    @on(Replanned)
    def _replanned(self, message: Replanned) -> None:
        self._planning = False
        if self._waiting or message.asked != self._asked:
            self.start()
        elif isinstance(message.outcome, PlannerError):
            self._refuse(message.outcome)
        else:
            self.show(message.outcome)

    def _refuse(self, error: PlannerError) -> None:
        """The last good answer stays, in grey."""
        self._settle()
        self._turn_grey("no answer yet" if self.planned is None else _headline(self.planned))
        field = error.field if error.field in self.texts else inputs.MORE
        self.query_one(Fields).refuse(field, error.sentence)

    @property
    def settled(self) -> bool:
        """Whether what is shown answers what the fields say now."""
        return self._answered == self._asked

    def _settle(self) -> None:
        self._answered = self._asked
        if self._grey is not None:
            self._grey.stop()
            self._grey = None

    # -- showing ---------------------------------------------------------------------------------------------------

    def show(self, planned: Planned) -> None:
        """A new answer. The picked layout stays picked by its list and, among strategies, by its name."""
        before = self.picked
        self.planned, shown = planned, planned.shown
        if self.kind == "strategies" and before is not None:
            names = [one.name for one in shown.strategies]
            self.place = names.index(before.name) if before.name in names else 0
        else:
            self.kind, self.place = "ranked", 0
        self._settle()
        self.query_one(Fields).refuse(None)
        self.query_one("#answer").remove_class("stale")
        self.query_one("#headline", Static).update(_headline(planned))
        for one in self.query(Layouts):
            one.show(shown, self.place if one.kind == self.kind else None)
        ranking = self.query_one(Ranking)
        self.query_one("#head", Static).update(ranking.lines(shown, ranking.size.width)[0].splitlines()[0])
        self._show_picked()

    @property
    def picked(self) -> Shown | None:
        """The picked layout."""
        return None if self.planned is None else self.planned.shown.shown(self.kind, self.place)

    @on(Picked)
    def _picked(self, message: Picked) -> None:
        self.kind, self.place = message.kind, message.place
        for one in self.query(Layouts):
            if one.kind != self.kind:
                one.highlighted = None
        self._show_picked()

    def _show_picked(self) -> None:
        one = self.picked
        if one is None or self.planned is None:
            return
        shown = self.planned.shown
        self.query_one("#legend", Static).update(_legend(shown, one))
        self.query_one(Details).show(shown, one)
        self.query_one("#command", Static).update(f"$ {one.command}")

    # -- keys ------------------------------------------------------------------------------------------------------

    def action_search(self) -> None:
        """Look for a model."""
        self.query_one(Fields).search()

    @on(Entered)
    def action_details(self) -> None:
        """To the details; in their place in a small terminal."""
        self.add_class("reading")
        self.query_one(Details).focus()

    def action_back(self) -> None:
        """Out of a list of completions, out of the details, out of a field."""
        fields = self.query_one(Fields)
        if fields.completions.display:
            fields.close()
            return
        self.remove_class("reading")
        self.query_one(Strategies if self.kind == "strategies" else Ranking).focus()

    def action_engines(self) -> None:
        """Rank the layouts of every engine, or only of those that can be launched from here."""
        field = self.query_one(f"#{inputs.MORE}", Input)
        try:
            field.value = inputs.toggled(self.texts, inputs.ANY_RUNTIME)
        except PlannerError as error:  # half typed
            self._refuse(error)

    def action_copy(self) -> None:
        """The command line to the clipboard."""
        if one := self.picked:
            self.app.copy_to_clipboard(one.command)
            self.notify("Copied the command.", timeout=2)

    def action_save(self) -> None:
        """Ask where, then write."""
        from tui.screens.save import SaveScreen
        from tui.state import PLAN_FILE, save

        one, planned, kind, place = self.picked, self.planned, self.kind, self.place
        if one is None or planned is None:
            return

        def write(path: str, overwrite: bool) -> None:
            save(planned.estimate(kind, place), path, overwrite=overwrite)

        def written(path: str | None) -> None:
            if path is not None:
                self.notify(f"Wrote {path}. Run it: executor run {path}", timeout=5, markup=False)

        self.app.push_screen(
            SaveScreen(f"{one.name}, {one.layout}: {planned.shown.headline}", PLAN_FILE, write), written
        )


def _headline(planned: Planned) -> str:
    return f"{planned.shown.headline}. {planned.shown.considered:,} layouts in {planned.seconds * 1e3:.0f} ms"


def _legend(shown: Screenful, one: Shown) -> Content:
    """Where the card ends, and what the bars' colours mean."""
    terms = one.legend
    keys = [part for term in terms for part in (bars.paint((term, 1), terms), f"{term} ")]
    return Content.assemble(f"{bars.CAPACITY}{shown.capacity} ", *keys)
