"""Every collective of one optimizer step with its group, link and wire bytes: what the engine sends beside the ideal.

Wire bytes are split over the network's tiers, of which there may be any number. Works on one layout and on columns
(`traffic`); `comm_volume` is the exact answer for one layout. Not here: which collectives an engine makes
(engines/), or how long they take (steptime.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from planner.basics.arith import Number, ceil_div, in_shape_of, maximum, minimum, remainder, where
from planner.basics.formula import formula
from planner.engines import engine_of
from planner.engines.base import Call
from planner.parallelism.case import Case
from planner.parallelism.collectives import NEIGHBOURLY, PAIRWISE, WIRE, transport_of
from planner.parallelism.expert import sent_once
from planner.parallelism.groups import axis_size, axis_stride
from planner.spec import Cluster, Link
from planner.spec.plan import Collective

HIERARCHY = "an all-reduce over domains is a reduce-scatter inside each, one of 1/g across, an all-gather inside"


class Traffic(Call, frozen=True, kw_only=True):
    """Calls of one kind in one step with what they send: numbers, or columns.

    `inside` and `leaving` have one entry for each of the cluster's levels but the last: how many ranks of a group share
    a domain, and how many of `wire_bytes` leave it. `inter_bytes` leave the node (the rack, where NVLink reaches over
    nodes); all a rank.
    """

    ranks: Number
    inside: tuple[Number, ...]
    wire_bytes: Number
    leaving: tuple[Number, ...]
    inter_bytes: Number


class CommVolume(msgspec.Struct, frozen=True):
    """One step's collectives of one rank, engine beside ideal. `all_reduce_bytes` is payload, the others are wire."""

    engine: tuple[Collective, ...]
    ideal: tuple[Collective, ...]
    all_reduce_bytes: float
    wire_bytes_per_rank: float
    inter_node_bytes_per_rank: float
    ideal_wire_bytes_per_rank: float


def crosses(ranks: Number, stride: Number, domain: int) -> Any:
    """Whether any group leaves its domain of `domain` ranks (a part of the cluster): in closed form, groups stay inside
    only when whole blocks of them fill each domain."""
    return (ranks > 1) & (remainder(domain, stride * ranks) != 0)


@formula(unit="ranks", source="ranks fill one domain after the other (groups.py)")
def ranks_inside(ranks: Number, stride: Number, domain: int) -> Number:
    """Ranks of one group that share a domain, on average over the domains it reaches."""
    reached = minimum(ranks, maximum(2, ceil_div(ranks * stride, domain)))
    return where(crosses(ranks, stride, domain), ranks / maximum(reached, 1), ranks)


@formula(unit="bytes", source=HIERARCHY)
def leaving_bytes(op: str, transport: str, payload_bytes: Number, ranks: Number, inside: Number) -> Number:
    """Bytes a rank sends out of its domain: the operation over domains, on the 1/g of the payload that is this rank's.

    Every rank of a domain sends its own part through its own share of the cards. What goes to single peers does not
    shrink by being gathered first: the share of the peers that are outside. A chain is as slow as the pair at a border.
    """
    if op in NEIGHBOURLY:
        return where(inside < ranks, WIRE[transport][op](payload_bytes, ranks), in_shape_of(payload_bytes))
    if op in PAIRWISE:
        return WIRE[transport][op](payload_bytes, ranks) * (ranks - inside) / maximum(ranks - 1, 1)
    sent: Number = WIRE[transport][op](payload_bytes / inside, ranks / inside)
    return sent


def traffic(case: Case, calls: Sequence[Call]) -> list[Traffic]:
    """Calls with their groups, tiers and bytes."""
    layout = case.layout
    domains = [tier.gpus for tier in case.cluster.levels[:-1]]
    reach: dict[str, tuple[Number, ...]] = {}
    found = []
    for call in calls:
        ranks = axis_size(layout, call.axis)
        if call.axis not in reach:
            stride = axis_stride(layout, call.axis)
            reach[call.axis] = tuple(ranks_inside(ranks, stride, domain) for domain in domains)
        found.append(sent_in(case.cluster, call, ranks, reach[call.axis]))
    return found


def sent_in(cluster: Cluster, call: Call, ranks: Number, inside: tuple[Number, ...]) -> Traffic:
    """A call with the bytes that each tier sees of a group, of which some ranks share a domain of each level."""
    transport = transport_of(cluster.gpu.kind)
    node = sum(tier.gpus < cluster.gpus_per_node for tier in cluster.levels[:-1])
    once = call.once

    def sent_to(parts: Number) -> Number:
        return call.payload_bytes if once is None else call.payload_bytes * sent_once(parts, once)

    wire_bytes = WIRE[transport][call.op](sent_to(ranks), ranks)
    leaving = tuple(leaving_bytes(call.op, transport, sent_to(ranks / one), ranks, one) for one in inside)
    return Traffic(
        **msgspec.structs.asdict(call),
        ranks=ranks,
        inside=inside,
        wire_bytes=wire_bytes,
        leaving=leaving,
        inter_bytes=leaving[node] if node < len(leaving) else in_shape_of(wire_bytes),
    )


def comm_volume(case: Case) -> CommVolume:
    """One layout's collectives (numbers, not columns). Groups of one rank send nothing and are left out."""
    engine = engine_of(case.layout.engine)
    sent = [one for one in traffic(case, engine.collectives(case)) if one.ranks > 1]
    ideal = [one for one in traffic(case, engine.ideal(case)) if one.ranks > 1]
    return CommVolume(
        engine=tuple(_collective(one, case.cluster) for one in sent),
        ideal=tuple(_collective(one, case.cluster) for one in ideal),
        all_reduce_bytes=float(sum(one.payload_bytes for one in sent if one.op == "all_reduce")),
        wire_bytes_per_rank=float(sum(one.wire_bytes for one in sent)),
        inter_node_bytes_per_rank=float(sum(one.inter_bytes for one in sent)),
        ideal_wire_bytes_per_rank=float(sum(one.wire_bytes for one in ideal)),
    )


def _collective(one: Traffic, cluster: Cluster) -> Collective:
    return Collective(
        op=one.op,
        group=one.axis,
        ranks=int(one.ranks),
        unit=one.unit,
        phase=one.phase,
        count=float(one.count),
        payload_bytes=float(one.payload_bytes),
        wire_bytes_per_rank=float(one.wire_bytes),
        link=_widest(one, cluster).name,
        overlappable=one.overlappable,
    )


def _widest(one: Traffic, cluster: Cluster) -> Link:
    """The link of the innermost tier that holds the whole group."""
    held = (tier.link for tier, inside in zip(cluster.levels, one.inside, strict=False) if inside == one.ranks)
    return next(held, cluster.levels[-1].link)
