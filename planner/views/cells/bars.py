"""A stacked bar as runs of characters: bytes or seconds by kind, against the card's capacity where there is one.

Every kind has its own glyph, so a bar is read without colours too. Not here: what is stacked (scene/), or a widget.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from planner.views.scene import Lane

GLYPHS = "█▓▒░▞▚▖"
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


def glyph(name: str, kinds: Sequence[str]) -> str:
    """The character of a kind, by its place in the legend; of an end or of nothing, itself."""
    return GLYPHS[kinds.index(name) % len(GLYPHS)] if name in kinds else name or " "


def bar(lane: Lane, kinds: Sequence[str], capacity: float | None, full: float, width: int) -> str:
    """A lane as `width` characters, of which `full` of its unit would take all."""
    runs = stacked(lane.sizes, capacity, full, width)
    return "".join(glyph(name, kinds) * length for name, length in runs)


def legend(kinds: Sequence[str]) -> str:
    """Each kind with its character."""
    return "  ".join(f"{glyph(kind, kinds)} {kind}" for kind in kinds)
