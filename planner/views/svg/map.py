"""A plan as an SVG picture for a slide: nodes as boxes, GPUs as coloured cells, groups outlined, bytes on the links.

Few nodes are drawn large. Of many the first is drawn large, and below it all of them small, or beyond MOST_NODES one
stack of nodes for each colour. Not here: what there is to draw (scene/map.py), or the shapes themselves (canvas.py).
"""

from __future__ import annotations

from typing import NamedTuple

from planner.basics.quantities import format_volume
from planner.spec.plan import Plan
from planner.views.scene.map import AXIS_WORDS, Cell, Picture, cells_of, outlined, picture_of
from planner.views.scene.words import folded, ranges_text, stage_words, tier_texts
from planner.views.svg.canvas import FAINT, INK, PANEL, WIDTH_OF_A_DIGIT, Canvas, fill_of, fitting, lines_of

WIDTH, MARGIN = 1280, 36
ROOM = WIDTH - 2 * MARGIN
LARGE_NODES, MOST_NODES = 8, 128
"""Nodes drawn large, and nodes drawn at all."""

MOST_KEYS, MOST_STACKS = 12, 32
SHORT = {"pp": "pp", "dp_replicate": "rep", "dp_shard": "shard", "cp": "cp", "tp": "tp", "ep": "ep"}
"""Axes as they stand in a cell."""


