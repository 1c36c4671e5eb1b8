"""A stacked bar as runs of characters: memory by term against the card's capacity.

Every term has its own glyph as well as its own colour, so a bar is read without colours too. Not here: any figure, or
a widget.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

GLYPHS = "█▓▒░▞▚▖"
COLOURS = ("$primary", "$accent", "$warning", "$success", "$secondary", "$error", "$foreground-muted")
CAPACITY = "│"
BEYOND = "▸"
WIDEST = 1.4
"""A bar shows at most this many times the capacity; what is longer ends in an arrow."""

BarSegment = tuple[str, int]
"""A term, or CAPACITY, BEYOND, or "" for nothing, and how many cells of it."""


def scale_bytes(totals: Iterable[float], capacity: float | None) -> float:
    """The bytes a full bar stands for: the longest bar, or the capacity and a little beyond it."""
    longest = max(totals, default=0.0)
    if capacity is None:
        return longest or 1.0
    return min(max(longest, 1.05 * capacity), WIDEST * capacity)


def stacked(terms: Mapping[str, float], capacity: float | None, full_bytes: float, width: int) -> list[BarSegment]:
    """One bar of `width` cells. Ends of runs are rounded, not their lengths, so that they add up."""
    cells: list[str] = [""] * width
    start, end = 0, 0.0
    for term, size in terms.items():
        end += max(0.0, size)
        stop = min(width, round(end / full_bytes * width))
        cells[start:stop] = [term] * (stop - start)
        start = stop
    if end > full_bytes * (1 + 1e-9):
        cells[-1] = BEYOND
    if capacity is not None and (place := round(capacity / full_bytes * width)) < width:
        cells[place] = CAPACITY
    return [(name, len(list(same))) for name, same in groupby(cells)]


def paint(run: BarSegment, terms: Sequence[str]) -> tuple[str, str]:
    """A run's characters and their colour; `terms` is the order of the legend."""
    name, length = run
    if name in terms:
        place = terms.index(name)
        return GLYPHS[place % len(GLYPHS)] * length, COLOURS[place % len(COLOURS)]
    return (name or " ") * length, "$text bold" if name else ""
