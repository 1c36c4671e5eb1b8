"""What one micro-batch asks of one rank: FLOP and bytes of device memory, unit by unit, and what the optimizer moves.

Works on one layout and on columns. Legend: P elements, L layers, s sequence, h hidden. Not here: seconds
(steptime.py), or bytes between ranks (comm.py).
"""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from planner.basics.arith import Number, ceil_div, is_column, maximum, where
from planner.basics.formula import formula, watched
from planner.basics.quantities import BYTES
from planner.engines import engine_of
from planner.figures.accumulation import added_up_bytes
from planner.figures.described import beside
from planner.figures.expertloop import loop_bytes, loop_operations, loop_products
from planner.figures.flops import attention_flops, backward_flops, matmul_flops, product_operands
from planner.figures.kernels.step import KernelCall
from planner.figures.unitkernels import (
    SCORES,
    adapters_beside,
    again_kernels,
    attention_factors,
    attention_kernels,
    conversions,
    product_kernels,
    products_started,
    unpacking,
)
from planner.inventory import Weight, ends, is_layer, second_products
from planner.inventory.names import names_of
from planner.parallelism.case import Case
from planner.parallelism.expert import sent_once, tokens_once
from planner.parallelism.recompute import recomputed_share, runs_again
from planner.spec import Kernels, Moe
from planner.spec.described import TOWER

NORM_BYTES = {"eager-fp32": (24, 4), "native": (8, 4), "fused": (4, 2)}
"""(fixed, times the element) bytes a norm moves for each element: eager code casts, squares and scales in fp32."""
ROTARY_ACCESSES = {"eager": 10, "joined": 12, "fused": 4}
GATE_ACCESSES = {"eager": 5, "fused": 3}
IN_ONE_KERNEL = ("fused-linear", "linear-chunked", "recomputed")
LOSS_BYTES = {"eager-fp32": 28, "shifted-fp32": 44, "native": 16, "megatron": 16} | {
    **dict.fromkeys(IN_ONE_KERNEL, 4),
    **dict.fromkeys(ends.TRAINERS, 32),
}
"""Bytes beside two passes over the logits, for each token and vocabulary entry, forward and backward. The trainer's own
losses convert (6 of 16-bit logits), make log-probabilities, their exponentials and what they are divided by (8 each),
and convert again (6)."""

NORM_OPERATIONS = {"eager-fp32": 8, "native": 1, "fused": 1}
ROTARY_OPERATIONS = {"eager": 10, "joined": 12, "fused": 2}
GATE_OPERATIONS = {"eager": 2, "fused": 1, "fused-recomputed": 1}
CORE_OPERATIONS = dict.fromkeys(SCORES, 8)
LOSS_OPERATIONS = dict.fromkeys(IN_ONE_KERNEL, 1)
EAGER_LOSS_OPERATIONS = 8
PIECE_OPERATIONS = 12
"""Of the trainer's losses for each piece of the tokens, forward and backward."""
TABLE_OPERATIONS = 12
"""The embedding, and the rotary tables that are made once a pass."""
RESIDUAL_OPERATIONS = 2
BACKWARD_OPERATIONS = 1.8
"""Of forward's: counted, as the others, with a dispatch mode over Transformers 5.23's Llama on a CPU, views left out:
34 forward and 63 backward in fp32, 38 and 67 in bf16."""
UPDATE_OPERATIONS = 10
"""Of AdamW for each tensor where it goes tensor by tensor (on a CPU); on a GPU it takes many tensors at a time."""
CLIP_OPERATIONS = 3


