"""Lanes of rectangles as SVG: names at the left, bars on one scale, what each adds up to at the right.

Serves memory by phase, layouts side by side and ways to save. Not here: what is drawn (scene/), or the shapes
(canvas.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from planner.basics.quantities import format_bytes, format_seconds
from planner.views.scene import TERMS, Lane, kinds_of
from planner.views.scene.difference import Difference
from planner.views.scene.memory import MemoryLanes
from planner.views.scene.why import SAVED, Why
from planner.views.svg.canvas import FAINT, FILLS, INK, PANEL, Canvas, fill_of, fitting

WIDTH, MARGIN, NAMES, TOTALS, BAR, GAP = 1000, 16, 210, 110, 22, 8
ROOM = WIDTH - 2 * MARGIN - NAMES - TOTALS
BAND = 7
"""Height of the bracket that shows where 90 % of measured runs lie."""
SPARE = 1.04


def memory_svg(memory: MemoryLanes, before: MemoryLanes | None = None) -> bytes:
    """Memory by phase, with the card's end and the band of measured runs, and what was on the card `before`."""
    canvas = _canvas("Memory of the fullest rank by phase", f"{format_bytes(memory.card.end)} on the card")
    low, high = memory.low_bytes, memory.high_bytes
    was = () if before is None else (msgspec.structs.replace(before.card, name="before"),)
    full = SPARE * max(memory.capacity_bytes or 0.0, high or 0.0, *(lane.end for lane in (*memory.lanes, *was)))
    y = _lanes(canvas, memory.lanes, full, format_bytes, MARGIN)
    if low is not None and high is not None:
        y = _band(canvas, low, high, full, y)
    y = _lanes(canvas, was, full, format_bytes, y)
    return canvas.finished(_foot(canvas, (*memory.lanes, *was), memory.capacity_bytes, full, y))


def memory_difference_svg(found: Difference) -> bytes:
    """Bytes on the card of several layouts."""
    canvas = _canvas("Memory on the card, layout by layout", "A bar a layout, by term")
    full = SPARE * max(found.capacity_bytes or 0.0, *(lane.end for lane in found.memory))
    y = _lanes(canvas, found.memory, full, format_bytes, MARGIN)
    return canvas.finished(_foot(canvas, found.memory, found.capacity_bytes, full, y))


def time_difference_svg(found: Difference) -> bytes:
    """Steps of several layouts."""
    canvas = _canvas("A step, layout by layout", "A bar a layout, by what the step waits for")
    full = SPARE * max(lane.end for lane in found.time)
    y = _lanes(canvas, found.time, full, format_seconds, MARGIN)
    return canvas.finished(_foot(canvas, found.time, None, full, y))


def ways_svg(why: Why) -> bytes:
    """What each way to save memory leaves on the card, and what it saves."""
    canvas = _canvas("What would need less memory", "A bar an option: what is on the card then, and what is saved")
    full = SPARE * max(why.capacity_bytes or 0.0, *(lane.end for lane in why.ways))
    left = [lane.rectangles[0].end for lane in why.ways]
    y = _lanes(canvas, why.ways, full, format_bytes, MARGIN, left)
    return canvas.finished(_foot(canvas, why.ways, why.capacity_bytes, full, y))


def _canvas(title: str, about: str) -> Canvas:
    canvas = Canvas(WIDTH)
    canvas.title(title, about)
    return canvas


def _x(size: float, full: float) -> float:
    return MARGIN + NAMES + ROOM * min(size / full, 1.0)


def _fill(kind: str, kinds: Sequence[str]) -> str:
    """Bytes by term have the same colour in every picture; of other kinds each has another."""
    if set(kinds) <= set(TERMS):
        return FILLS[TERMS.index(kind)]
    return PANEL if kind == SAVED else fill_of(kinds.index(kind), len(kinds))


def _lanes(
    canvas: Canvas, lanes: Sequence[Lane], full: float, told: Callable[[float], str], y: float,
    totals: Sequence[float] | None = None,
) -> float:  # fmt: skip
    kinds = kinds_of(lanes)
    for place, lane in enumerate(lanes):
        canvas.text(MARGIN, y + BAR - 6, fitting(lane.name, NAMES - 10, 13), size=13)
        for one in lane.rectangles:
            left, right = _x(one.start, full), _x(one.end, full)
            canvas.rect(
                left, y, max(right - left, 0.3), BAR, fill=_fill(one.kind, kinds), stroke=FAINT, stroke_width=0.6
            )
        total = told(lane.end if totals is None else totals[place])
        canvas.text(WIDTH - MARGIN, y + BAR - 6, total, size=13, bold=True, anchor="end")
        y += BAR + GAP
    return y


def _band(canvas: Canvas, low: float, high: float, full: float, y: float) -> float:
    """The range of measured runs under the last bar."""
    left, right, middle = _x(low, full), _x(high, full), y + BAND / 2
    canvas.line((left, y), (left, y + BAND), width=1.4)
    canvas.line((left, middle), (right, middle), width=1.4)
    canvas.line((right, y), (right, y + BAND), width=1.4)
    words = f"90 % of measured runs: {format_bytes(low)} to {format_bytes(high)}"
    canvas.text(MARGIN, y + BAND + 12, words, size=12, colour=FAINT)
    return y + BAND + GAP + 12


def _foot(canvas: Canvas, lanes: Sequence[Lane], capacity: float | None, full: float, y: float) -> float:
    """The card's end through all bars, and what the colours mean; returns the height."""
    if capacity is not None:
        x = _x(capacity, full)
        canvas.line((x, MARGIN - 6), (x, y), stroke=INK, width=1.6)
        canvas.text(min(x, WIDTH - MARGIN), y + 12, f"card {format_bytes(capacity)}", size=12, anchor="end")
        y += 18
    x, y = float(MARGIN), y + 12
    kinds = kinds_of(lanes)
    for kind in kinds:
        if x + len(kind) * 7.2 + 22 > WIDTH - MARGIN:
            x, y = float(MARGIN), y + 20
        canvas.rect(x, y - 10, 13, 13, fill=_fill(kind, kinds), stroke=FAINT, stroke_width=0.6)
        canvas.text(x + 18, y, kind, size=12)
        x += 18 + len(kind) * 7.2 + 16
    return y + MARGIN
