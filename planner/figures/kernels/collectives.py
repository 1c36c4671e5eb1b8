"""Seconds of collectives by curve: inside a node or NVLink domain three protocols of which the fastest holds, across
nodes rings and trees over the network cards that a node's ranks share.

Not here: which collectives a layout has (comm.py), or the curves of links that calibrations know (comm.py).
"""

from __future__ import annotations

from planner.basics.arith import Number, ceil_div, maximum, minimum, where
from planner.basics.formula import formula
from planner.spec.kernel_times import CollectiveTimes

ROUNDS = {"all_reduce": 2}
"""Times that the bytes go round: once to add up, once to spread."""
REDUCED_IN_SWITCH = ("all_reduce",)


def rounds_of(op: str) -> int:
    """How often a collective's bytes go round."""
    return ROUNDS.get(op, 1)


@formula(unit="bytes", source="a ring sends all but a rank's own part, an all-reduce twice (NCCL, doc/PERFORMANCE.md)")
def ring_bytes(op: str, whole_bytes: Number, ranks: Number) -> Number:
    """What each rank sends of a buffer of `whole_bytes`."""
    return rounds_of(op) * whole_bytes * (ranks - 1) / ranks


@formula(unit="s", source="a line for each protocol of NCCL (LL, LL128, Simple), fitted: presets/kernel_times")
def protocol_seconds(step_s: Number, steps: Number, wire_s: Number, pieces: Number) -> Number:
    """Steps, bytes, and what filling the pipeline costs when both are cut into the best pieces (the root of both)."""
    return steps * step_s + wire_s + 2 * pieces * (steps * step_s * wire_s) ** 0.5


@formula(unit="s", source="the fastest of three protocols (NCCL's tuning model, src/graph/tuning.cc)")
def domain_seconds(
    op: str, whole_bytes: Number, ranks: Number, link_bytes_per_s: Number, one: CollectiveTimes
) -> Number:
    """One collective among ranks of one node or NVLink domain; a buffer as NCCL's tests count it."""
    steps = (rounds_of(op) * maximum(ranks - 1, 1)) ** one.step_growth
    wire_s = ring_bytes(op, whole_bytes, ranks) / (link_bytes_per_s * (ranks / 4) ** one.width_growth)
    fast_s = protocol_seconds(one.ll_s, steps, wire_s / one.ll_share, 0.0)
    wide_s = protocol_seconds(one.ll128_s, steps, wire_s / one.ll128_share, 0.0)
    long_s = protocol_seconds(one.simple_s, steps, wire_s / one.simple_share, one.pieces)
    return where(ranks > 1, one.launch_s + minimum(fast_s, minimum(wide_s, long_s)), 0.0)


@formula(unit="steps", source="binary trees over nodes, up and down (NCCL 2.4), or a ring round all ranks")
def node_steps(op: str, nodes: Number, ranks_per_node: Number, tree: bool) -> Number:
    """Steps that follow each other, at the pace of the hop between nodes."""
    if tree:
        return rounds_of(op) * log2_up(nodes)
    return rounds_of(op) * (nodes * ranks_per_node - 1)


def log2_up(value: Number) -> Number:
    """Depth of a binary tree over a number of nodes."""
    depth: Number = 0.0 * value
    reach: Number = 1.0 + 0.0 * value
    for _ in range(24):
        depth = depth + where(reach < value, 1.0, 0.0)
        reach = 2 * reach
    return depth


@formula(
    unit="s",
    source="two levels: inside a node at its curve, between nodes by cards that ranks share, rings or trees (NCCL), "
    "half the bytes where switches add up (SHARP), as slow as the narrowest tier",
)
def across_seconds(
    op: str,
    whole_bytes: Number,
    nodes: Number,
    ranks_per_node: Number,
    inside_s: Number,
    node_bytes_per_s: Number,
    hop_s: Number,
    oversubscription: Number = 1.0,
    in_switch: bool = False,
) -> Number:
    """One collective over whole nodes, whose cards together carry `node_bytes_per_s` in one direction.

    `inside_s` is the same collective among a node's ranks. Of an all-reduce rings or trees, whichever is faster; where
    switches add up, a node sends its part once and one hop up and down is all.
    """
    sent = ring_bytes(op, whole_bytes, nodes)
    if op == "alltoall":
        # Each rank's own part for every rank of other nodes leaves: all but what stays in the node.
        sent = whole_bytes * ranks_per_node * (nodes - 1) / nodes
    rate = node_bytes_per_s / maximum(oversubscription, 1.0)
    slowest_s = maximum(inside_s, sent / rate)
    ring_s = slowest_s + node_steps(op, nodes, ranks_per_node, False) * hop_s
    if op not in REDUCED_IN_SWITCH:
        return where(nodes > 1, ring_s, inside_s)
    if in_switch:
        return where(nodes > 1, maximum(inside_s, whole_bytes / rate) + 2 * hop_s, inside_s)
    tree_s = slowest_s + node_steps(op, nodes, ranks_per_node, True) * hop_s
    return where(nodes > 1, minimum(ring_s, tree_s), inside_s)


@formula(unit="bytes/s", source="definition: cards of a node that its ranks use together")
def shared_cards_rate(ranks_per_node: Number, cards: Number, card_bytes_per_s: Number, gpus_per_node: Number) -> Number:
    """What the cards of the ranks in use carry.

    GPUs and cards stand beside each other, several to a card or a card to several.
    """
    used = minimum(cards, ceil_div(ranks_per_node * cards, gpus_per_node))
    return used * card_bytes_per_s