class Load(msgspec.Struct, frozen=True):
    """What one pass asks of one device.

    `operands` are the elements of all matrix products' three matrices: the larger they are beside the FLOP, the smaller
    the products. `masked_flops` are attention's on pairs that a mask hides. `fixed_bytes` do not depend on the tokens:
    weights unpacked, gradients of a table, gradients added up. `kernels` are the same products and attention one by
    one; `attention_bytes` what goes through memory beside those of attention: scores that are there, blocks of a ring.
    """

    product_flops: Number = 0.0
    operands: Number = 0.0
    attention_flops: Number = 0.0
    masked_flops: Number = 0.0
    moved_bytes: Number = 0.0
    fixed_bytes: Number = 0.0
    operations: Number = 0.0
    kernels: tuple[KernelCall, ...] = ()
    attention_bytes: Number = 0.0

    @property
    def flops(self) -> Number:
        """All FLOP, of linear modules and of attention."""
        return self.product_flops + self.attention_flops

    @property
    def computed_flops(self) -> Number:
        """With those that a mask throws away."""
        return self.flops + self.masked_flops

    def and_again(self, other: Load) -> Load:
        """Both, one after the other."""
        return Load(*(getattr(self, name) + getattr(other, name) for name in self.__struct_fields__))


class Work(msgspec.Struct, frozen=True):
    """One occurrence of a unit in one micro-batch on one rank. `again` is its recomputation, in backward."""

    forward: Load = Load()
    backward: Load = Load()
    again: Load = Load()
    linear_flops: Number = 0.0
    """The part of the forward that a layer's linear modules have."""


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


def product_elements(case: Case, weight: Weight) -> Number:
    """Elements of a weight that each of the rank's tokens is multiplied with: of experts, those it is sent to."""
    dimensions = 3 if weight.expert else 2
    if len(weight.shape) < dimensions or weight.replaced or weight.alone or _is_positions(case, weight):
        return 0  # norms and biases; originals of trained copies; a table of positions is looked up
    if not weight.expert or case.model.moe is None:
        return weight.elements
    layout, each = case.layout, weight.elements / weight.shape[0] * case.model.moe.top_k
    # Sequence parallelism sends each token from one rank of its tensor group only.
    return where(layout.ep > 1, each / layout.tp, each) if layout.sequence_parallel else each


def _is_positions(case: Case, weight: Weight) -> bool:
    """Whether a weight is a table of learned positions."""
    return case.model.described is None and weight.name == names_of(case.model.family).positions


def element_bytes_of(case: Case) -> float:
    """Bytes an element of an activation takes."""
    return float(BYTES["fp32" if case.job.precision == "fp32" else "bf16"])


def unit_work(case: Case) -> dict[str, Work]:
    """Work of one occurrence of each unit, wherever in a pipeline it stands: worked out once for all layouts that
    split a micro-batch and its weights alike. Under a trace it runs each time, or its steps would be missing there."""
    layout = case.layout
    splits = layout.tp, layout.ep, layout.cp, layout.micro_batch_size, layout.grad_accum
    if watched() or is_column(*splits):
        return _unit_work(case.unsplit)
    asked = *work_categories(case), *splits
    if asked not in _WORKS:
        if len(_WORKS) > 4096:
            _WORKS.clear()
        _WORKS[asked] = _unit_work(case.unsplit)
    return _WORKS[asked]


_WORKS: dict[Hashable, dict[str, Work]] = {}
"""By everything of a case that `_unit_work` reads."""


def work_categories(case: Case) -> tuple[Hashable, ...]:
    """What `unit_work` reads of a case beside the numbers that split a micro-batch and its weights."""
    layout = case.layout
    own = layout.engine, layout.zero_stage, layout.sequence_parallel, layout.token_dispatcher
    again = layout.recompute, layout.recompute_modules
    read = case.walked_model, case.job, case.parts, case.loops_experts, case.twice, attention_factors(case)
    return *read, *own, *again


def _unit_work(whole: Case) -> dict[str, Work]:
    return {unit: _layer_work(whole, unit) if is_layer(unit) else _end_work(whole, unit) for unit in whole.units()}


class _Products(msgspec.Struct, frozen=True):
    """The linear modules of one occurrence of a unit: elements a token is multiplied with, and all operands; their
    products one by one, `gradients` of inputs and of trained weights."""

    trained: Number
    frozen: Number
    trained_operands: Number
    frozen_operands: Number
    modules: Number
    kernels: tuple[KernelCall, ...]
    gradients: tuple[KernelCall, ...]


