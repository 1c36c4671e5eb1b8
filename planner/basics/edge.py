"""Where a quantity stops to hold: doubling, then bisecting. Not here: what holds."""

from __future__ import annotations

from collections.abc import Callable


def boundary(count: int, holds: Callable[[int], bool]) -> int:
    """The first of `count` places where `holds` ends, `count` where it never does: doubling, then bisecting.

    The place before it holds and it does not, whatever `holds` is; it is the only such place when `holds` is monotone.
    """
    low, stride = -1, 1
    while (high := min(low + stride, count)) < count and holds(high):
        low, stride = high, stride * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return high
