"""Conditions of published runs, which took or spared what an answer to a user never assumes.

Works on one layout and on columns. Not here: which runs had conditions (tests/truth/published), or what a host takes to
start operations (passes.py).
"""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from planner.basics.arith import Number, where
from planner.basics.formula import formula
from planner.figures.comm import Traffic
from planner.spec.calibration import Coefficients


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What the runs of one source had beside what is counted of every run. The defaults are nothing.

    Each collective inside a pass takes the host `call_s` for each rank of its group, `crossing` times that where the
    group leaves the node; a bucket of gradients takes `bucket_share` of it. For each neighbouring stage a pass waits
    `poll_s` in each of `forward_polls` or `backward_polls` loops that ask whether a send is done.

    Products took `product_times` as long as the kernels that were measured elsewhere, attention `attention_times`.
    Products with rows that are no multiple of 16 bytes ran at `unaligned_share` of the device's fp32 rate; 0: as fast
    as others. `exchanges_beside`:
    experts' exchanges of one micro-batch ran beside the other pass of another (Megatron-Core's
    overlap_moe_expert_parallel_comm). `blocking`: the host waited for each operation before it started the next
    (CUDA_LAUNCH_BLOCKING=1). `parted_sends`: each rank of a tensor group sent its part of a stage's result, and the
    next stage's ranks gathered the rest (DeepSpeed's pipe_partitioned and grad_partitioned). `layers_graphed`: each
    layer ran as one CUDA graph, whose operations no host starts one by one; mixtures can where tokens beyond a fixed
    capacity are dropped. `sent_alone`: no collective ran beside compute, neither of gradients nor of tensor groups.
    """

    call_s: float = 0.0
    crossing: float = 1.0
    bucket_share: float = 0.0
    poll_s: float = 0.0
    forward_polls: int = 0
    backward_polls: int = 0
    product_times: float = 1.0
    attention_times: float = 1.0
    unaligned_share: float = 0.0
    exchanges_beside: bool = False
    blocking: bool = False
    parted_sends: bool = False
    layers_graphed: bool = False
    sent_alone: bool = False


NONE = Conditions()
"""Of every answer to a user."""


@formula(unit="s", source="read off the times of nanotron's published sweep: in proportion to the group's ranks")
def calling_seconds(calls: Number, ranks: Number, call_s: Number) -> Number:
    """Seconds that the host takes for collectives of a group; a group of one has none."""
    return calls * where(ranks > 1, ranks, 0) * call_s


@formula(
    unit="s", source="nanotron 67c5ebb6, parallel/pipeline_parallel/p2p.py: asks in a loop, with 0.1 s of sleep between"
)
def polling_seconds(neighbours: Number, polls: Number, poll_s: Number) -> Number:
    """Seconds that one pass of a stage waits in loops that ask whether sends to its neighbours are done."""
    return neighbours * polls * poll_s


def call_seconds(call: Traffic, conditions: Conditions) -> Number:
    """Seconds that the host takes for all calls of one kind inside passes."""
    return calling_seconds(
        call.count, call.ranks, conditions.call_s * where(call.inter_bytes > 0, conditions.crossing, 1.0)
    )


def slowed(known: Coefficients, conditions: Conditions) -> Coefficients:
    """Coefficients with products that take `product_times` as long and attention `attention_times`, and with nothing
    hidden of what was sent alone."""
    if conditions.sent_alone:
        known = replace(known, overlap=replace(known.overlap, hidden_share=0.0))
    products, attention = conditions.product_times, conditions.attention_times
    if products == attention == 1.0:
        return known
    compute = known.compute
    paced = replace(compute, pace=compute.pace * products, attention_pace=compute.attention_pace * attention / products)
    return replace(known, compute=paced)


def bucket_seconds(call: Traffic, conditions: Conditions) -> Number:
    """Seconds that calls beside the passes are longer: none but of buckets of gradients."""
    return (
        conditions.bucket_share * call_seconds(call, conditions) if conditions.call_s and call.unit == "bucket" else 0.0
    )


def polls_of(conditions: Conditions, stages: int, stage: int) -> tuple[float, float]:
    """Seconds that a forward and a backward pass of one stage (0-based) wait for sends."""
    neighbours = (stage > 0) + (stage < stages - 1)
    forward_s, backward_s = (
        float(polling_seconds(neighbours, polls, conditions.poll_s))
        for polls in (conditions.forward_polls, conditions.backward_polls)
    )
    return forward_s, backward_s
