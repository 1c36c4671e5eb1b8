"""What widgets tell the screen. Not here: what the screen does about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.message import Message

if TYPE_CHECKING:  # the planner's cost models are imported after the first paint
    from planner.errors import PlannerError
    from tui.state import Planned


class Changed(Message):
    """A field has a new text."""

    def __init__(self, name: str, text: str) -> None:
        super().__init__()
        self.name, self.text = name, text


class Picked(Message):
    """A layout was picked: `kind` names the list ("strategies" or "ranked")."""

    def __init__(self, kind: str, place: int) -> None:
        super().__init__()
        self.kind, self.place = kind, place


class Entered(Message):
    """Enter on a layout: its details are wanted."""


class Replanned(Message):
    """The planner is done with the question number `asked`: an answer, or a refusal."""

    def __init__(self, asked: int, outcome: Planned | PlannerError) -> None:
        super().__init__()
        self.asked, self.outcome = asked, outcome
