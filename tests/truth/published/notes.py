"""Why a row cannot be predicted, and what was assumed so that it can: what the mapping's parts share.

Not here: the mapping (cases.py, models.py, machines.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from planner.calibrate.asked import CannotPredict


class Notes:
    """Assumptions as they are made, each once."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def add(self, *texts: str) -> None:
        """Take note; empty texts say nothing."""
        self.made += [text for text in dict.fromkeys(texts) if text and text not in self.made]


def unknown(what: str, name: str, known: Iterable[str]) -> CannotPredict:
    """A name that nothing here has, with the nearest one where there is one."""
    from difflib import get_close_matches  # only where a row is left out

    near = get_close_matches(name.lower(), sorted(known), n=1, cutoff=0.7)
    return CannotPredict(f"{what} {name} is unknown here" + (f": did you mean {near[0]}?" if near else ""))
