"""Where to save plan.json: one line of text, one line of refusal.

Not here: what is written (tui/state.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Footer, Input, Static

from planner.basics.errors import PlannerError

Writer = Callable[[str, bool], tuple[str, ...]]
"""(path, overwrite) -> the path written to and what to tell of it; raises PlannerError."""


class SaveScreen(ModalScreen[tuple[str, ...] | None]):
    """Asks for a path until something is written, or the person turns away; gives what the writer told."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("enter", "write(False)", "Save", priority=True),
        Binding("ctrl+o", "write(True)", "Overwrite"),
        Binding("escape", "dismiss(None)", "Back"),
    ]

    def __init__(self, what: str, path: str, write: Writer) -> None:
        super().__init__()
        self.what, self.path, self._write = what, path, write

    def compose(self) -> ComposeResult:
        """The layout's name, the path, and the refusal."""
        with Vertical():
            yield Static(f"Save the plan of {self.what}", classes="heading", markup=False)
            yield Input(self.path, id="path", compact=True)
            yield Static(id="refusal", markup=False)
        yield Footer(show_command_palette=False)

    def action_write(self, overwrite: bool) -> None:
        """Write, or say why not and stay."""
        try:
            told = self._write(self.query_one("#path", Input).value, overwrite)
        except PlannerError as error:
            self.query_one("#refusal", Static).update(error.sentence)
        else:
            self.dismiss(told)
