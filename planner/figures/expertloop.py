"""Experts that Transformers runs one after the other: their products, what the host starts for them, and the memory
traffic of a loop's backward.

Each has an equal part of the rows. Of a loop's forward every expert waits for the device (`nonzero` must know how many
rows there are), which is not counted: a step takes no less than is predicted here. Not here: what a loop keeps
(inventory/expertloop.py), or what ZeRO-3's hooks take around its modules (engines/deepspeed.py).
"""

from __future__ import annotations

from planner.basics.arith import Number
from planner.basics.formula import formula
from planner.engines import engine_of
from planner.figures.kernels.products import Product
from planner.figures.kernels.step import KernelCall
from planner.inventory import Weight
from planner.inventory.mlp import modules_of
from planner.parallelism.case import Case

BESIDE_PRODUCTS = {"looped": 9, "sliced": 12}
"""Operations of one expert's forward beside its products. Counted as BACKWARD_OPERATIONS is (work.py), per expert that
has rows, with its products: 12 forward and 20 backward of transformers 4.57.6, models/qwen3_moe/modeling_qwen3_moe.py
lines 250 to 262, and 14 and 22 of transformers 5.23.0, the same file's lines 233 to 243; under autocast 17 and 26."""


def loop_products(
    case: Case, weight: Weight, rows: Number, number_format: str
) -> tuple[list[KernelCall], list[KernelCall]]:
    """Products of `rows` of inputs with the experts of one weight, as many small ones: forward; gradients of inputs,
    and of the weight where it is trained."""
    out, into = weight.features
    modules = modules_of(weight, case.parts)
    out, count = out // modules, weight.shape[0]
    each, times = rows / count, float(count * modules)
    forward: list[KernelCall] = [Product(each, out, into, times, number_format)]
    back: list[KernelCall] = [Product(each, into, out, times, number_format)]
    if weight.trainable:
        back.append(Product(out, into, each, times, number_format))
    return forward, back


def loop_operations(case: Case) -> int:
    """Operations that a layer's forward starts for its experts beside their products; 0 where none are looped."""
    moe = case.model.moe
    if moe is None or not case.loops_experts:
        return 0
    return moe.experts * BESIDE_PRODUCTS.get(case.parts.experts, BESIDE_PRODUCTS["looped"])


@formula(
    unit="bytes",
    source="torch 2.13, derivatives.yaml: the gradient of an index is zeros as large as what was indexed, to a copy of "
    "which the rows are added, and is then added to the last expert's",
)
def indexed_bytes(experts: Number, tokens: Number, row_bytes: Number) -> Number:
    """Memory traffic of backward for the rows that each expert took of the tokens: six passes over all tokens."""
    return 6 * experts * tokens * row_bytes


@formula(
    unit="bytes",
    source="torch 2.13, select_backward: the gradient of a slice is zeros as large as the whole, and is then added to "
    "the last slice's",
)
def sliced_bytes(experts: Number, elements: Number, element_bytes: Number) -> Number:
    """Memory traffic of backward for the slice that each expert is of a stacked weight: four passes over all of it."""
    return 4 * experts * elements * element_bytes


def loop_bytes(case: Case, unit: str, row_bytes: float) -> tuple[Number, Number]:
    """(by token, whatever the tokens) of one layer's backward, beside what grouped experts move."""
    moe, experts = case.model.moe, [one for one in case.units()[unit] if one.expert]
    if moe is None or not experts or not case.loops_experts:
        return 0.0, 0.0
    moved = indexed_bytes(moe.experts, case.tokens, row_bytes)
    if case.parts.experts != "sliced":
        return moved, 0.0
    trained = sum(one.elements for one in experts if one.trainable)
    return moved, sliced_bytes(moe.experts, trained, engine_of(case.layout.engine).compute(case).weight_bytes)
