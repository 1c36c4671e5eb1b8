"""What a layer of a family that is written by hand asks of a device beside its linear modules, by its kernels' names:
its element-wise operations, its attention, and the rows of its experts.

By hand are the kernels that measured rows name and that no model's own code has: fused ones, Megatron-Core's, attention
on scores in memory, and layers that tensor, sequence or expert ranks split. Works on one layout and on columns. Not
here: layers of other families (described.py), or linear modules (work.py).
"""

from __future__ import annotations

from planner.basics.arith import Number, ceil_div, where
from planner.basics.formula import formula
from planner.figures.beside import BACKWARD_OPERATIONS, Beside, element_bytes_of
from planner.figures.expertloop import loop_bytes, loop_operations
from planner.figures.flops import attention_flops
from planner.figures.unitkernels import SCORES, attention_kernels, scores_code
from planner.parallelism.case import Case
from planner.parallelism.expert import sent_once, tokens_once
from planner.spec import Kernels, Moe

NORM_BYTES = {"eager-fp32": (24, 4), "native": (8, 4), "fused": (4, 2)}
"""(fixed, times the element) bytes a norm moves for each element: eager code casts, squares and scales in fp32."""
ROTARY_ACCESSES = {"eager": 10, "joined": 12, "fused": 4}
GATE_ACCESSES = {"eager": 5, "fused": 3}

NORM_OPERATIONS = {"eager-fp32": 8, "native": 1, "fused": 1}
ROTARY_OPERATIONS = {"eager": 10, "joined": 12, "fused": 2}
GATE_OPERATIONS = {"eager": 2, "fused": 1, "fused-recomputed": 1}
CORE_OPERATIONS = dict.fromkeys(SCORES, 8)
RESIDUAL_OPERATIONS = 2
ROUTED_OPERATIONS, BIASED_OPERATIONS = 18, 10
"""Of Transformers' mixtures of experts: the router, rows sorted by expert and put back; gpt-oss's biases and clamps."""
LATENT_OPERATIONS = {"deepseek_v2": 9, "deepseek_v3": 31}
"""Of latent attention beside those of others, and of V3's groups of experts."""


def beside_by_hand(case: Case, unit: str) -> Beside:
    """A layer's work beside its linear modules."""
    model, tokens, layout = case.model, case.tokens, case.layout
    split = ceil_div(model.heads, layout.tp) / model.heads
    width = (model.qk_width + model.v_width) * split
    attention = attention_flops(tokens, model.attended(case.job.attention_span), width, 1)
    # Kernels under a mask, and products that make scores, compute the whole square, of which a causal one needs half.
    square = attention
    if case.masks_documents or scores_code(case):
        span = case.job.seq_len if case.masks_documents else case.job.attention_span
        square = attention_flops(tokens, 2 * span, width, 1)
    element, attended = element_bytes_of(case), attention_kernels(case, split)
    moe = model.moe if any(weight.expert for weight in case.units()[unit]) else None
    routed, returned = routed_bytes(case, moe, element) if moe else (0.0, 0.0)
    elementwise = _elementwise_bytes(case, unit, split)
    indexed, sliced = loop_bytes(case, unit, model.hidden * element)
    operations = _layer_operations(case) + (_expert_operations(case, moe) if moe else 0)
    return Beside(
        attention_flops=attention,
        masked_flops=square - attention,
        attention=attended.forward,
        attention_back=attended.backward,
        attention_bytes=attended.forward_bytes,
        attention_bytes_back=attended.backward_bytes,
        moved_bytes=elementwise + routed,
        moved_bytes_back=2 * elementwise + returned + indexed,
        moved_bytes_again=gated_again_bytes(case, moe, GATE_ACCESSES.get(case.parts.mlp, 3) * element) if moe else 0.0,
        fixed_bytes_back=sliced,
        operations=operations,
        operations_back=BACKWARD_OPERATIONS * operations,
    )


@formula(unit="bytes", source="operands of each element-wise kernel of the model code, read and written once")
def elementwise_layer_bytes(
    kernels: Kernels,
    tokens: Number,
    element_bytes: Number,
    norms: Number,
    turned: Number,
    gated: Number,
    residual: Number,
) -> Number:
    """Memory traffic of one layer's forward beside its matrix products; backward moves about twice as much.

    Widths are elements a token on this rank: all `norms` together, what rotary positions turn, what the MLP's
    activation makes, and the residual stream.
    """
    fixed, times = NORM_BYTES.get(kernels.norm, NORM_BYTES["fused"])
    moved = norms * (fixed + times * element_bytes)
    moved = moved + ROTARY_ACCESSES.get(kernels.rotary, 4) * element_bytes * turned
    moved = moved + GATE_ACCESSES.get(kernels.mlp, 3) * element_bytes * gated
    return tokens * (moved + 6 * element_bytes * residual)


def _layer_operations(case: Case) -> int:
    """Operations of one layer's forward beside its linear modules; views start nothing and are not counted."""
    parts, model = case.parts, case.model
    norms = model.layer_norms + (2 if model.block == "sandwich" else 0) + (2 if model.qk_norm else 0)
    each = NORM_OPERATIONS.get(parts.norm, 1)
    each -= 2 if each > 1 and case.job.precision == "fp32" else 0  # no casts to fp32 and back
    return (
        norms * each
        + (ROTARY_OPERATIONS.get(parts.rotary, 2) if model.rotary_dim else 0)
        + CORE_OPERATIONS.get(scores_code(case) or parts.attention, 1)
        + GATE_OPERATIONS.get(parts.mlp, 2)
        + RESIDUAL_OPERATIONS
        + (LATENT_OPERATIONS.get(model.family, 0) if parts.holds_inputs else 0)
    )


def _expert_operations(case: Case, moe: Moe) -> Number:
    routed = ROUTED_OPERATIONS + BIASED_OPERATIONS * moe.bias if case.parts.holds_inputs else 0
    return routed + bias_operations(case, moe) + loop_operations(case)


def _elementwise_bytes(case: Case, unit: str, split: Number) -> Number:
    model, layout = case.model, case.layout
    residual: Number = model.hidden / (layout.tp if layout.sequence_parallel else 1)
    turned = model.rotary_dim * (model.heads + model.kv_heads) * split
    norms: Number = residual * (model.layer_norms + (2 if model.block == "sandwich" else 0))
    if model.qk_norm:
        norms = norms + (model.heads + model.kv_heads) * model.head_dim * split
    return elementwise_layer_bytes(
        case.parts,
        case.tokens,
        element_bytes_of(case),
        norms,
        turned,
        (model.ffn if unit == "dense" else model.active_ffn) / layout.tp,
        residual,
    )


# -- Rows of experts ---------------------------------------------------------------------------------------------------

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
