"""What widgets tell the screen. Not here: what the screen does about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from textual.message import Message

if TYPE_CHECKING:
    from tui.asking import Checked, Searched


@dataclass
class Changed(Message):
    """A field has a new text."""

    name: str
    text: str


@dataclass
class Picked(Message):
    """A layout was picked: `kind` names the list ("strategies" or "ranked")."""

    kind: str
    place: int


class Entered(Message):
    """Enter on a layout: its details are wanted."""


class Submitted(Message):
    """Enter in a field: its text is meant as it is."""


@dataclass
class ThreadDone(Message):
    """A thread of asking.py is done."""

    found: Checked | Searched
