"""docs/accuracy/memory.svg and time.svg: every predicted figure of docs/accuracy.md against the measured one, a small
chart a source.

The points are those that the page's tables are made of. Not here: a prediction, or an error (planner/calibrate).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from planner.calibrate.predict import Replayed
from planner.calibrate.score import memory_points, time_points
from planner.views.svg.canvas import FAINT, INK, PANEL, Canvas, fitting, lines_of
from scripts.pages.fits import OWN

MEMORY, TIME = "memory.svg", "time.svg"
LEFT_OUT = (OWN, "unfitted_")
"""What the names of files begin with whose rows `make calibration` does not fit."""

WIDTH, MARGIN, COLUMNS, GAP = 1120, 28, 4, 22
PANEL_WIDTH = (WIDTH - 2 * MARGIN - (COLUMNS - 1) * GAP) / COLUMNS
LABELS, HEAD, FOOT = 38, 58, 38
"""Room of a panel beside, above and below its plot."""
SIDE = PANEL_WIDTH - LABELS
FITTED, OTHERS, LINE = "#2563a8", "#c2510c", "#c4ccd4"
LEAST_SPAN, AROUND = 6.0, 1.3
"""A plot spans so large a factor at least, and is so much wider than its points on either side."""
DECADES = 2.1
"""Plots of more have ticks at powers of ten alone."""
AWAY = 2.0
"""The factor of the lines beside the diagonal."""

Point = tuple[float, float]
"""Measured, predicted."""


class ChartSource(msgspec.Struct, frozen=True):
    """A file's points, and what they are."""

    name: str
    told: str
    points: tuple[Point, ...]

    @property
    def fitted(self) -> bool:
        """Whether `make calibration` fits the file's rows."""
        return not self.name.startswith(LEFT_OUT)


def memory_sources(replayed: Iterable[Replayed]) -> list[ChartSource]:
    """Peak memory in GiB, of every kind that was measured."""
    kinds: dict[str, Counter[str]] = {}
    points: dict[str, list[Point]] = {}
    for kind, (one, predicted, measured) in memory_points(replayed):
        kinds.setdefault(one.row.file, Counter())[kind] += 1
        points.setdefault(one.row.file, []).append((measured, predicted))
    return [
        ChartSource(name, ", ".join(f"{count:,} {kind}" for kind, count in kinds[name].items()), tuple(some))
        for name, some in points.items()
    ]


def time_sources(replayed: Iterable[Replayed]) -> list[ChartSource]:
    """Steps in seconds."""
    points: dict[str, list[Point]] = {}
    for one, predicted, measured in time_points(replayed):
        points.setdefault(one.row.file, []).append((measured, predicted))
    return [
        ChartSource(name, "1 step" if len(some) == 1 else f"{len(some):,} steps", tuple(some))
        for name, some in points.items()
    ]


def memory_picture(replayed: Iterable[Replayed]) -> bytes:
    """The file of memory."""
    return picture_of("Peak memory, predicted against measured", "GiB", memory_sources(replayed))


def time_picture(replayed: Iterable[Replayed]) -> bytes:
    """The file of step time."""
    return picture_of("Step time, predicted against measured", "seconds", time_sources(replayed))


