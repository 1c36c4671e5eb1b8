"""Communication between ranks, timed: collectives by size, over ranks of one node and over nodes, and their overlap.

Not here: what one rank computes (compute.py), or bytes on the wire (planner.parallelism.collectives).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from executor.worker.probe.bench import Bench, ProbeRows

PAYLOADS = tuple(4096 * 4**power for power in range(9))
"""Bytes: 4 KB to 256 MB."""
FEW = PAYLOADS[1:6:2]
"""For a quick probe. The largest, 4 MB, is sent at the network's rate: what limits a network lets a burst of some
100 KB pass first."""
EACH_S = 0.1
LONGEST_S = 0.25
"""A call that takes longer is the last of its kind; a slow network still carries some megabytes, as in a step."""
OVERLAPPED_BYTES = 16 * 2**20


def link_tables(bench: Bench) -> dict[str, ProbeRows]:
    """Tables of calls between ranks; empty for one rank alone."""
    exchanges: ProbeRows = []
    overlaps: ProbeRows = []
    each, here = bench.task.ranks_per_node, dist.get_rank()
    for parts in partitions(bench.task.nodes, each):
        made = [dist.group.WORLD if len(parts) == 1 else dist.new_group(ranks) for ranks in parts]
        ranks, group = next((ranks, group) for ranks, group in zip(parts, made, strict=True) if here in ranks)
        nodes = len({rank // each for rank in ranks})
        for op in ("all_reduce", "all_gather", "reduce_scatter", "send"):
            exchanges += _exchanges(bench, op, ranks, nodes, group)
        if len(parts) == 1:
            overlaps = _overlaps(bench, nodes)
    return {"exchanges": exchanges, "overlaps": overlaps}


def partitions(nodes: int, ranks_per_node: int) -> list[list[list[int]]]:
    """Ways to split all ranks into equal groups that call at the same time, as those of a training step do.

    Neighbours by 2, 4, ... up to a node; the ranks of one place on every node; all ranks.
    """
    world = list(range(nodes * ranks_per_node))
    sizes = [size for size in range(2, ranks_per_node + 1) if ranks_per_node % size == 0 and size & (size - 1) == 0]
    found = [[world[first : first + size] for first in world[::size]] for size in {*sizes, ranks_per_node}]
    found.sort(key=lambda parts: len(parts[0]))
    if nodes > 1:
        found += [[world[place::ranks_per_node] for place in range(ranks_per_node)], [world]]
    distinct = [parts for place, parts in enumerate(found) if parts not in found[:place]]
    return [parts for parts in distinct if len(parts[0]) > 1]


def _exchanges(bench: Bench, op: str, ranks: list[int], nodes: int, group: Any) -> ProbeRows:
    """One operation over this rank's group, larger and larger, while the other groups do the same."""
    rows: ProbeRows = []
    for payload in FEW if bench.task.quick else PAYLOADS:
        elements = payload // 4 // len(ranks) * len(ranks)
        seconds = bench.slowest(_call(bench, op, ranks, elements, group), EACH_S)
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
    # The result is new memory each time, as FSDP2 has it: on a CPU its pages come from the system. torch 2.13 gave both
    # calls a new name, and warns at each use of the old one.
    if op == "all_gather":
        gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
        return lambda: gather(torch.empty_like(whole), part, group=group)
    scatter = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
    return lambda: scatter(torch.empty_like(part), whole, group=group)


def _handed_over(whole: torch.Tensor, ranks: list[int], group: Any) -> Callable[[], Any]:
    """The first rank to the last: over the widest border that the group crosses."""
    first, last, here = ranks[0], ranks[-1], dist.get_rank()
    if here == first:
        return lambda: dist.send(whole, last, group=group)
    if here == last:
        return lambda: dist.recv(whole, first, group=group)
    return lambda: None


def _overlaps(bench: Bench, nodes: int) -> ProbeRows:
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
