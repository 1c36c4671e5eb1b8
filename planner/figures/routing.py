"""Memory traffic of tokens that are sent to experts: sorted, put back; and of biases of experts and clamped gates.

Works on one layout and on columns. Not here: the experts' products (kernels/), or bytes between ranks (comm.py).
"""

from __future__ import annotations

from planner.basics.arith import Number, where
from planner.basics.formula import formula
from planner.parallelism.case import Case
from planner.parallelism.expert import sent_once, tokens_once
from planner.spec import Moe

BIAS_BYTES = (28, 40)
"""Bytes a row's element that Megatron-Core moves for the bias of experts' second product, forward and backward.

It multiplies the bias by the probability and adds it in fp32, expert by expert, joins the parts and casts them back
(core/transformer/moe/experts.py, _apply_bias): 4 + 10 + 8 + 6; backward casts (6), joins the parts (4), casts to 16
bits (6), and makes and adds up the gradients of the bias and of the probability in fp32 (12 each)."""
CLAMP_BYTES = (16, 20)
"""Bytes for each element that the gate makes, of clamping both halves of its input before the fused kernel: two copies
and one that joins them; backward a masked copy and one that joins them (core/fusions/fused_bias_geglu.py)."""


@formula(unit="rows", source="definition: a token goes to k experts; sequence parallelism splits tokens first")
def routed_rows(tokens: Number, top_k: Number, split: Number) -> Number:
    """Rows that a rank's experts work on, with a balanced router."""
    return tokens * top_k / split


@formula(
    unit="bytes",
    source="Megatron-Core's token dispatcher with fused permutation (core/transformer/moe/token_dispatcher.py): sorted "
    "by expert, sorted again by the rank's experts after the exchange, and both undone; padded rows likewise",
)
def sorted_bytes(rows: Number, tokens: Number, row_bytes: Number, sorts: Number) -> Number:
    """Memory traffic of one pass: each sort reads and writes all rows; the first reads, the last writes tokens.

    The tokens are the rank's own, or those that it received where each comes once.
    """
    return (2 * sorts * rows - 2 * (rows - tokens)) * row_bytes


@formula(unit="bytes", source="Megatron-Core's operations on gpt-oss's experts, one by one (BIAS_BYTES, CLAMP_BYTES)")
def biased_bytes(rows: Number, hidden: Number, ffn: Number, bias_bytes: Number, clamp_bytes: Number) -> Number:
    """Memory traffic of one pass for the bias of experts' second product and for clamping their gates' input."""
    return rows * (hidden * bias_bytes + ffn * clamp_bytes)


def routed_bytes(case: Case, moe: Moe, element_bytes: float) -> tuple[Number, Number]:
    """Of one layer's forward and backward beside products and gates."""
    layout, hidden = case.layout, case.model.hidden
    split = _split(case)
    rows = routed_rows(case.tokens, moe.top_k, split)
    once = tokens_once(layout, moe)
    read = case.tokens / split if once is None else rows * sent_once(layout.ep, once)
    moved = sorted_bytes(rows, read, hidden * element_bytes, _sorts(case, moe))
    if not (moe.bias and layout.facts.starts_each_expert):
        return moved, moved
    beside = (
        biased_bytes(rows, hidden, moe.expert_ffn, bias, clamp)
        for bias, clamp in zip(BIAS_BYTES, CLAMP_BYTES, strict=True)
    )
    forward, backward = (moved + one for one in beside)
    return forward, backward


def _sorts(case: Case, moe: Moe) -> Number:
    """Times that one pass writes all rows in another order or place.

    NCCL's all-to-all wants them sorted by rank before it, and leaves them to be sorted by the rank's experts after it;
    DeepEP and HybridEP send tokens, which are sorted by expert once they are there (Megatron-Core,
    core/transformer/moe/token_dispatcher.py). In 8 and 4 bits each expert's rows are padded before its products and cut
    after them (experts.py, quantization_padding and quantization_unpadding), which HybridEP does as it sorts
    (moe_utils.py, skip_routed_expert_padding).
    """
    layout = case.layout
    sorts = 2 if layout.token_dispatcher != "alltoall" else where((layout.ep > 1) & (layout.ep < moe.experts), 4, 2)
    pads = case.job.narrows and layout.facts.starts_each_expert and layout.token_dispatcher != "hybridep"
    return sorts + 2 if pads else sorts


def gated_again_bytes(case: Case, moe: Moe, element_bytes: float) -> Number:
    """Of the gates of the experts' rows where they alone run again: `element_bytes` for each element that they make,
    and what clamping moves forward."""
    if "moe_act" not in case.layout.recompute_modules:
        return 0.0
    rows = routed_rows(case.tokens, moe.top_k, _split(case))
    clamp = CLAMP_BYTES[0] if moe.bias and case.layout.facts.starts_each_expert else 0
    return biased_bytes(rows, case.model.hidden, moe.expert_ffn, 0, element_bytes + clamp)


def _split(case: Case) -> Number:
    """Ranks of a tensor group that each send a part of the tokens."""
    return where(case.layout.ep > 1, case.layout.tp, 1) if case.layout.sequence_parallel else 1


def bias_operations(case: Case, moe: Moe) -> Number:
    """Operations that a forward starts to add the bias of the rank's experts' second product, of each one apart."""
    if not (moe.bias and case.layout.facts.starts_each_expert):
        return 0
    return 2 * moe.experts / case.layout.ep