def _products(case: Case, unit: str) -> _Products:
    elements: dict[bool, Number] = {True: 0.0, False: 0.0}
    operands: dict[bool, Number] = {True: 0.0, False: 0.0}
    kernels: list[KernelCall] = []
    gradients: list[KernelCall] = []
    modules: Number = 0
    tokens = case.tokens
    number_format = case.job.product_rate if is_layer(unit) or not case.job.narrows else "bf16"
    in_pieces = unit == "tail" and case.parts.loss in ends.IN_PIECES
    pieces = ends.pieces_of(case.parts, case.model) if in_pieces else 1
    for weight, *converted in conversions(case, case.units()[unit]):
        each = product_elements(case, weight)
        if not is_column(each) and each == 0:
            continue
        rows = tokens * each / (weight.elements / weight.shape[0]) if weight.expert else tokens
        if weight.expert and case.loops_experts:
            ways, back = loop_products(case, weight, rows, number_format)
        else:
            ways, back = product_kernels(weight, rows, number_format, pieces, *converted)
        kernels += ways
        gradients += back
        modules = modules + products_started(case, weight)
        elements[weight.trainable] = elements[weight.trainable] + each
        operands[weight.trainable] = operands[weight.trainable] + product_operands(
            rows, sum(weight.features), pieces * weight.elements
        )
    return _Products(
        elements[True], elements[False], operands[True], operands[False], modules, tuple(kernels), tuple(gradients)
    )


def _layer_work(case: Case, unit: str) -> Work:
    model, tokens, layout = case.model, case.tokens, case.layout
    if not case.units()[unit]:
        return Work()
    if model.described is not None:
        return _described_work(case, unit)
    found = _products(case, unit)
    split = ceil_div(model.heads, layout.tp) / model.heads
    width = (model.qk_width + model.v_width) * split
    attention = attention_flops(tokens, model.attended(case.job.attention_span), width, 1)
    # Kernels under a mask compute the whole square, of which a causal one needs half.
    square = attention_flops(tokens, 2 * case.job.seq_len, width, 1) if case.masks_documents else attention
    element = element_bytes_of(case)
    unpacked, unpacked_back = unpacking(case, unit, element)
    adapts, adapts_back = adapters_beside(case, unit, element)
    hooks = engine_of(case.layout.engine).hooks(case, unit)
    attended = attention_kernels(case, split)
    moe = model.moe if any(weight.expert for weight in case.units()[unit]) else None
    routed, returned = routed_bytes(case, moe, element) if moe else (0.0, 0.0)
    elementwise = _elementwise_bytes(case, unit, split)
    looped = loop_operations(case) if moe else 0
    indexed, sliced = loop_bytes(case, unit, model.hidden * element)
    forward = Load(
        product_flops=matmul_flops(found.trained + found.frozen, tokens),
        operands=found.trained_operands + found.frozen_operands,
        attention_flops=attention,
        masked_flops=square - attention,
        moved_bytes=elementwise + routed,
        operations=found.modules + _layer_operations(case) + (bias_operations(case, moe) if moe else 0) + looped,
        kernels=found.kernels + attended.forward,
        attention_bytes=attended.forward_bytes,
    )
    backward = _backward(case, unit, found, forward)
    backward = msgspec.structs.replace(
        backward,
        attention_flops=2 * attention,
        masked_flops=2 * forward.masked_flops,
        moved_bytes=2 * elementwise + returned + adapts_back.moved_bytes + indexed,
        fixed_bytes=backward.fixed_bytes + unpacked_back.moved_bytes + sliced,
        operations=backward.operations + adapts_back.operations + unpacked_back.operations + hooks.backward,
        kernels=found.gradients + attended.backward,
        attention_bytes=attended.backward_bytes,
    )
    forward = msgspec.structs.replace(
        forward,
        moved_bytes=forward.moved_bytes + adapts.moved_bytes,
        fixed_bytes=unpacked.moved_bytes,
        operations=forward.operations + adapts.operations + unpacked.operations + hooks.forward,
    )
    again_products, again_attention, again_elementwise = _again(case, unit, found)
    again = Load(
        product_flops=again_products * forward.product_flops,
        operands=again_products * forward.operands,
        attention_flops=again_attention * attention,
        masked_flops=again_attention * forward.masked_flops,
        moved_bytes=again_elementwise * forward.moved_bytes
        + (gated_again_bytes(case, moe, GATE_ACCESSES.get(case.parts.mlp, 3) * element) if moe else 0.0),
        fixed_bytes=again_products * forward.fixed_bytes,
        operations=maximum(again_products, again_elementwise) * forward.operations,
        kernels=again_kernels(found.kernels, again_products, 0.0)
        + again_kernels(attended.forward, again_attention, again_attention),
        attention_bytes=again_attention * attended.forward_bytes,
    )
    return Work(forward, backward, again, linear_flops=forward.product_flops)


