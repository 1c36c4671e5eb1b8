"""Expert parallelism: each rank holds some of the experts, and tokens travel to theirs and back.

Uses the second factorisation of the ranks: ep spans dp_shard x cp x tp, and the ranks with equal experts (edp) shard
their states among themselves (Rajbhandari et al. 2022, DeepSpeed-MoE; Megatron-Core's parallel folding). Not here:
routing and what experts keep for backward (inventory/).
"""

from __future__ import annotations

from msgspec.structs import replace

from planner.basics.arith import Number, maximum
from planner.basics.formula import formula
from planner.parallelism.collectives import Call, TokenRouting, ideal_call
from planner.spec import Layout, Moe

DISPATCH = "GShard, Lepikhin et al. 2020: every token is sent to top_k experts; balanced routing"


@formula(unit="bytes", source=DISPATCH)
def dispatched_bytes(tokens: Number, hidden: Number, top_k: Number, element_bytes: Number) -> Number:
    """Copies of a rank's tokens on their way to experts, in one layer."""
    return tokens * top_k * hidden * element_bytes


@formula(
    unit="fraction",
    source="hypergeometric distribution: different experts of a balanced router, equally many in each part",
)
def missed_again(parts: Number, chosen: Number, experts: Number) -> Number:
    """Chance that a token's next expert is in another part than the chosen experts before it have missed."""
    return maximum(experts - experts / parts - chosen, 0) / (experts - chosen)


def parts_reached(parts: Number, routed: TokenRouting) -> Number:
    """Parts of the experts, on average, that have some of one token's."""
    missed: Number = 1.0
    for chosen in range(routed.top_k):
        missed = missed * missed_again(parts, chosen, routed.experts)
    return parts * (1 - missed)


def sent_once(parts: Number, routed: TokenRouting) -> Number:
    """Share of the copies of tokens that are sent where each part gets a token once, whichever of its experts want it
    (DeepEP, README.md: dispatch to ranks over NVLink, to nodes over RDMA)."""
    return parts_reached(parts, routed) / routed.top_k


def tokens_once(layout: Layout, moe: Moe | None) -> TokenRouting | None:
    """How tokens are dealt to experts where the dispatcher sends each once to a receiver; None where it sends every
    copy (NCCL's all-to-all)."""
    if moe is None or layout.token_dispatcher == "alltoall":
        return None
    return TokenRouting(moe.top_k, moe.experts)


def layer_collectives(
    dispatched: Number, layers: Number, *, recomputes: bool, once: TokenRouting | None = None
) -> list[Call]:
    """Dispatch and combine of `layers` mixture layers for one micro-batch, and the same in backward."""
    times = 2 if recomputes else 1
    op = "all_to_all" if once is None else "dispatch"
    made = [
        ideal_call(op, "ep", "forward", 2 * layers * dispatched, 2 * layers),
        ideal_call(op, "ep", "backward", 2 * layers * dispatched * times, 2 * layers * times),
    ]
    return [replace(one, once=once) for one in made]
