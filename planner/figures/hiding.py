"""Where collectives and copies that compute hides stand beside it: sums of a step laid into its passes.

The step time says how many seconds of each are hidden (pipelinetime.py), not when. Not here: any seconds of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec

from planner.figures.pipelinetime import PHASES, PhaseWaits, Waits


class Piece(msgspec.Struct, frozen=True):
    """All calls of one kind in a step, or all copies of a phase: seconds that are waited for and that are hidden, for
    the micro-batches `on` together. `calls` is None of copies."""

    name: str
    op: str
    phase: str
    copies: bool
    on: range
    exposed_s: float
    hidden_s: float
    calls: float | None


@dataclass
class OverlapWindow:
    """A pass that something may hide beside; `free_s` is from where on nothing does yet."""

    micro_batch: int
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        self.free_s = self.start_s


Placed = list[tuple[Piece, int, tuple[float, float]]]
"""What hides beside a pass of which micro-batch, and from when to when."""


def pieces_of(waits: Waits, micro_batches: int) -> list[Piece]:
    """A stage's collectives outside of passes, and its copies."""
    found = []
    for phase in PHASES:
        found += _collectives(phase, waits.phases[phase], micro_batches)
    for one in waits.moved:
        exposed_s, seconds, phase = float(one.waited_s), float(one.seconds), one.transfer.phase
        ways = [
            way for way, sent in (("out", one.transfer.to_host_bytes), ("in", one.transfer.to_device_bytes)) if sent
        ]
        name = f"host link, {' and '.join(ways)}"
        on = range(micro_batches)
        found.append(Piece(name, "copy", phase, True, on, exposed_s, max(seconds - exposed_s, 0.0), None))
    return [piece for piece in found if piece.exposed_s or piece.hidden_s]


def _collectives(phase: str, waits: PhaseWaits, micro_batches: int) -> list[Piece]:
    """What all of a phase waits for together is each one's in proportion to what of it would hide."""
    alone = [sum(map(float, one.alone_s)) for one in waits.calls]
    hiding = [max(float(one.seconds) - alone_s, 0.0) for one, alone_s in zip(waits.calls, alone, strict=True)]
    together_s, pool_s = float(waits.together_s or 0.0), sum(hiding)
    found = []
    for one, alone_s, hidden_s in zip(waits.calls, alone, hiding, strict=True):
        part_s = together_s * hidden_s / pool_s if pool_s else 0.0
        call, number = one.call, max(1, round(float(one.share) * micro_batches))
        found.append(
            Piece(
                name=f"{call.op} {call.axis} {call.unit}",
                op=call.op,
                phase=phase,
                copies=False,
                on=_on(phase, min(number, micro_batches), micro_batches),
                exposed_s=alone_s + part_s,
                hidden_s=max(hidden_s - part_s, 0.0),
                calls=float(call.count),
            )
        )
    return found


def _on(phase: str, number: int, micro_batches: int) -> range:
    """Which micro-batches these are: weights are gathered in the first, gradients reduced in the last, and
    what all but one take part in is made after the first."""
    if phase == "forward" and number == 1:
        return range(1)
    return range(micro_batches - number, micro_batches)


def place_hidden(windows: Sequence[OverlapWindow], pieces: Iterable[Piece]) -> tuple[Placed, float]:
    """Lay each piece's hidden seconds beside the passes of its own micro-batches, evenly as far as there is room, those
    of fewest first; then beside any pass of the phase, since the step time asks for no more than that there is room in
    all. What finds none is the second value, in seconds."""
    placed: Placed = []
    left_s = 0.0
    by_batch: dict[int, list[OverlapWindow]] = {}
    for window in windows:
        by_batch.setdefault(window.micro_batch, []).append(window)
    for piece in sorted(pieces, key=lambda one: len(one.on)):
        rest_s = 0.0
        for number in piece.on:
            rest_s += _lay(placed, piece, by_batch.get(number, ()), piece.hidden_s / len(piece.on))
        if rest_s > 0:
            own = [window for window in windows if window.micro_batch in piece.on]
            rest_s = _lay(placed, piece, [*own, *windows], rest_s)
        left_s += rest_s
    return placed, left_s


def _lay(placed: Placed, piece: Piece, windows: Iterable[OverlapWindow], seconds: float) -> float:
    """Fill windows in their order; the seconds that are left."""
    for window in windows:
        took = min(seconds, window.end_s - window.free_s)
        if took > 0:
            placed.append((piece, window.micro_batch, (window.free_s, window.free_s + took)))
            window.free_s += took
            seconds -= took
        if seconds <= 0:
            break
    return max(seconds, 0.0)
