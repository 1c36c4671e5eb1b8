"""Memory as bars of characters: a line a phase, and one for what the card shows.

Not here: what there is to draw (scene/memory.py), or a bar's runs (bars.py).
"""

from __future__ import annotations

from planner.basics.quantities import format_bytes
from planner.views.cells.bars import CAPACITY, bar, legend, scale_bytes
from planner.views.scene import kinds_of
from planner.views.scene.memory import MemoryLanes

LEAST_ROOM = 10


def memory_lines(memory: MemoryLanes, width: int) -> list[str]:
    """The bars, as wide as there is room, and what their characters mean."""
    lanes, kinds = memory.lanes, kinds_of(memory.lanes)
    totals = [format_bytes(lane.end) for lane in lanes]
    first, last = max(len(lane.name) for lane in lanes) + 2, max(map(len, totals))
    room = max(LEAST_ROOM, width - first - last - 2)
    full = scale_bytes([lane.end for lane in lanes], memory.capacity_bytes)
    lines = [
        f"{lane.name:{first}}{bar(lane, kinds, memory.capacity_bytes, full, room)}  {total:>{last}}"
        for lane, total in zip(lanes, totals, strict=True)
    ]
    card = () if memory.capacity_bytes is None else (f"{CAPACITY} card {format_bytes(memory.capacity_bytes)}",)
    return [*lines, "  ".join([legend(kinds), *card])]
