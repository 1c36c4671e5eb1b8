"""What one micro-batch asks of one rank: FLOP and bytes of device memory, unit by unit, and what the optimizer moves.

Works on one layout and on columns. Legend: P elements, L layers, s sequence, h hidden. Not here: seconds
(steptime.py), or bytes between ranks (comm.py).
"""

from __future__ import annotations

from collections.abc import Hashable

import msgspec

from planner.basics.arith import Number, is_column, maximum, where
from planner.basics.formula import formula, watched
from planner.engines import engine_of
from planner.figures.accumulation import added_up_bytes
from planner.figures.beside import BACKWARD_OPERATIONS, element_bytes_of
from planner.figures.byhand import NORM_OPERATIONS, beside_by_hand
from planner.figures.described import beside_described, towers_beside
from planner.figures.expertloop import loop_products
from planner.figures.flops import backward_flops, matmul_flops, product_operands
from planner.figures.kernels.step import KernelCall
from planner.figures.unitkernels import (
    adapters_beside,
    again_kernels,
    attention_factors,
    conversions,
    product_kernels,
    products_started,
    unpacking,
)
from planner.inventory import Weight, ends, is_layer, second_products
from planner.inventory.names import names_of
from planner.parallelism.case import Case
from planner.parallelism.recompute import recomputed_share, runs_again
from planner.spec.described import BETWEEN, TOWER

IN_ONE_KERNEL = ("fused-linear", "linear-chunked", "recomputed")
LOSS_BYTES = {"eager-fp32": 28, "shifted-fp32": 44, "native": 16, "megatron": 16} | {
    **dict.fromkeys(IN_ONE_KERNEL, 4),
    **dict.fromkeys(ends.TRAINERS, 32),
}
"""Bytes beside two passes over the logits, for each token and vocabulary entry, forward and backward. The trainer's own
losses convert (6 of 16-bit logits), make log-probabilities, their exponentials and what they are divided by (8 each),
and convert again (6)."""

LOSS_OPERATIONS = dict.fromkeys(IN_ONE_KERNEL, 1)
EAGER_LOSS_OPERATIONS = 8
PIECE_OPERATIONS = 12
"""Of the trainer's losses for each piece of the tokens, forward and backward."""
TABLE_OPERATIONS = 12
"""The embedding, and the rotary tables that are made once a pass."""
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
    """A layer: its linear modules, and what is beside them in its operations."""
    if not case.units()[unit] and unit != BETWEEN:
        return Work()
    found, element = _products(case, unit), element_bytes_of(case)
    other = beside_described(case, unit) if case.model.described is not None else beside_by_hand(case, unit)
    unpacked, unpacked_back = unpacking(case, unit, element)
    adapts, adapts_back = adapters_beside(case, unit, element)
    hooks = engine_of(case.layout.engine).hooks(case, unit)
    plain = Load(
        product_flops=matmul_flops(found.trained + found.frozen, case.tokens) + other.product_flops,
        operands=found.trained_operands + found.frozen_operands + other.operands,
        attention_flops=other.attention_flops,
        masked_flops=other.masked_flops,
        moved_bytes=other.moved_bytes,
        operations=found.modules + other.operations,
        kernels=found.kernels + other.products + other.attention,
        attention_bytes=other.attention_bytes,
    )
    back = _backward(case, unit, found, plain)
    backward = msgspec.structs.replace(
        back,
        product_flops=back.product_flops + 2 * other.product_flops,
        operands=back.operands + 2 * other.operands,
        attention_flops=2 * other.attention_flops,
        masked_flops=2 * other.masked_flops,
        moved_bytes=other.moved_bytes_back + adapts_back.moved_bytes,
        fixed_bytes=back.fixed_bytes + unpacked_back.moved_bytes + other.fixed_bytes_back,
        operations=BACKWARD_OPERATIONS * found.modules
        + other.operations_back
        + adapts_back.operations
        + unpacked_back.operations
        + hooks.backward,
        kernels=found.gradients + other.products_back + other.attention_back,
        attention_bytes=other.attention_bytes_back,
    )
    forward = msgspec.structs.replace(
        plain,
        moved_bytes=plain.moved_bytes + adapts.moved_bytes,
        fixed_bytes=unpacked.moved_bytes,
        operations=plain.operations + adapts.operations + unpacked.operations + hooks.forward,
    )
    products, attention, elementwise = _again(case, unit, found) if unit != BETWEEN else (0.0, 0.0, 0.0)
    again = Load(
        product_flops=products * forward.product_flops,
        operands=products * forward.operands,
        attention_flops=attention * forward.attention_flops,
        masked_flops=attention * forward.masked_flops,
        moved_bytes=elementwise * forward.moved_bytes + other.moved_bytes_again,
        fixed_bytes=products * forward.fixed_bytes,
        operations=maximum(products, elementwise) * forward.operations,
        kernels=again_kernels(found.kernels + other.products, products) + again_kernels(other.attention, attention),
        attention_bytes=attention * forward.attention_bytes,
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


def _tower_work(case: Case) -> Work:
    """Towers: their forward, and where they are trained their backward, of a gradient for each operand of a product,
    and the forward that runs again in it."""
    seen = towers_beside(case)
    forward = Load(
        product_flops=seen.product_flops,
        operands=seen.operands,
        attention_flops=seen.attention_flops,
        moved_bytes=seen.moved_bytes,
        operations=seen.operations,
        kernels=seen.products + seen.attention,
    )
    if not case.job.trains_towers:
        return Work(forward)
    trained = [weight for weight in case.units()[TOWER] if weight.trainable]
    backward = Load(
        product_flops=2 * seen.product_flops,
        operands=2 * seen.operands,
        attention_flops=2 * seen.attention_flops,
        moved_bytes=seen.moved_bytes,
        fixed_bytes=added_up_bytes(case, trained, element_bytes_of(case)),
        operations=BACKWARD_OPERATIONS * seen.operations,
        kernels=seen.products_back + seen.attention_back,
    )
    return Work(forward, backward, forward if case.layout.recompute == "full" else Load())


def _end_work(case: Case, unit: str) -> Work:
    if unit == TOWER:
        return _tower_work(case)
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