def picture_of(title: str, unit: str, sources: Sequence[ChartSource]) -> bytes:
    """Panels of the sources that were fitted, then of those that were left out."""
    count = sum(len(one.points) for one in sources)
    about = (
        f"{count:,} figures of {len(sources)} sources, a point each, in {unit} on logarithmic scales: "
        "measured across, predicted upwards. On the dark line a prediction is what was measured, on the light ones it "
        "is twice or half of it. Every plot has a scale of its own."
    )
    canvas = Canvas(WIDTH)
    canvas.title(title, about)
    y = MARGIN + 14.0
    canvas.text(MARGIN, y, title, size=20, bold=True)
    y += 26
    for line in lines_of(about, WIDTH - 2 * MARGIN, 13):
        canvas.text(MARGIN, y, line, size=13, colour=FAINT)
        y += 19
    for fitted, words in (
        (True, "Sources that the calibration is fitted to"),
        (False, "Left out of the fit: our own runs, and sources kept for judging alone"),
    ):
        if some := [one for one in sources if one.fitted == fitted]:
            y += 26
            _dots(canvas, [(MARGIN + 6.0, y - 5)], fitted, radius=4.5)
            canvas.text(MARGIN + 18, y, words, size=15, bold=True, colour=FITTED if fitted else OTHERS)
            y = _grid(canvas, unit, some, y + 12)
    return canvas.finished(y + 6)


def _grid(canvas: Canvas, unit: str, sources: Sequence[ChartSource], y: float) -> float:
    height = HEAD + SIDE + FOOT
    for place, one in enumerate(sources):
        _panel(canvas, unit, one, MARGIN + place % COLUMNS * (PANEL_WIDTH + GAP), y + place // COLUMNS * (height + 10))
    return y + -(-len(sources) // COLUMNS) * (height + 10)


def _panel(canvas: Canvas, unit: str, source: ChartSource, x: float, y: float) -> None:
    left, top = x + LABELS, y + HEAD
    bottom = top + SIDE
    canvas.text(x, y + 16, fitting(source.name, PANEL_WIDTH, 13), size=13, bold=True)
    canvas.text(x, y + 32, fitting(source.told, PANEL_WIDTH, 11.5), size=11.5, colour=FAINT)
    canvas.text(x, y + 50, "predicted", size=11, colour=FAINT)
    canvas.text(left + SIDE, bottom + 31, f"measured, {unit}", size=11, colour=FAINT, anchor="end")
    canvas.rect(left, top, SIDE, SIDE, fill=PANEL, stroke=LINE)
    low, high = edges(source.points)

    def along(value: float) -> float:
        return SIDE * math.log(value / low) / math.log(high / low)

    for value in ticks(low, high):
        at, told = along(value), f"{value:g}"
        canvas.line((left + at, bottom), (left + at, bottom + 4), width=1)
        canvas.line((left - 4, bottom - at), (left, bottom - at), width=1)
        canvas.text(left + at, bottom + 16, told, size=11, colour=FAINT, anchor="middle")
        canvas.text(left - 7, bottom - at + 4, told, size=11, colour=FAINT, anchor="end")
    away = along(low * AWAY)
    canvas.line((left, bottom - away), (left + SIDE - away, top), stroke=LINE, width=1.2)
    canvas.line((left + away, bottom), (left + SIDE, top + away), stroke=LINE, width=1.2)
    canvas.line((left, bottom), (left + SIDE, top), stroke=INK, width=1)
    _dots(canvas, [(left + along(across), bottom - along(up)) for across, up in source.points], source.fitted)


def _dots(canvas: Canvas, middles: Sequence[Point], fitted: bool, radius: float = 2.6) -> None:
    """Discs of what was fitted, rings of what was not."""
    if fitted:
        canvas.circles(middles, radius, fill=FITTED, opacity=0.45)
    else:
        canvas.circles(middles, radius, stroke=OTHERS, stroke_width=1.3, opacity=0.85)


def edges(points: Sequence[Point]) -> tuple[float, float]:
    """Where a plot begins and ends, across as upwards."""
    values = [value for point in points for value in point]
    low, high = min(values) / AROUND, max(values) * AROUND
    more = max(1.0, math.sqrt(LEAST_SPAN / (high / low)))
    return low / more, high * more


def ticks(low: float, high: float) -> list[float]:
    """Round numbers of a logarithmic scale."""
    steps = (1, 2, 5) if math.log10(high / low) < DECADES else (1,)
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    found = [float(f"{step}e{power}") for power in powers for step in steps]
    return [value for value in found if low <= value <= high]