def _described_work(case: Case, unit: str) -> Work:
    """A layer whose operations a description lists: its linear modules, and sums over the rest."""
    found, other, element = _products(case, unit), beside(case, unit), element_bytes_of(case)
    unpacked, unpacked_back = unpacking(case, unit, element)
    adapts, adapts_back = adapters_beside(case, unit, element)
    hooks = engine_of(case.layout.engine).hooks(case, unit)
    plain = Load(
        product_flops=matmul_flops(found.trained + found.frozen, case.tokens) + other.product_flops,
        operands=found.trained_operands + found.frozen_operands + other.operands,
        attention_flops=other.attention_flops,
        moved_bytes=other.forward_bytes,
        operations=found.modules + other.forward_operations,
        kernels=found.kernels + other.forward,
    )
    backward = _backward(case, unit, found, plain)
    backward = msgspec.structs.replace(
        backward,
        product_flops=backward.product_flops + 2 * other.product_flops,
        operands=backward.operands + 2 * other.operands,
        attention_flops=2 * other.attention_flops,
        moved_bytes=other.backward_bytes + adapts_back.moved_bytes,
        fixed_bytes=backward.fixed_bytes + unpacked_back.moved_bytes,
        operations=BACKWARD_OPERATIONS * found.modules
        + other.backward_operations
        + adapts_back.operations
        + unpacked_back.operations
        + hooks.backward,
        kernels=found.gradients + other.backward,
    )
    forward = msgspec.structs.replace(
        plain,
        moved_bytes=plain.moved_bytes + adapts.moved_bytes,
        fixed_bytes=unpacked.moved_bytes,
        operations=plain.operations + adapts.operations + unpacked.operations + hooks.forward,
    )
    products, attention, elementwise = recomputed_share(case.layout.recompute)
    again = Load(
        product_flops=products * forward.product_flops,
        operands=products * forward.operands,
        attention_flops=attention * forward.attention_flops,
        moved_bytes=elementwise * forward.moved_bytes,
        fixed_bytes=products * forward.fixed_bytes,
        operations=maximum(products, elementwise) * forward.operations,
        kernels=again_kernels(forward.kernels, products, attention),
    )
    return Work(forward, backward, again, linear_flops=forward.product_flops)


def _again(case: Case, unit: str, found: _Products) -> tuple[Number, float, float]:
    """Parts of a layer's forward that run once more: of its products, its attention, its element-wise work."""
    modules, weights, whole = case.layout.recompute_modules, case.units()[unit], found.trained + found.frozen
    if not modules:
        shares: tuple[Number, float, float] = recomputed_share(case.layout.recompute)
        if case.layout.recompute == "sac:matmul" and case.layout.facts.skips_second_products:
            return sum(product_elements(case, one) for one in second_products(weights, case.model)) / whole, *shares[1:]
        return shares
    mixture, inside = any(weight.expert for weight in weights), names_of(case.model.family).attention_module
    again: Number = 0.0
    for one in weights:
        attends = one.name.startswith(f"{inside}.")
        if runs_again(one.name, modules, attends=attends, expert=one.expert, mixture=mixture):
            again = again + product_elements(case, one)
    return again / whole, float("core_attn" in modules), 0.0


