"""The picked layout in words and tables: its terms by phase, its collectives, its time, and the reasons.

Not here: any of the figures (tui/state.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.app import ComposeResult
from textual.containers import ScrollableContainer
from textual.content import Content
from textual.widgets import Static

if TYPE_CHECKING:  # as in messages.py
    from planner.views.shown import ShownLayout
    from tui.state import Screenful

HEADING = "$text-primary bold"


class Details(ScrollableContainer, can_focus=True):
    """A page that scrolls both ways."""

    def compose(self) -> ComposeResult:
        """Sentences, which wrap, around tables, which do not."""
        yield Static(id="reasons", markup=False)
        yield Static(id="tables", markup=False)
        yield Static(id="times", markup=False)

    def show(self, screen: Screenful, one: ShownLayout) -> None:
        """Everything that is known of one layout."""
        counts = "; ".join(f"{name}: {count}" for name, count in screen.rejected.items())
        self.query_one("#reasons", Static).update(
            Content.assemble(
                (f"{one.name}  {one.layout}", HEADING),
                *(f"\n{reason}." for reason in one.reasons),
            )
        )
        self.query_one("#tables", Static).update(
            Content.assemble(
                ("\nTERMS, live GiB on one GPU at the fullest moment of each phase\n", HEADING),
                f"{one.memory_table}\n{one.sum_line}",
                ("\n\nCOLLECTIVES of one optimizer step and rank\n", HEADING),
                one.collectives_table,
            )
        )
        self.query_one("#times", Static).update(
            Content.assemble(
                ("\nTIME\n", HEADING),
                "\n".join([one.time_line, *([one.trust] if one.trust else [])]),
                ("\n\nRANKING\n", HEADING),
                f"{screen.considered:,} layouts considered. Rejected: {counts or 'none'}.",
            )
        )
        self.scroll_home(animate=False)
