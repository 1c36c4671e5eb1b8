"""What widgets tell the screen. Not here: what the screen does about it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from textual.message import Message

if TYPE_CHECKING:
    from tui.asking import Checked, Searched


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


class Submitted(Message):
    """Enter in a field: its text is meant as it is."""


class Told(Message):
    """A thread of asking.py is done."""

    def __init__(self, found: Checked | Searched) -> None:
        super().__init__()
        self.found = found
