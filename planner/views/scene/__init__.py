"""What there is to draw of a layout: its memory, its ranks, a step, why it is recommended, and how others differ.

Frozen values of rectangles in bytes, ranks or seconds; those with a figure have the key under which `planner explain
--json` gives it. They are the same for characters (cells/), pictures (svg/) and pages. Not here: lines, colours, files.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

OVERHEAD = "overhead"
"""What the allocator and the device add to live tensors."""
TERMS = ("params", "grads", "optimizer", "activations", "logits", "buffers", OVERHEAD)
"""Kinds of bytes on a card, in the order people read them."""


class Rectangle(msgspec.Struct, frozen=True):
    """From `start` to `end` on its lane, in the scene's unit. `kind` decides the colour, `key` names the figure."""

    kind: str
    start: float
    end: float
    key: str

    @property
    def size(self) -> float:
        """Its length."""
        return self.end - self.start


class Lane(msgspec.Struct, frozen=True):
    """Rectangles in a row, none above another."""

    name: str
    rectangles: tuple[Rectangle, ...]

    @property
    def end(self) -> float:
        """Where the last rectangle ends."""
        return self.rectangles[-1].end if self.rectangles else 0.0

    @property
    def sizes(self) -> dict[str, float]:
        """Length by kind, in order of first appearance."""
        found: dict[str, float] = {}
        for one in self.rectangles:
            found[one.kind] = found.get(one.kind, 0.0) + one.size
        return found


def stacked(name: str, parts: Iterable[tuple[str, float, str]]) -> Lane:
    """A lane of (kind, size, key), each beginning where the one before it ends; empty ones are left out."""
    found: list[Rectangle] = []
    start = 0.0
    for kind, size, key in parts:
        if size > 0:
            found.append(Rectangle(kind, start, start + size, key))
            start += size
    return Lane(name, tuple(found))


def kinds_of(lanes: Iterable[Lane]) -> tuple[str, ...]:
    """Every kind on some lanes: in the order of TERMS where all are on a card, else in order of first appearance."""
    found = dict.fromkeys(one.kind for lane in lanes for one in lane.rectangles)
    return tuple(kind for kind in TERMS if kind in found) if found.keys() <= set(TERMS) else tuple(found)
