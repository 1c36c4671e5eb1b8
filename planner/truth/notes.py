"""Why a row cannot be predicted, and what was assumed so that it can: what the mapping's parts share.

Not here: the mapping (cases.py, models.py, machines.py).
"""

from __future__ import annotations


class CannotPredict(Exception):
    """Why a row has no prediction: one sentence, without the row's own numbers where they do not matter."""


class Notes:
    """Assumptions as they are made, each once."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def add(self, *texts: str) -> None:
        """Take note; empty texts say nothing."""
        self.made += [text for text in dict.fromkeys(texts) if text and text not in self.made]
