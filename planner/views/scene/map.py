"""What there is to draw of a plan: nodes and the ranks on them, groups, what each link carries, pipeline stages.

Nodes that look alike but for a shift of their coordinates are one `Pattern`, so a picture of 16,384 GPUs stays small.
Not here: lines, colours or characters (cells/map.py, svg/map.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from planner.basics.arith import ceil_div
from planner.basics.errors import PlannerError
from planner.basics.quantities import format_bytes, format_seconds
from planner.basics.quoting import for_terminal
from planner.engines.base import Call
from planner.figures.comm import Traffic, traffic
from planner.figures.memory import shown_by
from planner.figures.saving import advice_text
from planner.parallelism.case import (
    EXPERT_AXES,
    MESH_AXES,
    Case,
    axis_groups,
    axis_size,
    coordinates,
    mesh_sizes,
    node_of,
)
from planner.parallelism.collectives import WIRE, transport_of
from planner.parallelism.expert import tokens_once
from planner.spec import Cluster, Layout
from planner.spec.plan import Plan
from planner.views.render import size_text

SCHEMA = "show/1"
EXPERT_AXIS = "ep"
"""Not an axis of the dense mesh: expert groups are neighbours inside one stage and replica."""

PARTS = ("dp_secondary", "dp_shard_cp")
SENDING_AXES = ("pp", "pp_ends", *MESH_AXES[1:3], *PARTS, *MESH_AXES[3:], *EXPERT_AXES[2:])
"""Every axis whose groups may send, in the order of the page."""

AXIS_WORDS = {
    "pp": "pipeline stage",
    "dp_replicate": "replica",
    "dp_shard": "share of the states",
    "dp_secondary": "share of the second copy",
    "cp": "part of the sequence",
    "tp": "part of every matrix",
    "ep": "share of the experts",
}
"""What a place on each axis is."""

Ranges = tuple[tuple[int, int], ...]
"""First and last of each run of whole numbers."""


class Cell(msgspec.Struct, frozen=True):
    """One GPU: its rank, and its place on every axis that is split."""

    rank: int
    place: dict[str, int]


class Pattern(msgspec.Struct, frozen=True):
    """Nodes whose cells differ from the first one's by the same step on each axis. `spread` is, by axis, the lowest and
    highest place anywhere on them."""

    nodes: Ranges
    count: int
    cells: tuple[Cell, ...]
    spread: dict[str, tuple[int, int]]


class AxisGroups(msgspec.Struct, frozen=True):
    """The groups of one axis: how many of which size, the first one's ranks, and over how many nodes one reaches
    at most."""

    axis: str
    ranks: int
    groups: int
    first: tuple[int, ...]
    nodes: int


class AxisTraffic(msgspec.Struct, frozen=True):
    """What one GPU sends in one optimizer step for the groups of one axis, inside its domain and out of it: the node,
    or what joins nodes as fast as it joins GPUs, such as an NVLink rack."""

    axis: str
    ops: tuple[str, ...]
    inside_bytes: float
    outside_bytes: float

    @property
    def keys(self) -> tuple[str, ...]:
        """Of its figures in `planner explain --json`: what a rank sends by one operation on the axis."""
        return tuple(f"collectives.{op}.{self.axis}" for op in self.ops)


class NetworkLevel(msgspec.Struct, frozen=True):
    """One level of the network: domains of `gpus`, what joins the GPUs of one, and what a GPU sends over it a step."""

    name: str
    gpus: int
    link: str
    bytes_per_s: float
    sent_bytes: float | None


class StagePlacement(msgspec.Struct, frozen=True):
    """One pipeline stage: its runs of layers (counted from 0; several with virtual stages), its ranks and nodes, first
    and last of each."""

    stage: int
    layers: Ranges
    embedding: bool
    head: bool
    ranks: tuple[int, int]
    nodes: tuple[int, int]


class Picture(msgspec.Struct, frozen=True):
    """A plan as it is drawn. `loads` is None when the plan carries no prediction of what is sent."""

    title: str
    subtitle: str
    gpus: int
    nodes: int
    gpus_per_node: int
    gpu: str
    domain: str
    tiers: tuple[NetworkLevel, ...]
    axes: dict[str, int]
    colour_axis: str | None
    outline_axis: str | None
    patterns: tuple[Pattern, ...]
    groups: tuple[AxisGroups, ...]
    loads: tuple[AxisTraffic, ...] | None
    stages: tuple[StagePlacement, ...]

    @property
    def inside_bytes(self) -> float | None:
        """Bytes one GPU sends a step to others of its domain."""
        return None if self.loads is None else sum(load.inside_bytes for load in self.loads)

    @property
    def outside_bytes(self) -> float | None:
        """Bytes one GPU sends a step out of its domain."""
        return None if self.loads is None else sum(load.outside_bytes for load in self.loads)

    def colour_of(self, cell: Cell) -> int:
        """The number whose colour a GPU has: of its stage, else of its replica."""
        return cell.place.get(self.colour_axis, 0) if self.colour_axis else 0

    @property
    def colours(self) -> int:
        """How many numbers have a colour."""
        return self.axes[self.colour_axis] if self.colour_axis else 1


def picture_of(plan: Plan) -> Picture:
    """Everything that is drawn of a plan."""
    layout, cluster = plan.layout, plan.cluster
    per_node = cluster.gpus_per_node
    axes = {axis: size for axis, size in mesh_sizes(layout).items() if size > 1}
    if layout.ep > 1:
        axes[EXPERT_AXIS] = layout.ep
    sent = _sent(plan)
    loads = None if sent is None else _loads(sent)
    busy = {load.axis for load in loads or ()}
    return Picture(
        title=for_terminal(_title(plan)),
        subtitle=for_terminal(_subtitle(plan)),
        gpus=layout.world_size,
        nodes=int(ceil_div(layout.world_size, per_node)),
        gpus_per_node=per_node,
        gpu=for_terminal(cluster.gpu.name),
        domain=for_terminal(_domain(plan.cluster)),
        tiers=_tiers(plan, sent),
        axes=axes,
        colour_axis=next((axis for axis in ("pp", "dp_replicate") if axis in axes), None),
        outline_axis=_outline_axis(axes, layout, per_node),
        patterns=_patterns(layout, axes, per_node),
        groups=tuple(_group(layout, axis, per_node) for axis in SENDING_AXES if axis in axes or axis in busy),
        loads=loads,
        stages=_stages(plan),
    )


def as_json_object(plan: Plan) -> dict[str, Any]:
    """The picture's figures by name."""
    picture = picture_of(plan)
    totals = {"inside_bytes": picture.inside_bytes, "outside_bytes": picture.outside_bytes}
    return {"schema": SCHEMA, **msgspec.structs.asdict(picture), **totals}


