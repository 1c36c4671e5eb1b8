"""What a figure leaves out, and the word that a verdict is then: "at least", "at most" or "unsure".

Not here: which keys of a file no figure counts (fromfile/), or the words of a figure that counts all (fits.py).
"""

from __future__ import annotations

from typing import Literal, TypeVar

import msgspec

Bound = Literal["at least", "at most", "unsure"]

Word = TypeVar("Word", bound=str)

KEPT = {"at least": ("no",), "at most": ("yes", "likely"), "unsure": ()}
"""Words that stay true whatever was left out: what does not fit without it does not fit with more."""

SAID: dict[str | None, str] = {
    "at least": "may not fit, since something that adds memory is not counted",
    "at most": "may fit, since something that takes memory away is not counted",
    "unsure": "may fit or not, since something that adds memory and something that takes it away are not counted",
}
"""A verdict of each bound in a sentence."""


class Uncounted(msgspec.Struct, frozen=True):
    """What was asked for and no figure counts, by name: what adds memory (or may), and what takes memory away."""

    more: tuple[str, ...] = ()
    less: tuple[str, ...] = ()

    @property
    def bound(self) -> Bound | None:
        """What that makes of a figure; None: it counts all."""
        if self.more and self.less:
            return "unsure"
        return "at least" if self.more else "at most" if self.less else None

    @property
    def may_fit(self) -> bool:
        """Whether a layout whose figure is beyond the device may fit all the same."""
        return bool(self.less)

    @property
    def sentences(self) -> tuple[str, ...]:
        """For a reader of the figures."""
        if self.bound is None:
            return ()
        shown = "more or less than" if self.bound == "unsure" else f"{self.bound} what is"
        told = {"adds memory": self.more, "takes memory away": self.less}
        causes = [f"{', '.join(keys)} {does}, and is not counted" for does, keys in told.items() if keys]
        return (f"memory is {shown} shown: {'; '.join(causes)}",)


def qualified(word: Word | None, uncounted: Uncounted) -> Word | Bound | None:
    """A verdict under what was left out; None stays unknown."""
    bound = uncounted.bound
    return word if bound is None or word is None or word in KEPT[bound] else bound
