"""A step as SVG: a bar a span, streams of a stage below each other, on one axis.

Not here: what there is to draw (scene/time.py), or the shapes (canvas.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.basics.quantities import format_seconds
from planner.spec.spans import COPIES, SENDS, Span
from planner.views.scene.time import PREDICTED, Axis, StreamSpans, Track
from planner.views.scene.words import numbers_text
from planner.views.svg.canvas import FAINT, FILLS, INK, PANEL, Canvas, fitting, lines_of

WIDTH, MARGIN, LABELS, BAR, GAP = 1280, 24, 190, 16, 3
ROOM = WIDTH - 2 * MARGIN - LABELS
TICKS = 10
LEAST_PIXELS = 0.3
"""Bars that are narrower are drawn with the next one of their kind."""
NUMBERED_PIXELS = 14
"""Bars that are wider bear their micro-batch's number."""

COLOURS = {"forward": FILLS[0], "backward": FILLS[1], "input_grads": FILLS[1], "weight_grads": FILLS[5],
           "recompute": FILLS[2], "clip": FILLS[6], "update": FILLS[3]}  # fmt: skip
WAITED, HIDDEN, SENT, COPIED = FILLS[4], FILLS[7], FILLS[6], "#c3d0f5"
MEANING = (
    ("forward", FILLS[0]), ("backward (for inputs)", FILLS[1]), ("backward for weights", FILLS[5]),
    ("recomputation", FILLS[2]), ("optimizer's step", FILLS[3]), ("waited for", WAITED), ("beside compute", HIDDEN),
    ("sends, clipping", SENT), ("copies beside compute", COPIED),
)  # fmt: skip


def svg_of(axis: Axis, left_out: Sequence[int]) -> bytes:
    """The whole picture."""
    canvas = Canvas(WIDTH)
    canvas.title("One training step on an axis of time", " ".join(axis.told))
    y = 40.0
    for place, told in enumerate(axis.told):
        for line in lines_of(told, WIDTH - 2 * MARGIN, 16 if place == 0 else 13):
            canvas.text(MARGIN, y, line, size=16 if place == 0 else 13, bold=place == 0)
            y += 21
    y = _ticks(canvas, axis, y + 8)
    for track in axis.tracks:
        y = _track(canvas, track, axis.end_s, y)
    y = _legend(canvas, y + 14)
    notes = list(axis.notes)
    if left_out:
        notes.insert(0, f"Stages left out: {numbers_text(left_out)}.")
    for note in notes:
        for line in lines_of(note, WIDTH - 2 * MARGIN, 12):
            canvas.text(MARGIN, y, line, size=12, colour=FAINT)
            y += 17
    return canvas.finished(y + MARGIN / 2)


def _x(seconds: float, end_s: float) -> float:
    return MARGIN + LABELS + ROOM * seconds / end_s


def _ticks(canvas: Canvas, axis: Axis, y: float) -> float:
    for number in range(TICKS + 1):
        at = axis.end_s * number / TICKS
        anchor = "start" if number == 0 else "end" if number == TICKS else "middle"
        canvas.text(_x(at, axis.end_s), y + 10, format_seconds(at), size=11, colour=FAINT, anchor=anchor)
        canvas.line((_x(at, axis.end_s), y + 14), (_x(at, axis.end_s), y + 19), width=1)
    canvas.line((_x(0, axis.end_s), y + 19), (_x(axis.end_s, axis.end_s), y + 19), width=1)
    return y + 26


def _track(canvas: Canvas, track: Track, end_s: float, y: float) -> float:
    rows = track.rows
    height = len(rows) * (BAR + GAP) + GAP
    canvas.rect(MARGIN, y, WIDTH - 2 * MARGIN, height, fill=PANEL)
    told = f"{track.name}, {track.part}"
    canvas.text(MARGIN + 4, y + BAR - 1, fitting(told, 124, 11), size=11, bold=track.part == PREDICTED)
    for row in rows:
        canvas.text(MARGIN + LABELS - 6, y + BAR - 1, row.stream, size=10, colour=FAINT, anchor="end")
        for start_s, stop_s, fill, word in bars(row, end_s):
            left, width = _x(start_s, end_s), ROOM * (stop_s - start_s) / end_s
            canvas.rect(left, y + GAP, max(width, 0.1), BAR, fill=fill)
            if width >= NUMBERED_PIXELS and word:
                canvas.text(left + width / 2, y + BAR - 1, word, size=10, colour=INK, anchor="middle")
        y += BAR + GAP
    return y + GAP + 6


def bars(row: StreamSpans, end_s: float) -> list[tuple[float, float, str, str]]:
    """(begin, end, colour, number) of each bar of a row; those too narrow to be seen are drawn together."""
    least_s = LEAST_PIXELS * end_s / ROOM
    found: list[tuple[float, float, str, str]] = []
    for span in row.spans:
        fill, word = _fill(span), "" if span.micro_batch is None else str(span.micro_batch)
        if found and found[-1][2] == fill and span.start_s - found[-1][1] < least_s and span.seconds < least_s:
            found[-1] = (found[-1][0], max(found[-1][1], span.end_s), fill, "")
        else:
            found.append((span.start_s, span.end_s, fill, word))
    return found


def _fill(span: Span) -> str:
    if span.kind in COLOURS:
        return COLOURS[span.kind]
    if span.exposed:
        return WAITED
    return SENT if span.stream == SENDS else COPIED if span.stream == COPIES else HIDDEN


def _legend(canvas: Canvas, y: float) -> float:
    x: float = MARGIN
    for word, fill in MEANING:
        canvas.rect(x, y - 10, 12, 12, fill=fill)
        canvas.text(x + 17, y, word, size=12)
        x += 17 + len(word) * 6.6 + 18
    return y + 24
