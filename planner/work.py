"""What one micro-batch asks of one rank: FLOP and bytes of device memory, unit by unit, and what the optimizer moves.

Works on one layout and on columns. Legend: P elements, L layers, s sequence, h hidden. Not here: seconds
(steptime.py), or bytes between ranks (comm.py).
"""

from __future__ import annotations

import msgspec

from planner.arith import Number, ceil_div, where
from planner.case import LAYERS, UNITS, Case
from planner.formula import formula
from planner.inventory import Weight
from planner.inventory.forms import is_layer_linear, nf4_element_bytes
from planner.inventory.names import names_of
from planner.parallelism.recompute import recomputed_share
from planner.spec import Kernels, ModelSpec
from planner.units import BYTES

PALM = "Chowdhery et al. 2022 (PaLM), appendix B: 6P + 12 L h s FLOP a token; causal attention needs half of the second"
NORM_BYTES = {"eager-fp32": (24, 4), "native": (8, 4), "fused": (4, 2)}
"""(fixed, times the element) bytes a norm moves for each element: eager code casts, squares and scales in fp32."""
ROTARY_ACCESSES = {"eager": 10, "fused": 4}
GATE_ACCESSES = {"eager": 5, "fused": 3}
LOSS_BYTES = {"eager-fp32": 28, "native": 16, "megatron": 16, "fused-linear": 4}
"""Bytes beside two passes over the logits, for each token and vocabulary entry, forward and backward."""


class Work(msgspec.Struct, frozen=True):
    """One occurrence of a unit in one micro-batch on one rank. `again_flops` and `again_bytes` are its recomputation,
    in backward; `linear_flops` the part of the forward that a layer's linear modules have."""

    forward_flops: Number = 0.0
    linear_flops: Number = 0.0
    backward_flops: Number = 0.0
    again_flops: Number = 0.0
    forward_bytes: Number = 0.0
    backward_bytes: Number = 0.0
    again_bytes: Number = 0.0


@formula(unit="FLOP", source="definition: a multiplication and an addition for each weight element and token")
def matmul_flops(elements: Number, tokens: Number) -> Number:
    """One pass of `tokens` through linear modules of `elements` weights: 2 P tokens."""
    return 2 * elements * tokens


@formula(unit="FLOP", source=PALM)
def attention_flops(tokens: Number, attended: Number, width: Number, layers: Number) -> Number:
    """Scores and weighted values of one forward pass under a causal mask: half of the full square.

    `width` is the elements a token of queries and of values together, `attended` the keys a query would see without
    the mask. Flash kernels recompute the scores in backward; that is not counted.
    """
    return layers * width * attended * tokens


@formula(unit="FLOP", source=PALM)
def backward_flops(trained: Number, frozen: Number, attention: Number, tokens: Number) -> Number:
    """Backward of a micro-batch: 4 P tokens where weights are trained, 2 P where they are frozen, attention twice.

    A frozen weight (LoRA's base) needs no gradient, but its input does; the first layer's is counted though spared.
    """
    return 2 * matmul_flops(trained, tokens) + matmul_flops(frozen, tokens) + 2 * attention


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


@formula(unit="bytes", source="operands of the loss: cast, log-softmax, and their backward; eager: ForCausalLMLoss")
def loss_bytes(vocab: Number, tokens: Number, element_bytes: Number, other_bytes: Number) -> Number:
    """Memory traffic of the loss, forward and backward, over the logits of one rank."""
    return tokens * vocab * (other_bytes + 2 * element_bytes)


@formula(
    unit="bytes", source="bitsandbytes' MatMul4Bit: codes and scales are read, 16-bit weights written, each product"
)
def unpack_bytes(elements: Number, stored_bytes: Number, element_bytes: Number) -> Number:
    """Memory traffic of one pass over 4-bit weights before they can be multiplied."""
    return elements * (stored_bytes + element_bytes)


