"""A plan drawn in the terminal: memory by phase, nodes with their GPUs, groups, bytes on every link, pipeline stages.

Up to MOST_NODES nodes are drawn one by one, more are folded into one drawing for each pattern. rich colours it and
drops the colour where there is no terminal. Not here: what there is to draw (scene/map.py), or the file (svg/map.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from planner.basics.quantities import format_volume
from planner.basics.saying import colours_off
from planner.spec.plan import Plan
from planner.views.cells.memory import memory_lines
from planner.views.scene.map import AXIS_WORDS, Cell, Pattern, Picture, cells_of, outlined, picture_of
from planner.views.scene.memory import memory_of_plan
from planner.views.scene.words import folded, ranges_text, stage_words, tier_texts

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

MOST_NODES = 4
"""Nodes drawn one by one."""

MOST_PATTERNS = 4
"""Drawings of folded nodes; beyond them the rank map tells more than a drawing."""

MOST_RANKS = 8
"""Ranks of a group's example that are written out."""

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "red", "bright_cyan", "bright_green")
LABEL_COLUMNS = 15


def print_plan(plan: Plan) -> None:
    """The whole drawing on stdout."""
    from rich.console import Console  # drawing only: importing it costs as much as a whole estimate

    picture = picture_of(plan)
    # No highlighting: rich would colour every number, and here a colour means a stage or a replica.
    console = Console(highlight=False, color_system=None if colours_off() else "auto")
    room = max(40, console.width)
    console.print(picture.title, style="bold", markup=False)
    console.print(picture.subtitle, markup=False)
    memory = memory_of_plan(plan)
    if memory is not None:
        console.print()
        console.print("\n".join(memory_lines(memory, room)), markup=False)
    for part in (_nodes(plan, picture, room), _groups(picture), _links(picture), _stages(picture)):
        console.print()
        for line in part:
            console.print(line)


# -- nodes ---------------------------------------------------------------------------------------------------------


def _nodes(plan: Plan, picture: Picture, room: int) -> Iterator[Text]:
    from rich.text import Text

    yield Text(_legend(picture))
    if picture.nodes <= MOST_NODES:
        for node in range(picture.nodes):
            yield from _node(
                f"node {node}", cells_of(plan.layout, picture.axes, picture.gpus_per_node, node), picture, room
            )
        return
    for pattern in picture.patterns[:MOST_PATTERNS]:
        yield from _node(f"node {pattern.nodes[0][0]}", pattern.cells, picture, room)
        if pattern.count > 1:
            yield Text(_alike(pattern))
    left = picture.patterns[MOST_PATTERNS:]
    if left:
        count = sum(pattern.count for pattern in left)
        yield Text(f"and {count} nodes of {len(left)} other patterns: planner groups lists every rank")


def _legend(picture: Picture) -> str:
    axes = ", ".join(f"{axis}: {AXIS_WORDS[axis]}" for axis in picture.axes)
    parts = [f"{picture.nodes} nodes of {picture.gpus_per_node} {picture.gpu}"] if picture.nodes > 1 else []
    parts += [axes] if axes else []
    parts += [f"[ ] a {picture.outline_axis} group"] if picture.outline_axis else []
    return "; ".join(parts) or f"one {picture.gpu}"


def _alike(pattern: Pattern) -> str:
    """`nodes 1-63 like node 0, shifted: dp_shard 0-511`."""
    first = pattern.nodes[0][0]
    others = [(low + (low == first), high) for low, high in pattern.nodes if high > first]
    moved = [
        f"{axis} {low}-{high}"
        for axis, (low, high) in pattern.spread.items()
        if {cell.place[axis] for cell in pattern.cells} != set(range(low, high + 1))
    ]
    count = pattern.count - 1
    return f"{ranges_text(others, 'node', count)} like node {first}, shifted: in all {', '.join(moved)}"


def _node(name: str, cells: tuple[Cell, ...], picture: Picture, room: int) -> Iterator[Text]:
    """One row of ranks, and below it one row of places for every axis that is split; as many GPUs as there is room."""
    from rich.text import Text

    digits = max(3, len(str(cells[-1].rank)))
    fit = max(1, (room - LABEL_COLUMNS) // (digits + 2))
    while 1 < fit < len(cells) and len(cells) % fit and fit > len(cells) // 4:
        fit -= 1  # lines of equal length where that does not make many of them
    groups = outlined(cells, picture.outline_axis)
    opens, closes = ({group[end] for group in groups} for end in (0, -1))
    for start in range(0, len(cells), fit):
        some = cells[start : start + fit]
        line = Text(("" if start else name).ljust(LABEL_COLUMNS), style="bold")
        for place, cell in enumerate(some):
            colour = COLOURS[picture.colour_of(cell) % len(COLOURS)] if picture.colour_axis else ""
            line.append("[" if start + place in opens else " ", style="not bold")
            line.append(f"{cell.rank:>{digits}}", style=f"{colour} not bold")
            line.append("]" if start + place in closes else " ", style="not bold")
        yield line
        for axis in picture.axes:
            row = Text(f"  {axis}".ljust(LABEL_COLUMNS), style="dim")
            for cell in some:
                colour = COLOURS[picture.colour_of(cell) % len(COLOURS)] if axis == picture.colour_axis else ""
                row.append(f" {cell.place[axis]:>{digits}} ", style=f"{colour} not dim")
            yield row


# -- tables --------------------------------------------------------------------------------------------------------


def _groups(picture: Picture) -> Iterator[Table | Text]:
    from rich.text import Text

    if not picture.groups:
        yield Text("No groups: every rank works alone.")
        return
    table = _table("groups", "of", "number", "the first", "reaches", right=("of", "number"))
    for group in picture.groups:
        shown = ",".join(map(str, group.first[:MOST_RANKS])) + (",..." if len(group.first) > MOST_RANKS else "")
        reach = "stays in a node" if group.nodes == 1 else f"{group.nodes} nodes"
        table.add_row(group.axis, str(group.ranks), str(group.groups), "{" + shown + "}", reach)
    yield table


def _links(picture: Picture) -> Iterator[Table | Text]:
    from rich.text import Text

    if picture.loads is None:
        yield Text("Bytes on the links: n/a, the plan has no prediction.")
        return
    if not picture.loads:
        yield Text("Nothing is sent.")
        return
    inside, outside = f"inside the {picture.domain}", "out of it"
    table = _table("one GPU sends a step", inside, outside, "with", right=(inside, outside))
    for load in picture.loads:
        ops = ", ".join(load.ops)
        table.add_row(load.axis, format_volume(load.inside_bytes), format_volume(load.outside_bytes), ops)
    table.add_row("in all", format_volume(picture.inside_bytes), format_volume(picture.outside_bytes), "")
    yield table
    for line in tier_texts(picture):
        yield Text(line)


def _stages(picture: Picture) -> Iterator[Table | Text]:
    from rich.text import Text

    if len(picture.stages) == 1:
        yield Text("One stage: every replica has all layers.")
        return
    table = _table("stage", "holds", "ranks", "nodes")
    for some in folded(picture.stages):
        table.add_row(*stage_words(some))
    yield table


def _table(*head: str, right: tuple[str, ...] = ()) -> Table:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for place, name in enumerate(head):
        table.add_column(name, justify="right" if name in right else "left", no_wrap=place == 0, overflow="fold")
    return table
