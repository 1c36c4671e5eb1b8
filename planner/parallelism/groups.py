"""The rank map: which node and local rank each rank is, and which ranks form which group.

Ranks are laid out row-major over the dense mesh pp, dp_replicate, dp_shard, cp, tp (outermost first), as PyTorch's
init_device_mesh does. Experts see the same ranks as pp, dp_replicate, edp, ep: ep takes neighbours among the
dp_shard x cp x tp ranks, and edp (those that hold the same experts) is what is left of them. Sharded states are split
over dp_shard and cp together, the axis dp_shard_cp; ZeRO++'s second copies over dp_secondary, neighbours in dp_shard;
dp is dp_replicate and dp_shard together.
pp_ends is the first and the last stage of a pipeline, which share a tied table.
Not here: bytes or time of a group (comm.py).
"""

from __future__ import annotations

from itertools import product
from math import prod
from typing import Any

from planner.basics.arith import Number, floor_div, is_column, where
from planner.spec import Layout

MESH_AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")
EXPERT_AXES = ("pp", "dp_replicate", "edp", "ep")


def mesh_sizes(layout: Layout) -> dict[str, int]:
    """Size of each axis of the dense mesh, outermost first."""
    return {axis: getattr(layout, axis) for axis in MESH_AXES}


def expert_mesh_sizes(layout: Layout) -> dict[str, int]:
    """Size of each axis of the expert mesh, outermost first. `ep` must divide dp_shard x cp x tp (a rule)."""
    edp: Any = floor_div(layout.dp_shard * layout.cp * layout.tp, layout.ep)
    return {"pp": layout.pp, "dp_replicate": layout.dp_replicate, "edp": edp, "ep": layout.ep}


def mesh_of(layout: Layout, axis: str) -> dict[str, int]:
    """Sizes of the mesh that has this axis: the dense one where it does."""
    if axis in MESH_AXES:
        return mesh_sizes(layout)
    if axis == "dp_shard_cp":
        shards = layout.dp_shard * layout.cp
        return {"pp": layout.pp, "dp_replicate": layout.dp_replicate, axis: shards, "tp": layout.tp}
    if axis == "dp":
        copies = layout.dp_replicate * layout.dp_shard
        return {"pp": layout.pp, axis: copies, "cp": layout.cp, "tp": layout.tp}
    if axis == "dp_secondary":
        dense, copy = mesh_sizes(layout), max(layout.zero_secondary_shard, 1)
        outer = {"pp": dense["pp"], "dp_replicate": dense["dp_replicate"], "copies": dense["dp_shard"] // copy}
        return outer | {axis: copy, "cp": dense["cp"], "tp": dense["tp"]}
    if axis == "pp_ends":
        return {axis: 2, "between": layout.pp - 1} | {name: getattr(layout, name) for name in MESH_AXES[1:]}
    return expert_mesh_sizes(layout)


def axis_size(layout: Layout, axis: str) -> Number:
    """Ranks of one group of this axis: a number, or a column.

    In columns some rows may not split experts (ep=1): theirs are sharded with everything else, over dp_shard and cp.
    """
    if axis == "pp_ends":
        return 2 - (layout.pp == 1)
    size: Number = mesh_of(layout, axis)[axis]
    return where(layout.ep > 1, size, layout.state_shards) if axis == "edp" and is_column(layout.ep) else size


def axis_stride(layout: Layout, axis: str) -> Number:
    """Distance in rank order between neighbours of a group: the product of the axes inside it."""
    if axis == "edp" and is_column(layout.ep):
        return where(layout.ep > 1, layout.ep, layout.tp)
    sizes = mesh_of(layout, axis)
    names = list(sizes)
    return prod(sizes[name] for name in names[names.index(axis) + 1 :])


def coordinates(layout: Layout, rank: int) -> dict[str, int]:
    """Where a rank stands on every axis of the dense mesh."""
    place: dict[str, int] = {}
    for axis, size in reversed(mesh_sizes(layout).items()):
        rank, place[axis] = divmod(rank, size)
    return {axis: place[axis] for axis in MESH_AXES}


def axis_groups(layout: Layout, axis: str) -> list[list[int]]:
    """The ranks that differ only in their place on `axis`, one list a group, in rank order."""
    sizes = mesh_of(layout, axis)
    stride = int(axis_stride(layout, axis))
    others = [range(1) if name in (axis, "between") else range(size) for name, size in sizes.items()]
    firsts = []
    for place in product(*others):
        rank = 0
        for size, index in zip(sizes.values(), place, strict=True):
            rank = rank * size + index
        firsts.append(rank)
    return [[first + stride * index for index in range(sizes[axis])] for first in sorted(firsts)]


def node_of(rank: int, gpus_per_node: int) -> tuple[int, int]:
    """(node, local rank) of a rank, nodes filled one after the other."""
    return divmod(rank, gpus_per_node)


def spans_nodes(layout: Layout, axis: str, gpus_per_node: int) -> bool:
    """Whether any group of this axis crosses a node border."""
    return any(len({node_of(rank, gpus_per_node)[0] for rank in group}) > 1 for group in axis_groups(layout, axis))