def product_elements(case: Case, weight: Weight) -> Number:
    """Elements of a weight that each of the rank's tokens is multiplied with: of experts, those it is sent to."""
    if len(weight.shape) < 2 or weight.name == names_of(case.model.family).positions:
        return 0  # norms and biases; a table of positions is looked up
    if not weight.expert or case.model.moe is None:
        return weight.elements
    layout, each = case.layout, weight.elements / weight.shape[0] * case.model.moe.top_k
    # Sequence parallelism sends each token from one rank of its tensor group only.
    return where(layout.ep > 1, each / layout.tp, each) if layout.sequence_parallel else each


def element_bytes_of(case: Case) -> float:
    """Bytes an element of an activation takes."""
    return float(BYTES["fp32" if case.job.precision == "fp32" else "bf16"])


def unit_work(case: Case) -> dict[str, Work]:
    """Work of one occurrence of each unit, wherever in a pipeline it stands."""
    whole = case.unsplit
    return {unit: _layer_work(whole, unit) if unit in LAYERS else _end_work(whole, unit) for unit in UNITS}


def _products(case: Case, unit: str) -> tuple[Number, Number]:
    """(trained, frozen) elements that a token is multiplied with in one occurrence of a unit."""
    weights = case.units()[unit]
    trained, frozen = (
        sum(product_elements(case, weight) for weight in weights if weight.trainable is kind) + 0.0
        for kind in (True, False)
    )
    return trained, frozen


def _layer_work(case: Case, unit: str) -> Work:
    model, tokens, layout = case.model, case.tokens, case.layout
    if not case.units()[unit]:
        return Work()
    trained, frozen = _products(case, unit)
    split = ceil_div(model.heads, layout.tp) / model.heads
    width = (model.qk_width + model.v_width) * split
    attention = attention_flops(tokens, model.attended(case.job.attention_span), width, 1)
    products = matmul_flops(trained + frozen, tokens)
    forward = products + attention
    unpacked = _unpacked_bytes(case, unit)
    moved = _elementwise_bytes(case, unit, split)
    again_products, again_attention, again_elementwise = recomputed_share(layout.recompute)
    return Work(
        forward_flops=forward,
        backward_flops=backward_flops(trained, frozen, attention, tokens),
        again_flops=again_products * products + again_attention * attention,
        linear_flops=products,
        forward_bytes=moved + unpacked,
        backward_bytes=2 * moved + unpacked,
        again_bytes=again_elementwise * moved + again_products * unpacked,
    )


def _unpacked_bytes(case: Case, unit: str) -> Number:
    """What one pass over a layer's 4-bit weights moves before they are multiplied."""
    quantization = case.job.base_quantization
    if quantization is None:
        return 0.0
    elements = sum(weight.elements for weight in case.units()[unit] if is_layer_linear(weight)) + 0.0
    return unpack_bytes(elements, nf4_element_bytes(quantization), element_bytes_of(case))


def _elementwise_bytes(case: Case, unit: str, split: Number) -> Number:
    model, layout = case.model, case.layout
    residual = model.hidden / (layout.tp if layout.sequence_parallel else 1)
    turned = model.rotary_dim * (model.heads + model.kv_heads) * split
    norms = residual * (model.layer_norms + (2 if model.block == "sandwich" else 0))
    return elementwise_layer_bytes(
        case.runtime.parts,
        case.tokens,
        element_bytes_of(case),
        norms,
        turned,
        _activation_width(model, unit) / layout.tp,
        residual,
    )


def _activation_width(model: ModelSpec, unit: str) -> int:
    """Elements a token that the MLP's activation makes: of the chosen experts and the shared ones in a mixture."""
    if model.moe is None or unit == "dense":
        return model.ffn
    return model.moe.top_k * model.moe.expert_ffn + model.moe.shared_ffn


def _end_work(case: Case, unit: str) -> Work:
    if unit == "embed":
        return Work()
    parts, tokens = case.runtime.parts, case.tokens
    trained, frozen = _products(case, unit)
    head = matmul_flops(trained + frozen, tokens)
    vocab = case.model.vocab / (case.layout.tp if parts.vocab_parallel and parts.loss_parallel else 1)
    half = loss_bytes(vocab, tokens, element_bytes_of(case), LOSS_BYTES.get(parts.loss, 28)) / 2
    return Work(
        forward_flops=head,
        backward_flops=backward_flops(trained, frozen, 0.0, tokens),
        forward_bytes=half,
        backward_bytes=half,
    )
