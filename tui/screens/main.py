"""The one screen: fields, strategies, ranking, details, the command line that asks the same.

A key is answered at once, whatever the planner does. Not here: how it is asked (tui/asking.py), or what an answer is
(tui/state.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import Screen
from textual.timer import Timer
from textual.widgets import Footer, Input, Static

from planner.basics.display import sentence
from planner.basics.errors import PlannerError
from planner.basics.quoting import for_shell
from planner.views.cells.bars import CAPACITY
from tui import bars, inputs
from tui.asking import Checked, ScreenQuestions, Search, Searched
from tui.messages import Changed, Entered, Picked, Submitted, ThreadDone
from tui.widgets.details import Details
from tui.widgets.fields import Fields
from tui.widgets.layouts import Layouts, RankedLayouts, Strategies

if TYPE_CHECKING:  # as in messages.py
    from planner.views.shown import ShownLayout
    from tui.state import Planned, Screenful

PAUSE_S = 0.01
"""Wait this long for the next key before planning: pasted text is one question, and nobody sees the wait."""

PLANNING = "planning ..."
STALE_S = 0.25
"""An answer turns grey when the next one takes longer than this; sooner it would only flicker."""


class MainScreen(Screen[None]):
    """Everything on one screen, at 80x24 and up; wide ones show ranking and details side by side."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (150, "-wide")]  # noqa: RUF012  # declared by Textual, in a way that mypy
    VERTICAL_BREAKPOINTS = [(0, "-low"), (36, "-high")]  # noqa: RUF012  # takes for an instance's
    AUTO_FOCUS = "RankedLayouts"
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

    def __init__(self, texts: Mapping[str, str], search: Search | None) -> None:
        super().__init__()
        self.texts = dict(texts)
        self.asking = ScreenQuestions(self._tell, search)
        self.planned: Planned | None = None
        self.kind, self.place = "ranked", 0
        self._answered, self._without = -1, ""
        self._pause: Timer | None = None
        self._grey: Timer | None = None

    def compose(self) -> ComposeResult:
        """From the question down to its command line."""
        yield Static(PLANNING, id="headline", markup=False)
        yield Fields(self.texts)
        with Vertical(id="answer"):
            yield Static(id="told", markup=False)
            yield Static("STRATEGIES", classes="heading", id="legend", markup=False)
            yield Strategies()
            with Horizontal(id="below"):
                with Vertical(id="ranking"):
                    yield Static("LAYOUTS", classes="heading", id="head", markup=False)
                    yield RankedLayouts()
                yield Details()
        yield Static(id="command", markup=False)
        yield Footer(show_command_palette=False)

    # -- asking ----------------------------------------------------------------------------------------------------

    @on(Changed)
    def _changed(self, message: Changed) -> None:
        if self.texts.get(message.name) == message.text:
            return  # a field says its first text too
        self.texts[message.name] = message.text
        self.asking.change()
        if self._pause is not None:
            self._pause.stop()
        self._pause = self.set_timer(PAUSE_S, lambda: self.asking.check(dict(self.texts), fetch=False))
        self._wait()

    @on(Submitted)
    def start(self) -> None:
        """Plan for the fields as they are: at first, and after enter where there is no answer to them. A hub is asked
        only here."""
        if self.answered or self.asking.searching:
            return
        if self._pause is not None:
            self._pause.stop()
        self.asking.change()
        self.asking.check(dict(self.texts), fetch=True)
        self._wait()

    def _wait(self) -> None:
        if self._grey is None:
            self._grey = self.set_interval(STALE_S, self._say_planning)

    def _say_planning(self) -> None:
        watch = self.asking.watch
        if watch is None:
            self._turn_grey(PLANNING)
        elif self.asking.searching:
            self._turn_grey("  ".join(filter(None, (PLANNING, watch.text, "esc ends the search"))))
        else:
            self._turn_grey(f"ending the search after {watch.text or 'a few layouts'} ...")

    def _turn_grey(self, headline: str) -> None:
        self.query_one("#headline", Static).update(headline)
        self.query_one("#answer").add_class("stale")

    def _tell(self, found: Checked | Searched) -> None:
        """In a thread, which may outlive the screen."""
        with suppress(RuntimeError):
            self.post_message(ThreadDone(found))

    @on(ThreadDone)
    def _told(self, message: ThreadDone) -> None:
        found = message.found
        if not (self.asking.checked(found) if isinstance(found, Checked) else self.asking.searched(found)):
            return
        if isinstance(found.outcome, PlannerError):
            self._refuse(found.outcome)
        elif isinstance(found.outcome, Exception):
            self._settle(str(found.outcome) or "the search was ended")
            self._turn_grey(f"Ended: {self._without}. Enter in a field asks again")
        elif isinstance(found, Checked):
            self.query_one(Fields).refuse(None)
        else:
            self.show(found.outcome)

    def _refuse(self, error: PlannerError) -> None:
        """The last good answer stays, in grey."""
        self._settle(error.sentence)
        self._turn_grey("no answer yet" if self.planned is None else _headline(self.planned))
        field = error.field if error.field in self.texts else inputs.MORE
        self.query_one(Fields).refuse(field, error.sentence)

    @property
    def settled(self) -> bool:
        """Whether the newest question is answered, or refused."""
        return self._answered == self.asking.number

    @property
    def answered(self) -> bool:
        """Whether what is shown answers what the fields say now."""
        return self.settled and not self._without

    def _settle(self, without: str = "") -> None:
        """The newest question has its answer, or is `without` one for this reason."""
        self._answered, self._without = self.asking.number, without
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
        told = self.query_one("#told", Static)
        told.update(told_text(shown))
        told.display = bool(shown.told)
        for one in self.query(Layouts):
            one.show(shown, self.place if one.kind == self.kind else None)
        ranking = self.query_one(RankedLayouts)
        self.query_one("#head", Static).update(ranking.lines(shown, ranking.size.width)[0].splitlines()[0])
        self._show_picked()

    @property
    def picked(self) -> ShownLayout | None:
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
        """Out of a list of completions, out of a search that takes long, out of the details, out of a field."""
        fields = self.query_one(Fields)
        if fields.completions.display:
            fields.close()
            return
        if self.query_one("#answer").has_class("stale") and self.asking.cancel():
            self._say_planning()
            return
        self.remove_class("reading")
        self.query_one(Strategies if self.kind == "strategies" else RankedLayouts).focus()

    def action_engines(self) -> None:
        """Rank the layouts of every engine, or only of those that can be launched from here."""
        field = self.query_one(f"#{inputs.MORE}", Input)
        try:
            field.value = inputs.toggled(self.texts, inputs.ANY_RUNTIME)
        except PlannerError as error:  # half typed
            self._refuse(error)

    def action_copy(self) -> None:
        """The command line to the clipboard."""
        if (one := self.picked) and self._may("copied"):
            self.app.copy_to_clipboard(one.command)
            self.notify("Copied the command.", timeout=2)

    def _may(self, what: str) -> bool:
        """Whether the layout shown answers the fields; says so where it does not."""
        if not self.answered:
            why = f"The fields have no answer: {self._without.rstrip('.')}." if self.settled else "Still planning."
            self.notify(f"{why} Nothing is {what}.", severity="warning", timeout=3, markup=False)
        return self.answered

    def on_paste(self, event: events.Paste) -> None:
        """Text that is pasted beside the fields is a model that is looked for."""
        if text := event.text.strip().partition("\n")[0].strip().removeprefix("/"):
            self.query_one(Fields).search(text)

    def action_save(self) -> None:
        """Ask where, then write."""
        from tui.screens.save import SaveScreen
        from tui.state import PLAN_FILE, save

        one, planned, kind, place = self.picked, self.planned, self.kind, self.place
        if one is None or planned is None or not self._may("saved"):
            return

        def write(path: str, overwrite: bool) -> tuple[str, ...]:
            return save(planned.estimate(kind, place), path, overwrite=overwrite)

        def written(told: tuple[str, ...] | None) -> None:
            if told:
                path, *notes = told
                said = [f"Wrote {path}. Run it: executor run {for_shell([path])}", *(f"Note: {one}." for one in notes)]
                self.notify("\n".join(said), timeout=5, markup=False)

        self.app.push_screen(
            SaveScreen(f"{one.name}, {one.layout}: {planned.shown.headline}", PLAN_FILE, write), written
        )


def told_text(shown: Screenful) -> str:
    """What there is to say of an answer, a sentence a line. The tie begins with a layout's name, as its row has it."""
    return "\n".join(f"{one if one == shown.tie else sentence(one)}." for one in shown.told)


def _headline(planned: Planned) -> str:
    return f"{planned.shown.headline}. {planned.shown.considered:,} layouts in {planned.seconds * 1e3:.0f} ms"


def _legend(shown: Screenful, one: ShownLayout) -> Content:
    """Where the card ends, and what the bars' colours mean."""
    terms = list(one.terms)
    keys = [part for term in terms for part in (bars.paint((term, 1), terms), f"{term} ")]
    return Content.assemble(f"{CAPACITY}{shown.capacity} ", *keys)
