"""Expert parallelism: each rank holds some of the experts, and tokens travel to theirs and back.

Uses the second factorisation of the ranks: ep spans dp_shard x cp x tp, and the ranks with equal experts (edp) shard
their states among themselves (Rajbhandari et al. 2022, DeepSpeed-MoE; Megatron-Core's parallel folding). Not here:
routing and what experts keep for backward (inventory/).
"""

from __future__ import annotations

from planner.basics.arith import Number
from planner.basics.formula import formula
from planner.parallelism.base import Call, ideal_call

DISPATCH = "GShard, Lepikhin et al. 2020: every token is sent to top_k experts; balanced routing"


@formula(unit="bytes", source=DISPATCH)
def dispatched_bytes(tokens: Number, hidden: Number, top_k: Number, element_bytes: Number) -> Number:
    """Copies of a rank's tokens on their way to experts, in one layer."""
    return tokens * top_k * hidden * element_bytes


def layer_collectives(dispatched: Number, layers: Number, *, recomputes: bool) -> list[Call]:
    """Dispatch and combine of `layers` mixture layers for one micro-batch, and the same in backward."""
    times = 2 if recomputes else 1
    return [
        ideal_call("all_to_all", "ep", "forward", 2 * layers * dispatched, 2 * layers),
        ideal_call("all_to_all", "ep", "backward", 2 * layers * dispatched * times, 2 * layers * times),
    ]