class Scale(NamedTuple):
    """Sizes of a node and its cells."""

    cell_width: float
    cell_height: float
    gap: float
    a_row: int
    head: float
    foot: float
    labels: bool

    def width(self, gpus: int) -> float:
        """Of a node."""
        return min(gpus, self.a_row) * (self.cell_width + self.gap) + self.gap + 2 * self.gap

    def height(self, gpus: int) -> float:
        """Of a node."""
        return -(-gpus // self.a_row) * (self.cell_height + self.gap) + self.gap + self.head + self.foot


LARGE = Scale(cell_width=62, cell_height=58, gap=7, a_row=8, head=24, foot=24, labels=True)
SMALL = Scale(cell_width=27, cell_height=20, gap=4, a_row=4, head=18, foot=2, labels=False)


def svg_of(plan: Plan) -> bytes:
    """The whole file."""
    picture = picture_of(plan)
    canvas = Canvas(WIDTH)
    canvas.title(picture.title, picture.subtitle)
    y = _head(canvas, picture)
    y = _keys(canvas, picture, y)
    y = _nodes(canvas, plan, picture, y)
    if len(picture.stages) > 1:
        y = _stages(canvas, picture, y)
    y = _table(canvas, picture, y)
    return canvas.finished(y + MARGIN - 10)


def _head(canvas: Canvas, picture: Picture) -> float:
    y = MARGIN + 16.0
    for line in lines_of(picture.title, ROOM, 25):
        canvas.text(MARGIN, y, line, size=25, bold=True)
        y += 30
    for line in lines_of(picture.subtitle, ROOM, 14):
        canvas.text(MARGIN, y, line, size=14, colour=FAINT)
        y += 20
    return y + 6


def _keys(canvas: Canvas, picture: Picture, y: float) -> float:
    """What colours, outlines and the short words in cells mean."""
    x = float(MARGIN)
    noun = "stage" if picture.colour_axis == "pp" else "replica"
    numbers = list(range(picture.colours))
    shown = numbers if len(numbers) <= MOST_KEYS else [*numbers[: MOST_KEYS - 2], -1, numbers[-1]]
    for number in shown:
        if x > WIDTH - 150:
            x, y = float(MARGIN), y + 22
        text = "…" if number < 0 else f"{noun} {number}" if picture.colour_axis else "one replica of the model"
        if number >= 0:
            canvas.rect(x, y - 12, 16, 16, fill=fill_of(number, picture.colours), stroke=FAINT, radius=3)
            x += 22
        canvas.text(x, y, text, size=13)
        x += len(text) * 7.4 + 16
    if picture.outline_axis:
        text = f"outlined: a {picture.outline_axis} group of {picture.axes[picture.outline_axis]}"
        if x + len(text) * 7.4 + 26 > WIDTH - MARGIN:
            x, y = float(MARGIN), y + 22
        canvas.rect(x, y - 12, 20, 16, stroke=INK, stroke_width=2.4, radius=4)
        canvas.text(x + 26, y, text, size=13)
    words = ", ".join(f"{SHORT[axis]}: {AXIS_WORDS[axis]}" for axis in picture.axes)
    if words:
        y += 22
        canvas.text(MARGIN, y, f"In a cell: the rank; {words}, counted from 0.", size=13, colour=FAINT)
    return y + 20


# -- nodes ---------------------------------------------------------------------------------------------------------


def _nodes(canvas: Canvas, plan: Plan, picture: Picture, y: float) -> float:
    count, per_node = picture.nodes, picture.gpus_per_node

    def cells(node: int) -> tuple[Cell, ...]:
        return cells_of(plan.layout, picture.axes, per_node, node)

    if count <= LARGE_NODES:
        boxes = [(node, f"node {node}", 1) for node in range(count)]
        return _grid(canvas, picture, LARGE, [(name, cells(node), stack) for node, name, stack in boxes], y)
    _node(canvas, picture, LARGE, f"node 0: {picture.gpu}", cells(0), MARGIN, y)
    _link_words(canvas, picture, MARGIN + LARGE.width(per_node) + 28, y + 24)
    y += LARGE.height(per_node) + 24
    if count <= MOST_NODES:
        return _grid(canvas, picture, SMALL, [(f"node {node}", cells(node), 1) for node in range(count)], y)
    stacks: list[tuple[int, int]] = []
    colour = None
    for node in range(count):
        here = picture.colour_of(cells(node)[0])
        stacks = [*stacks[:-1], (stacks[-1][0], node)] if here == colour else [*stacks, (node, node)]
        colour = here
    shown = stacks if len(stacks) <= MOST_STACKS else [*stacks[: MOST_STACKS - 1], stacks[-1]]
    named = [
        (ranges_text([run], "node", run[1] - run[0] + 1), cells(run[0]), min(3, run[1] - run[0] + 1)) for run in shown
    ]
    return _grid(canvas, picture, SMALL, named, y)


def _grid(
    canvas: Canvas, picture: Picture, scale: Scale, boxes: list[tuple[str, tuple[Cell, ...], int]], y: float
) -> float:
    """Rows of nodes, each row on a line of the network, the lines joined at the left."""
    width, height = scale.width(picture.gpus_per_node), scale.height(picture.gpus_per_node)
    across = picture.nodes > 1
    left, between = MARGIN + (16 if across else 0), 16 if scale.labels else 12
    columns = max(1, int((ROOM - 16 + between) // (width + between)))
    rails: list[float] = []
    for start in range(0, len(boxes), columns):
        row = boxes[start : start + columns]
        rail = y + height + (26 if scale.labels else 12)
        for place, (name, cells, stack) in enumerate(row):
            x = left + place * (width + between)
            if across:
                canvas.line((x + width / 2, y + height), (x + width / 2, rail))
                if scale.labels and picture.outside_bytes is not None:
                    told = f"{format_volume(picture.outside_bytes * len(cells))} a step"
                    canvas.text(x + width / 2 + 8, y + height + 18, told, size=12, colour=FAINT)
            for shadow in range(stack - 1, 0, -1):
                canvas.rect(x + 3 * shadow, y - 3 * shadow, width, height, fill=PANEL, stroke=FAINT, radius=8)
            _node(canvas, picture, scale, name, cells, x, y)
        if across:
            canvas.line((MARGIN, rail), (left + (len(row) - 1) * (width + between) + width / 2, rail), width=3)
            rails.append(rail)
        y = rail + (22 if scale.labels else 16)
    if across:
        canvas.line((MARGIN, rails[0]), (MARGIN, y), width=3)
        y += 14
    if not scale.labels:  # their bytes are told beside the first node
        links = " and ".join(tier.link for tier in picture.tiers if tier.gpus > picture.gpus_per_node)
        canvas.text(MARGIN + 10, y, links, size=13, colour=FAINT)
        return y + 14
    return _link_words(canvas, picture, MARGIN, y + 4) + 8


def _node(
    canvas: Canvas, picture: Picture, scale: Scale, name: str, cells: tuple[Cell, ...], x: float, y: float
) -> None:
    gpus = picture.gpus_per_node
    width, height = scale.width(gpus), scale.height(gpus)
    canvas.rect(x, y, width, height, fill=PANEL, stroke=FAINT, stroke_width=1.4, radius=8)
    size = 14 if scale.labels else 11
    canvas.text(x + 2 * scale.gap, y + scale.head - 6, fitting(name, width - 20, size), size=size, bold=True)
    spots = [
        (
            x + 2 * scale.gap + place % scale.a_row * (scale.cell_width + scale.gap),
            y + scale.head + scale.gap / 2 + place // scale.a_row * (scale.cell_height + scale.gap),
        )
        for place in range(len(cells))
    ]
    for cell, (left, top) in zip(cells, spots, strict=True):
        _cell(canvas, picture, scale, cell, left, top)
    for run in _boxes(cells, picture.outline_axis, scale.a_row):
        (left, top), (right, bottom) = spots[run[0]], spots[run[-1]]
        edge = scale.gap * 0.36
        canvas.rect(
            left - edge, top - edge,
            right - left + scale.cell_width + 2 * edge, bottom - top + scale.cell_height + 2 * edge,
            stroke=INK, stroke_width=2.4 if scale.labels else 1.6, radius=6 if scale.labels else 4,
        )  # fmt: skip
    if scale.labels and gpus > 1:
        near = picture.tiers[0]
        told = near.link if near.sent_bytes is None else f"{near.link}: {format_volume(near.sent_bytes)} a GPU and step"
        told = fitting(told, width - 16, 12)
        line = y + height - 21
        canvas.line((x + 2 * scale.gap, line), (x + width - 2 * scale.gap, line), width=3)
        canvas.text(x + width / 2, y + height - 7, told, size=12, colour=FAINT, anchor="middle")


def _cell(canvas: Canvas, picture: Picture, scale: Scale, cell: Cell, left: float, top: float) -> None:
    fill = fill_of(picture.colour_of(cell), picture.colours)
    canvas.rect(left, top, scale.cell_width, scale.cell_height, fill=fill, stroke=FAINT, stroke_width=0.8, radius=4)
    middle = left + scale.cell_width / 2
    if not scale.labels:
        size = min(10.5, scale.cell_width / len(f"{cell.rank}") / WIDTH_OF_A_DIGIT)
        canvas.text(middle, top + 14, f"{cell.rank}", size=size, anchor="middle")
        return
    canvas.text(middle, top + 19, f"{cell.rank}", size=15, bold=True, anchor="middle")
    words = [f"{SHORT[axis]}{place}" for axis, place in cell.place.items()]
    lines: list[str] = []
    for word in words:
        if lines and len(lines[-1]) + len(word) < 10:
            lines[-1] += f" {word}"
        else:
            lines.append(word)
    for number, line in enumerate(lines[:3]):
        canvas.text(middle, top + 32 + 11 * number, line, size=10, anchor="middle")


def _boxes(cells: tuple[Cell, ...], axis: str | None, a_row: int) -> list[list[int]]:
    """Places in a node that are outlined together: a group's, cut at the ends of rows unless they fill whole rows."""
    runs: list[list[int]] = []
    for group in outlined(cells, axis):
        if group[0] % a_row == 0 and len(group) % a_row == 0:
            runs.append(group)
            continue
        rows = sorted({place // a_row for place in group})
        runs += [[place for place in group if place // a_row == row] for row in rows]
    return runs


def _link_words(canvas: Canvas, picture: Picture, x: float, y: float) -> float:
    for text in tier_texts(picture):
        for line in lines_of(text, WIDTH - MARGIN - x, 13):
            canvas.text(x, y, line, size=13, bold=True)
            y += 19
    return y


# -- stages and groups ---------------------------------------------------------------------------------------------


def _stages(canvas: Canvas, picture: Picture, y: float) -> float:
    canvas.text(MARGIN, y + 16, "Pipeline", size=16, bold=True)
    y += 28
    shown = folded(picture.stages)
    columns = min(len(shown), 4)
    width, height, gap = (ROOM - 24 * (columns - 1)) / columns, 62, 24
    for number, some in enumerate(shown):
        x = MARGIN + number % columns * (width + gap)
        top = y + number // columns * (height + 14)
        fill = fill_of(some[0].stage, picture.colours)
        canvas.rect(x, top, width, height, fill=fill, stroke=FAINT, radius=8)
        name, holds, ranks, nodes = stage_words(some)
        lines = (
            f"stage{'s' if len(some) > 1 else ''} {name}",
            holds,
            f"{_count('rank', ranks)}, {_count('node', nodes)}",
        )
        for row, line in enumerate(lines):
            middle, size = x + width / 2, 12 if row else 13
            told = fitting(line, width - 10, size)
            canvas.text(middle, top + 19 + 17 * row, told, size=size, bold=row == 0, anchor="middle")
        if number + 1 < len(shown) and (number + 1) % columns:
            canvas.arrow((x + width + 2, top + height / 2), (x + width + gap - 2, top + height / 2))
    return y + -(-len(shown) // columns) * (height + 14) + 6


def _count(noun: str, ranges: str) -> str:
    return f"{noun} {ranges}" if ranges.isdecimal() else f"{noun}s {ranges}"


def _table(canvas: Canvas, picture: Picture, y: float) -> float:
    """Groups with what each sends."""
    if not picture.groups:
        return y
    places = (0, 150, 250, 330, 470, 660, 820)
    head = (
        "group",
        "GPUs each",
        "groups",
        "reach",
        f"inside the {picture.domain}",
        "out of it, a GPU",
        "operations of a step",
    )
    y += 20
    for place, name in zip(places, head, strict=True):
        canvas.text(MARGIN + place, y, name, size=13, bold=True)
    canvas.line((MARGIN, y + 7), (WIDTH - MARGIN, y + 7), width=1)
    loads = {load.axis: load for load in picture.loads or ()}
    for group in picture.groups:
        y += 24
        load = loads.get(group.axis)
        none = "n/a" if picture.loads is None else "nothing"
        row = (
            group.axis,
            f"{group.ranks}",
            f"{group.groups}",
            "stays in a node" if group.nodes == 1 else f"{group.nodes} nodes",
            none if load is None else format_volume(load.inside_bytes),
            none if load is None else format_volume(load.outside_bytes),
            "" if load is None else ", ".join(load.ops),
        )
        for place, text in zip(places, row, strict=True):
            canvas.text(MARGIN + place, y, text, size=13)
    return y + 12