def _title(plan: Plan) -> str:
    layout = plan.layout
    sizes = [f"{axis} {size}" for axis, size in mesh_sizes(layout).items() if size > 1]
    sizes += [f"{EXPERT_AXIS} {layout.ep}"] if layout.ep > 1 else []
    gpus = f"{layout.world_size} GPUs" if layout.world_size > 1 else "one GPU"
    return f"{plan.model.name} on {gpus}: {' x '.join(sizes) or 'nothing is split'}"


def _subtitle(plan: Plan) -> str:
    layout, job, told = plan.layout, plan.job, plan.prediction
    parts = [
        f"{size_text(plan.model)} parameters",
        job.method,
        job.precision,
        f"{plan.runtime.name} ({plan.runtime.described})",
        f"{job.seq_len} tokens",
        f"batch {layout.global_batch_size} = {layout.data_parallel} x {layout.micro_batch_size} x {layout.grad_accum}",
    ]
    if told.memory:
        live = max(phase.total for phase in told.memory)
        parts.append(f"{format_bytes(shown_by(plan))} on the card of a GPU, of which {format_bytes(live)} live")
    if told.step_s is not None:
        parts.append(f"step {format_seconds(told.step_s)}")
    parts.append(advice_text(told.checkpoint))
    return ", ".join(parts)


def _outline_axis(axes: dict[str, int], layout: Layout, per_node: int) -> str | None:
    """The axis whose groups are outlined: the innermost split one, where whole groups fill a node or reach over it."""
    stride = 1
    for axis in reversed(MESH_AXES):
        if axis not in axes:
            continue
        whole = per_node % (stride * axes[axis]) == 0 and stride * axes[axis] <= per_node
        if axis == "tp" or (whole and layout.world_size > axes[axis]):
            return axis
        stride *= axes[axis]
    return None


# -- ranks ---------------------------------------------------------------------------------------------------------


def _place(layout: Layout, rank: int, axes: Iterable[str]) -> dict[str, int]:
    place = coordinates(layout, rank)
    place[EXPERT_AXIS] = rank % layout.ep  # ep is the innermost axis of the experts' own factorisation
    return {axis: place[axis] for axis in axes}


def cells_of(layout: Layout, axes: Iterable[str], per_node: int, node: int) -> tuple[Cell, ...]:
    """The GPUs of one node; the last node may have fewer ranks than GPUs."""
    ranks = range(node * per_node, min((node + 1) * per_node, layout.world_size))
    return tuple(Cell(rank, _place(layout, rank, axes)) for rank in ranks)


def outlined(cells: tuple[Cell, ...], axis: str | None) -> list[list[int]]:
    """Places on a node that belong to one group of the axis: neighbours that differ on it, and as experts, alone."""
    runs: list[list[int]] = []
    last: dict[str, int] | None = None
    for place, cell in enumerate(cells if axis else ()):
        key = {name: at for name, at in cell.place.items() if name not in (axis, EXPERT_AXIS)}
        if key == last:
            runs[-1].append(place)
        else:
            runs.append([place])
        last = key
    return runs


