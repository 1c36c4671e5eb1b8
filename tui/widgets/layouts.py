"""The two lists of layouts: strategies as memory bars against the card, and the ranking as lines of figures.

Not here: where a bar's runs begin and end (planner/views/cells/bars.py).
"""

from __future__ import annotations

from textwrap import wrap
from typing import TYPE_CHECKING

from textual import events, on
from textual.content import Content
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from planner.ask.fits import KEPT
from planner.views.cells.bars import scale_bytes, stacked
from tui import bars
from tui.messages import Entered, Picked

if TYPE_CHECKING:  # as in messages.py
    from planner.views.shown import ShownLayout
    from tui.state import Screenful

NOT_LAUNCHABLE, NOT_FITTING, LIKELY, NOT_KNOWN = "~", "!", "?", "±"
WORDS = {"yes": "$text-success", "likely": "$text-success", "close": "$text-warning", "no": "$text-error"}
WORDS |= dict.fromkeys(KEPT, "$text-warning")
"""Whether a layout fits, and the word's colour."""


class Layouts(OptionList):
    """A list of layouts that is drawn anew when its width changes."""

    kind = ""

    def __init__(self) -> None:
        super().__init__(compact=True, markup=False)
        self.shown: Screenful | None = None

    def show(self, shown: Screenful, highlighted: int | None) -> None:
        """Draw a screenful; the highlight is set without telling anybody."""
        self.shown = shown
        with self.prevent(OptionList.OptionHighlighted):
            self.set_options(self._drawn(shown, max(20, self.scrollable_content_region.width)))
            self.highlighted = highlighted

    def on_resize(self, event: events.Resize) -> None:
        """Bars and wrapped lines depend on the width."""
        if self.shown is not None:
            self.show(self.shown, self.highlighted)

    def on_focus(self) -> None:
        """Coming here picks what is highlighted here."""
        if self.highlighted is None and self.option_count:
            self.action_first()
        elif self.highlighted is not None:
            self.post_message(Picked(self.kind, self.highlighted))

    @on(OptionList.OptionHighlighted)
    def _highlighted(self, event: OptionList.OptionHighlighted) -> None:
        event.stop()
        if self.has_focus:
            self.post_message(Picked(self.kind, event.option_index))

    @on(OptionList.OptionSelected)
    def _selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        self.post_message(Entered())

    def _drawn(self, shown: Screenful, width: int) -> list[Option]:
        raise NotImplementedError


class Strategies(Layouts):
    """Every strategy at its best layout, a bar each; below, why the others are not there."""

    kind = "strategies"

    def _drawn(self, shown: Screenful, width: int) -> list[Option]:
        capacity = shown.capacity_bytes
        full = scale_bytes((one.device_bytes for one in shown.strategies), capacity)
        names = max(map(len, [*map(_name, shown.strategies), *shown.unavailable]), default=0)
        sizes = max((len(one.memory) for one in shown.strategies), default=0)
        room = max(8, width - names - sizes - 3 - max(map(len, WORDS)))
        found = [Option(_bar(one, names, sizes, capacity, full, room)) for one in shown.strategies]
        for name, reason in shown.unavailable.items():
            lines = wrap(f"not available: {reason}", max(20, width - names - 1))
            text = f"{name.ljust(names)} " + f"\n{' ' * (names + 1)}".join(lines)
            found.append(Option(text, disabled=True))
        return found


def _bar(one: ShownLayout, names: int, sizes: int, capacity: float | None, full: float, room: int) -> Content:
    runs = stacked(one.terms, capacity, full, room)
    return Content.assemble(
        f"{_name(one).ljust(names)} ",
        *(bars.paint(run, list(one.terms)) for run in runs),
        f" {one.memory.rjust(sizes)} ",
        (one.verdict or "", WORDS.get(one.verdict or "", "")),
    )


class RankedLayouts(Layouts):
    """The best layouts of all strategies, fastest first."""

    kind = "ranked"
    HEAD = ("#", "strategy", "card GiB", "step", "tok/s/GPU", "MFU", "batch", "layout")

    def _drawn(self, shown: Screenful, width: int) -> list[Option]:
        return [*map(Option, self.lines(shown, width)[1:]), *(Option(note, disabled=True) for note in _notes(shown))]

    def lines(self, shown: Screenful, width: int) -> list[str]:
        """The head and the rows, columns aligned; a long layout goes on below, so nothing is cut."""
        rows = [
            (
                f"{place + 1}{'*' if place == shown.recommended else ' '}",
                _name(one),
                f"{one.memory_gib}{_mark(one)}",
                one.step,
                one.tokens_per_s_per_gpu,
                one.mfu,
                one.batch.replace(" ", ""),
                one.layout,
            )
            for place, one in enumerate(shown.ranked)
        ]
        table = [self.HEAD, *rows]
        widths = [max(len(row[place]) for row in table) for place in range(len(self.HEAD) - 1)]
        found = []
        for row in table:
            cells = [
                cell.ljust(size) if place < 2 else cell.rjust(size)
                for place, (cell, size) in enumerate(zip(row, widths, strict=False))
            ]
            start = " ".join(cells) + " "
            rest = wrap(row[-1], max(12, width - len(start))) or [""]
            found.append(start + f"\n{' ' * len(start)}".join(rest))
        return found


def _name(one: ShownLayout) -> str:
    """With a mark where it is only a plan."""
    return one.name if one.refusal is None else f"{one.name}{NOT_LAUNCHABLE}"


def _mark(one: ShownLayout) -> str:
    if one.verdict in KEPT:
        return NOT_KNOWN
    return NOT_FITTING if not one.fits else LIKELY if one.verdict == "likely" else " "


def _notes(shown: Screenful) -> list[str]:
    """What the marks mean that are there."""
    every = (*shown.strategies, *shown.ranked)
    marks = {
        f"{NOT_LAUNCHABLE} nothing that is installed launches it": any(one.refusal is not None for one in every),
        f"{LIKELY} likely fits: the upper end of its memory's band does not": any(
            _mark(one) == LIKELY for one in shown.ranked
        ),
        f"{NOT_KNOWN} whether it fits is not known: something is not counted": any(
            _mark(one) == NOT_KNOWN for one in shown.ranked
        ),
        f"{NOT_FITTING} does not fit": any(_mark(one) == NOT_FITTING for one in shown.ranked),
    }
    return [note for note, there in marks.items() if there]
