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
from planner.parallelism.case import Case, axis_size, axis_stride
from planner.parallelism.collectives import CHAINED, NEIGHBOURLY, PAIRWISE, WIRE, transport_of
from planner.parallelism.expert import sent_once
from planner.spec import Cluster, Link, Tier
from planner.spec.calibration import Coefficients, LinkCurve
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


# -- Seconds of collectives --------------------------------------------------------------------------------------------

ROUNDS = {"all_reduce": 2}
"""Times a ring is gone round: once to sum, once to spread."""


@formula(unit="bytes/s", source="a link's datasheet rate, times the share that large messages were measured to reach")
def link_rate(bytes_per_s: Number, share: Number) -> Number:
    """What one rank's share of a link carries of large messages."""
    return bytes_per_s * share


@formula(unit="s", source="S/(S + S_half) of the rate for a message of S bytes: S_half more bytes at the full rate")
def sending_seconds(sent_bytes: Number, messages: Number, half_bytes: Number, bytes_per_s: Number) -> Number:
    """Seconds to send `sent_bytes` in a number of messages, where a message of `half_bytes` reaches half the rate."""
    return (sent_bytes + messages * half_bytes) / bytes_per_s


@formula(
    unit="s", source="ring algorithms (Thakur, Rabenseifner, Gropp 2005): n-1 steps, each as slow as the slowest link"
)
def step_seconds(calls: Number, rounds: Number, ranks: Number, latency_s: Number) -> Number:
    """What a ring's steps take beside the bytes: all ranks send at once, then all wait for the slowest link.

    With equal messages the time grows with the group, so the bandwidth seen falls with it: 36 us a step describe the
    all-gathers of nccl_bandwidth's H100 cluster from 2 to 64 nodes. Trees make fewer steps; NCCL takes them for small
    all-reduces, for which this is too long.
    """
    return calls * rounds * (ranks - 1) * latency_s


@formula(unit="s", source="pipelined chain: the last rank begins when what was sent first has passed all others")
def chain_seconds(calls: Number, hops: Number, latency_s: Number) -> Number:
    """What a chain's hops of one tier take beside the bytes: one after the other, at that tier's latency.

    NCCL broadcasts along the ring and by no other algorithm (src/enqueue.cc, topoGetAlgoInfo); its last rank waits for
    every hop, where ranks of an all-gather all send in every step.
    """
    return calls * hops * latency_s


def collective_seconds(one: Traffic, levels: Sequence[Tier], known: Coefficients) -> Number:
    """Seconds for all calls of one kind."""
    return tier_seconds(one, levels, [known.curve(tier.link.name, one.op) for tier in levels])


@formula(unit="s", source="alpha-beta model (Hockney 1994); pipelined rings are as slow as their slowest tier")
def tier_seconds(one: Traffic, levels: Sequence[Tier], curves: Sequence[LinkCurve]) -> Number:
    """Seconds for all calls of one kind: bytes and messages on the slowest tier, and steps at the pace of the widest.

    A send is one step, over the widest tier that its group crosses.
    """
    inside, sent = [*one.inside, one.ranks], [one.wire_bytes, *one.leaving]
    latency_s: Number = 0.0
    slowest_s: Number = 0.0
    chained, hops = one.op in CHAINED, list[tuple[Number, float]]()
    for place, (tier, curve) in enumerate(zip(levels, curves, strict=True)):
        within = inside[place - 1] if place else 1
        crossed = inside[place] > within
        rate = link_rate(tier.link.bytes_per_s_per_direction, curve.share)
        here_s = sending_seconds(sent[place], one.count, curve.half_bytes, rate)
        slowest_s = maximum(slowest_s, where(crossed, here_s, 0.0))
        step_s = tier.link.latency_s if curve.latency_s is None else curve.latency_s
        latency_s = where(crossed, step_s, latency_s)
        if chained:
            hops.append((one.ranks / within - one.ranks / inside[place], step_s))
    if one.op in NEIGHBOURLY:
        return slowest_s + one.count * latency_s
    if chained:
        return sum((chain_seconds(one.count, *hop) for hop in hops), start=slowest_s)
    return slowest_s + step_seconds(one.count, ROUNDS.get(one.op, 1), one.ranks, latency_s)
