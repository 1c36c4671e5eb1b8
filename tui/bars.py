"""Colours of a memory bar's runs, in the theme's own names.

Not here: where the runs begin and end, or their characters (planner/views/cells/bars.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.views.cells.bars import BarSegment, glyph

COLOURS = ("$primary", "$accent", "$warning", "$success", "$secondary", "$error", "$foreground-muted")


def paint(run: BarSegment, terms: Sequence[str]) -> tuple[str, str]:
    """A run's characters and their colour; `terms` is the order of the legend."""
    name, length = run
    if name in terms:
        return glyph(name, terms) * length, COLOURS[terms.index(name) % len(COLOURS)]
    return glyph(name, terms) * length, "$text bold" if name else ""
