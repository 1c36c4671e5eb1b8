"""A step as lines of characters, one a stage and stream, as wide as the terminal.

A column shows what takes most of its time. Not here: what there is to draw (scene/time.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from planner.basics.display import broken
from planner.basics.quantities import format_seconds
from planner.spec.spans import COMPUTE, SENDS, Span
from planner.views.scene.time import Axis, FoldedAxis, StreamSpans, Track, folded
from planner.views.scene.words import numbers_text

LEAST_COLUMNS = 20
IDLE, NOTHING, FOLD = ".", " ", "⋯"
LETTER_SHARE = 2 / 3
"""Of a column that holds many passes, from which one kind gives it its letter."""
LEAST_SHARE = 0.1
"""Of a column that a collective, a send or a copy fills where it is shown."""

LETTERS = {"forward": "F", "backward": "B", "input_grads": "I", "weight_grads": "W", "recompute": "R", "clip": "C",
           "update": "U"}  # fmt: skip
WORDS = {"F": "forward", "B": "backward", "I": "backward for inputs", "W": "backward for weights", "R": "recomputation",
         "C": "gradient clipping", "U": "optimizer's step", "#": "waited for", "=": "beside compute", ">": "sending",
         "~": "recorded"}  # fmt: skip
MICRO_BATCHED = ("forward", "backward", "input_grads", "weight_grads", "recompute")


def text(axis: Axis, left_out: Sequence[int], width: int, longest: int | None = None) -> str:
    """The whole drawing, `width` columns wide, with sentences in lines of at most `longest` characters. A pipeline's
    steady state is folded where a column would hold several passes."""
    labels = [(track.name, row.stream) for track in axis.tracks for row in track.rows]
    first, second = (max(len(label[place]) for label in labels) + 2 for place in (0, 1))
    told = [_figures(track, row) for track in axis.tracks for row in track.rows]
    room = max(LEAST_COLUMNS, width - first - second - 2 - max(map(len, told)))
    many = any(len(_passes(row)) > room for track in axis.tracks for row in track.rows)
    fold = folded(axis) if many else FoldedAxis(axis, ())
    shown = fold.axis
    places = [int(one.at_s / shown.end_s * room) for one in fold.folds]
    ruler = _ruler(axis.end_s, room, whole=not fold.folds)
    lines = [*(broken(said, longest) for said in axis.told), "", " " * (first + second) + ruler]
    used: set[str] = set()
    figures = iter(told)
    for track in shown.tracks:
        name = track.name
        for row in track.rows:
            drawn = marks(row, shown.end_s, room)
            used |= set(drawn)
            for at in places:
                drawn = f"{drawn[:at]}{FOLD}{drawn[at + 1 :]}"
            lines.append(f"{name:{first}}{row.stream:{second}}{drawn}  {next(figures)}".rstrip())
            name = ""
    lines += ["", broken(_legend(used), longest)]
    lines.append(broken(f"A column is {_fine(shown.end_s / room)}{_reading(used)}.", longest))
    if fold.folds:
        cycles = ", then ".join(f"{one.cycles} cycles of {_fine(one.period_s)}" for one in fold.folds)
        lines.append(broken(f"{FOLD} leaves out {cycles}, each like the two beside it, and takes one column.", longest))
    if left_out:
        noun = "Stage" if len(left_out) == 1 else "Stages"
        said = f"{noun} {numbers_text(left_out)} {'is' if len(left_out) == 1 else 'are'} left out"
        lines.append(f"{said}: --stages {left_out[0]} shows it.")
    lines += [broken(note, longest) for note in axis.notes]
    return "\n".join(lines)


def _passes(row: StreamSpans) -> set[tuple[str, int | None, int | None]]:
    """The passes of a stage that a row has."""
    return {(span.kind, span.micro_batch, span.chunk) for span in row.spans if span.kind in MICRO_BATCHED}


def marks(row: StreamSpans, end_s: float, columns: int) -> str:
    """One character a column: what takes most of its time; of compute, where columns are longer than passes and nothing
    takes most of one, how many tenths of it are busy."""
    each_s = end_s / columns
    coarse = len(_passes(row)) > columns
    filled: list[dict[str, float]] = [{} for _ in range(columns)]
    for span in row.spans:
        mark = _mark(span, coarse=coarse)
        first = max(0, min(int(span.start_s / each_s), columns - 1))
        for place in range(first, columns):
            begin, end = max(span.start_s, place * each_s), min(span.end_s, (place + 1) * each_s)
            if end <= begin and place > first:
                break
            filled[place][mark] = filled[place].get(mark, 0.0) + max(end - begin, 0.0)
    if row.stream != COMPUTE:
        return "".join(_beside(one, each_s) for one in filled)
    return "".join(_computing(one, each_s, coarse=coarse) for one in filled)


def _computing(filled: dict[str, float], each_s: float, *, coarse: bool) -> str:
    most, took_s = max(filled.items(), key=lambda pair: pair[1], default=(IDLE, 0.0))
    busy_s = sum(filled.values())
    if coarse and took_s < LETTER_SHARE * each_s:
        tenths = min(round(10 * busy_s / each_s), 9)
        return str(tenths) if tenths else IDLE
    return most if took_s >= each_s - busy_s and took_s > 0 else IDLE


def _beside(filled: dict[str, float], each_s: float) -> str:
    if sum(filled.values()) < LEAST_SHARE * each_s:
        return NOTHING
    return max(filled.items(), key=lambda pair: pair[1])[0]


def _mark(span: Span, *, coarse: bool) -> str:
    if span.kind in LETTERS:
        letter = LETTERS[span.kind]
        odd = span.kind in MICRO_BATCHED and (span.micro_batch or 0) % 2
        return letter.lower() if odd and not coarse else letter
    if span.stream == SENDS:
        return ">"
    return "#" if span.exposed else "="


def _figures(track: Track, row: StreamSpans) -> str:
    """What a row's columns cannot tell: how much of the step it is busy, or its seconds."""
    if row.stream == COMPUTE:
        return f"{track.busy_share:.0%} busy"
    seconds = format_seconds(sum(span.seconds for span in row.spans))
    waited_s = sum(span.seconds for span in row.spans if span.exposed)
    return f"{seconds}, {format_seconds(waited_s)} waited" if waited_s else seconds


def _ruler(end_s: float, room: int, *, whole: bool) -> str:
    """Begin, middle and end of the step; a folded one has no middle."""
    middle, end = _fine(end_s / 2) if whole else "", _fine(end_s)
    left = "0".ljust(room // 2 - len(middle) // 2) + middle
    return left + end.rjust(room - len(left)) if room - len(left) > len(end) else "0" + end.rjust(room - 1)


def _fine(seconds: float) -> str:
    """Seconds with three figures, however short."""
    for size, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e9:.3g} ns"


def _reading(used: set[str]) -> str:
    """How a column is read beside its letter."""
    if any(mark.isdigit() for mark in used):
        return "; a digit is the tenths of it that compute takes"
    return "; small letters are of odd micro-batches" if any(mark.islower() for mark in used) else ""


def _legend(used: Iterable[str]) -> str:
    capital = {mark.upper() for mark in used}
    known = [f"{mark} {word}" for mark, word in WORDS.items() if mark in capital]
    return ", ".join([*known, f"{IDLE} idle"] if IDLE in capital else known)