def _backward(case: Case, unit: str, found: _Products, forward: Load) -> Load:
    """Products of the inputs' gradients and of trained weights', and what goes with the weights."""
    tokens = case.tokens
    trained = [weight for weight in case.units()[unit] if weight.trainable]
    added_up = added_up_bytes(case, trained, element_bytes_of(case))
    return Load(
        product_flops=backward_flops(found.trained, found.frozen, 0.0, tokens),
        operands=2 * found.trained_operands + found.frozen_operands,
        moved_bytes=forward.moved_bytes,
        fixed_bytes=forward.fixed_bytes + added_up,
        operations=BACKWARD_OPERATIONS * forward.operations,
        kernels=found.gradients,
    )


def _layer_operations(case: Case) -> int:
    """Operations of one layer's forward beside its linear modules; views start nothing and are not counted."""
    parts, model = case.parts, case.model
    norms = model.layer_norms + (2 if model.block == "sandwich" else 0)
    each = NORM_OPERATIONS.get(parts.norm, 1)
    each -= 2 if each > 1 and case.job.precision == "fp32" else 0  # no casts to fp32 and back
    return (
        norms * each
        + (ROTARY_OPERATIONS.get(parts.rotary, 2) if model.rotary_dim else 0)
        + CORE_OPERATIONS.get(parts.attention, 1)
        + GATE_OPERATIONS.get(parts.mlp, 2)
        + RESIDUAL_OPERATIONS
    )


def _elementwise_bytes(case: Case, unit: str, split: Number) -> Number:
    model, layout = case.model, case.layout
    residual = model.hidden / (layout.tp if layout.sequence_parallel else 1)
    turned = model.rotary_dim * (model.heads + model.kv_heads) * split
    norms = residual * (model.layer_norms + (2 if model.block == "sandwich" else 0))
    return elementwise_layer_bytes(
        case.parts,
        case.tokens,
        element_bytes_of(case),
        norms,
        turned,
        (model.ffn if unit == "dense" else model.active_ffn) / layout.tp,
        residual,
    )


def _end_work(case: Case, unit: str) -> Work:
    if unit == TOWER:
        return Work()
    parts, tokens, element = case.parts, case.tokens, element_bytes_of(case)
    if unit == "embed":
        looked_up = 2 * tokens * case.model.hidden * element
        here = Load(moved_bytes=looked_up, operations=TABLE_OPERATIONS)
        # Backward writes zeros for the whole table before it adds the rows that were looked up.
        table = case.elements(unit, trainable=True) * element
        back = Load(moved_bytes=looked_up, fixed_bytes=table, operations=BACKWARD_OPERATIONS)
        return Work(here, back)
    found = _products(case, unit)
    vocab = case.model.vocab / (case.layout.tp if parts.vocab_parallel and parts.loss_parallel else 1)
    forward = Load(
        product_flops=matmul_flops(found.trained + found.frozen, tokens),
        operands=found.trained_operands + found.frozen_operands,
        moved_bytes=loss_bytes(vocab, tokens, element, LOSS_BYTES.get(parts.loss, 28)) / 2,
        kernels=found.kernels,
        operations=found.modules
        + NORM_OPERATIONS.get("eager-fp32" if parts.compiled == "block" else parts.norm, 1)
        + (
            PIECE_OPERATIONS * ends.pieces_of(parts, case.model)
            if parts.loss in ends.TRAINERS
            else LOSS_OPERATIONS.get(parts.loss, EAGER_LOSS_OPERATIONS)
        ),
    )
    return Work(forward, _backward(case, unit, found, forward))


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
