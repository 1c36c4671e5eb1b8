"""Seconds of collectives: bytes and messages over each tier of the network, each link by its own curve.

The alpha-beta model, with its numbers from the calibration. That the measured bandwidth of a collective falls with the
number of nodes follows from the steps of its ring, not from a further coefficient. Works on one layout and on columns.
Not here: which bytes cross which tier (comm.py), or what communication hides beside (steptime.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.basics.arith import Number, maximum, where
from planner.basics.formula import formula
from planner.figures.comm import Traffic
from planner.parallelism.collectives import CHAINED, NEIGHBOURLY
from planner.spec import Tier
from planner.spec.calibration import Coefficients, LinkCurve

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
