"""A small log-log plot in plain characters, for curves that span decades.

Not here: what is plotted, or colours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

Point = tuple[float, float]

MARK, GUIDE = "*", "."


def log_plot(points: Sequence[Point], guide: Sequence[Point], *, width: int = 60, height: int = 12) -> list[str]:
    """Points as `*` over a guide line as `.`, both axes logarithmic, each marked point labelled on its axis.

    `guide` are two points or more that straight segments join; it is drawn first, so that points hide it.
    """
    every = [*points, *guide]
    left, right = _range([x for x, _ in every])
    bottom, top = _range([y for _, y in every])
    grid = [[" "] * width for _ in range(height)]

    def column(x: float) -> int:
        return _place(x, left, right, width)

    def row(y: float) -> int:
        return height - 1 - _place(y, bottom, top, height)

    for (x0, y0), (x1, y1) in pairwise(guide):
        for place in range(column(x0), column(x1) + 1):
            share = (place - column(x0)) / max(column(x1) - column(x0), 1)
            grid[row(y0 * (y1 / y0) ** share)][place] = GUIDE
    labels = {row(y): f"{y:,.3g}" for y in (bottom, top)}
    for x, y in points:
        grid[row(y)][column(x)] = MARK
        labels.setdefault(row(y), f"{y:,.3g}")
    margin = max(len(label) for label in labels.values())
    lines = [f"{labels.get(place, ''):>{margin}} |{''.join(cells)}".rstrip() for place, cells in enumerate(grid)]
    lines.append(f"{'':>{margin}} +{'-' * width}")
    lines.append(f"{'':>{margin}}  {_axis([x for x, _ in points], column, width)}".rstrip())
    return lines


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low else (low / 2, high * 2)


def _place(value: float, low: float, high: float, cells: int) -> int:
    return round(math.log(value / low) / math.log(high / low) * (cells - 1))


def _axis(values: Sequence[float], column: Callable[[float], int], width: int) -> str:
    """Labels under their columns, those that would run into the one before left out."""
    line = ""
    for value in values:
        label = f"{value:g}"
        start = min(column(value), width - len(label))
        if not line or start > len(line):
            line = line.ljust(start) + label
    return line
