"""What ranks send each other, timed: collectives by size, over ranks of one node and over nodes, and their overlap.

Not here: what one rank computes (probe_compute.py), or bytes on the wire (planner.collectives).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from executor.worker.probe import Bench

PAYLOADS = tuple(4096 * 4**power for power in range(9))
"""Bytes: 4 KB to 256 MB."""
EACH_S = 0.1
LONGEST_S = 0.05
OVERLAPPED_BYTES = 16 * 2**20

Rows = list[dict[str, Any]]


def link_tables(bench: Bench) -> dict[str, Rows]:
    """Tables of calls between ranks; empty for one rank alone."""
    exchanges: Rows = []
    overlaps: Rows = []
    world = list(range(dist.get_world_size()))
    for ranks in groups(bench.task.nodes, bench.task.ranks_per_node):
        nodes = 1 + ranks[-1] // bench.task.ranks_per_node - ranks[0] // bench.task.ranks_per_node
        group = dist.group.WORLD if ranks == world else dist.new_group(ranks)
        for op in ("all_reduce", "all_gather", "reduce_scatter", "send"):
            exchanges += _exchanges(bench, op, ranks, nodes, group)
        if ranks == world:
            overlaps = _overlaps(bench, nodes)
    return {"exchanges": exchanges, "overlaps": overlaps}


def groups(nodes: int, ranks_per_node: int) -> list[list[int]]:
    """Ranks of the groups to time: 2, 4, ... of the first node, the whole node, one rank of each node, all ranks."""
    sizes = sorted({2**power for power in range(1, 8) if 2**power < ranks_per_node} | {ranks_per_node})
    found = [list(range(size)) for size in sizes]
    if nodes > 1:
        found += [[node * ranks_per_node for node in range(nodes)], list(range(nodes * ranks_per_node))]
    distinct = [ranks for place, ranks in enumerate(found) if ranks not in found[:place]]
    return [ranks for ranks in distinct if len(ranks) > 1]


def _exchanges(bench: Bench, op: str, ranks: list[int], nodes: int, group: Any) -> Rows:
    """One operation over one group, larger and larger. Ranks outside the group wait, but take part in agreeing."""
    rows: Rows = []
    for payload in PAYLOADS[:3] if bench.task.quick else PAYLOADS:
        elements = payload // 4 // len(ranks) * len(ranks)
        call = _call(bench, op, ranks, elements, group) if dist.get_rank() in ranks else _nothing
        seconds = bench.slowest(call, EACH_S)
        rows.append({"op": op, "ranks": len(ranks), "nodes": nodes, "payload_bytes": 4.0 * elements})
        rows[-1]["seconds"] = seconds
        if seconds > LONGEST_S or bench.spent() > 1:
            break
    return rows


def _call(bench: Bench, op: str, ranks: list[int], elements: int, group: Any) -> Callable[[], Any]:
    whole = torch.ones(elements, device=bench.device)
    if op == "all_reduce":
        whole.zero_()  # summed again and again
        return lambda: dist.all_reduce(whole, group=group)
    if op == "send":
        return _handed_over(whole, ranks, group)
    part = torch.ones(elements // len(ranks), device=bench.device)
    # torch 2.13 gave both a new name, and warns at each use of the old one.
    if op == "all_gather":
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return lambda: gather(whole, part, group=group)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return lambda: scatter(part, whole, group=group)


def _handed_over(whole: torch.Tensor, ranks: list[int], group: Any) -> Callable[[], Any]:
    """The first rank to the last: over the widest border that the group crosses."""
    first, last, here = ranks[0], ranks[-1], dist.get_rank()
    if here == first:
        return lambda: dist.send(whole, last, group=group)
    if here == last:
        return lambda: dist.recv(whole, first, group=group)
    return _nothing


def _nothing() -> None:
    return None


def _overlaps(bench: Bench, nodes: int) -> Rows:
    """An all-reduce and matrix products that take about as long, apart and together."""
    sent = torch.zeros(OVERLAPPED_BYTES // 4, device=bench.device)
    width = 256 if bench.device.type == "cpu" else 4096
    x = torch.randn(width, width, device=bench.device, dtype=torch.float32)

    def communicate() -> None:
        dist.all_reduce(sent)

    comm_s = bench.slowest(communicate)
    each_s = bench.seconds(lambda: x @ x)
    count = max(1, round(comm_s / each_s))

    def compute() -> None:
        for _ in range(count):
            x @ x

    def both() -> None:
        work = dist.all_reduce(sent, async_op=True)
        compute()
        assert work is not None
        work.wait()

    row = {"ranks": dist.get_world_size(), "nodes": nodes, "payload_bytes": float(OVERLAPPED_BYTES)}
    return [row | {"compute_s": bench.slowest(compute), "comm_s": comm_s, "both_s": bench.slowest(both)}]