def _patterns(layout: Layout, axes: dict[str, int], per_node: int) -> tuple[Pattern, ...]:
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = {}
    firsts: dict[int, tuple[Cell, ...]] = {}
    spreads: dict[int, dict[str, tuple[int, int]]] = {}
    for node in range(int(ceil_div(layout.world_size, per_node))):
        cells = cells_of(layout, axes, per_node, node)
        base = cells[0].place
        key = tuple(tuple(cell.place[axis] - base[axis] for axis in axes) for cell in cells)
        example = alike.setdefault(key, [node])[0]
        if example == node:
            firsts[node], spreads[node] = cells, {}
        else:
            alike[key].append(node)
        for axis in axes:
            here = [cell.place[axis] for cell in cells]
            low, high = spreads[example].get(axis, (here[0], here[0]))
            spreads[example][axis] = (min(low, *here), max(high, *here))
    return tuple(Pattern(ranges(nodes), len(nodes), firsts[nodes[0]], spreads[nodes[0]]) for nodes in alike.values())


def ranges(numbers: Iterable[int]) -> Ranges:
    """Ascending whole numbers as runs."""
    runs: list[tuple[int, int]] = []
    for number in numbers:
        if runs and runs[-1][1] == number - 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return tuple(runs)


def _group(layout: Layout, axis: str, per_node: int) -> AxisGroups:
    groups = axis_groups(layout, axis)
    nodes = max(len({node_of(rank, per_node)[0] for rank in group}) for group in groups)
    return AxisGroups(axis, len(groups[0]), len(groups), tuple(groups[0]), nodes)


def _stages(plan: Plan) -> tuple[StagePlacement, ...]:
    layout, count = plan.layout, plan.layout.pp
    ranks, per_node = layout.world_size // count, plan.cluster.gpus_per_node
    runs: list[list[tuple[int, int]]] = [[] for _ in range(count)]
    first = 0
    # Virtual stages go round the pipeline: chunk c is on stage c modulo the stages.
    for chunk, layers in enumerate(layout.layers_by_stage(plan.model.layers)):
        if layers:
            runs[chunk % count].append((first, first + layers - 1))
        first += layers
    stages = []
    for stage in range(count):
        start, end = stage * ranks, (stage + 1) * ranks - 1
        stages.append(
            StagePlacement(
                stage=stage,
                layers=tuple(runs[stage]),
                embedding=stage == 0,
                head=stage == count - 1,
                ranks=(start, end),
                nodes=(node_of(start, per_node)[0], node_of(end, per_node)[0]),
            )
        )
    return tuple(stages)


# -- links ---------------------------------------------------------------------------------------------------------


def _sent(plan: Plan) -> list[Traffic] | None:
    """The prediction's collectives with what leaves each domain; None where nothing was predicted."""
    calls = plan.prediction.collectives
    if not calls and not plan.prediction.memory:
        return None
    known = WIRE[transport_of(plan.cluster.gpu.kind)]
    for call in calls:
        if call.op not in known or call.group not in SENDING_AXES:
            rule = "is not a collective that this version knows"
            raise PlannerError("plan: prediction.collectives", f"{call.op}/{call.group}", rule, "Make the plan again")
    case = Case.of(plan)
    once = tokens_once(plan.layout, plan.model.moe)
    told = [
        Call(
            call.op,
            call.group,
            call.unit,
            call.phase,
            call.count,
            call.payload_bytes,
            call.overlappable,
            once if call.group == "ep" else None,
        )
        for call in calls
        if axis_size(plan.layout, call.group) > 1
    ]
    return traffic(case, told)


def _loads(sent: list[Traffic]) -> tuple[AxisTraffic, ...]:
    loads = []
    for axis in SENDING_AXES:
        some = [one for one in sent if one.axis == axis]
        if some:
            ops = tuple(dict.fromkeys(one.op for one in some))
            # What leaves the domain is a part of what a rank sends (comm.py): the rest stays inside.
            inside = float(sum(one.wire_bytes - one.inter_bytes for one in some))
            loads.append(AxisTraffic(axis, ops, inside, float(sum(one.inter_bytes for one in some))))
    return tuple(loads)


def _domain(cluster: Cluster) -> str:
    """What `inter_bytes` leave: the innermost level that holds a node."""
    return next(tier.name for tier in cluster.levels if tier.gpus >= min(cluster.gpus_per_node, cluster.gpus))


def _tiers(plan: Plan, sent: list[Traffic] | None) -> tuple[NetworkLevel, ...]:
    """Each level carries what leaves the level inside it and not the level itself."""
    tiers = []
    for place, level in enumerate(plan.cluster.levels):
        carried = None
        if sent is not None:
            into = [one.wire_bytes if place == 0 else one.leaving[place - 1] for one in sent]
            out = [one.leaving[place] if place < len(one.leaving) else 0.0 for one in sent]
            carried = float(sum(into) - sum(out))
        link = level.link
        tiers.append(
            NetworkLevel(
                for_terminal(level.name), level.gpus, for_terminal(link.name), link.bytes_per_s_per_direction, carried
            )
        )
    return tuple(tiers)
