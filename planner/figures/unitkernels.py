"""The kernels of one occurrence of a unit one by one: its products, forward and backward, and its attention.

Works on one layout and on columns. Not here: FLOP and bytes of the same work (work.py), or seconds (kernels/).
"""

from __future__ import annotations

from collections.abc import Iterable

from planner.basics.arith import Number, ceil_div, is_column
from planner.figures.kernels.products import Product
from planner.figures.kernels.step import Asked, Attention, Grouped
from planner.inventory import Weight
from planner.inventory.joint import is_joined
from planner.parallelism.case import Case

SCORES_FORWARD, SCORES_BACKWARD = 9, 11
"""Bytes for each score in memory, in 16 bits: softmax reads and writes, dropout too with a mask of one byte; backward
both again, softmax with its own result (Megatron-LM's fused softmax, torch's dropout)."""


def product_kernels(weight: Weight, rows: Number, number_format: str) -> tuple[list[Asked], list[Asked]]:
    """Products of `rows` of inputs with one weight: forward; gradients of inputs, and of the weight where it is
    trained. Experts' are grouped, of equal parts of the rows."""
    out, into = weight.features
    forward: Asked
    inputs: Asked
    if weight.expert:
        count = weight.shape[0]
        forward = Grouped(count, rows / count, out, into, 1.0, number_format)
        inputs = weights = Grouped(count, rows / count, into, out, 1.0, number_format)
        return [forward], [inputs, weights] if weight.trainable else [inputs]
    forward, inputs = Product(rows, out, into, 1.0, number_format), Product(rows, into, out, 1.0, number_format)
    return [forward], [inputs, Product(out, into, rows, 1.0, number_format)] if weight.trainable else [inputs]


def products_started(case: Case, weight: Weight) -> Number:
    """Operations that a forward starts for one weight: a product, and in 8 or 4 bits the conversion of its rows; none
    of its own where it is part of another's; where an engine starts each expert's alone, so many of both."""
    if is_joined(case.parts, weight):
        return 0
    each = 2 if case.job.narrows else 1
    return weight.shape[0] * each if weight.expert and case.layout.facts.starts_each_expert else each


def attention_kernels(case: Case, split: Number) -> tuple[tuple[Asked, ...], tuple[Asked, ...], Number]:
    """Of one layer: forward, backward, and the bytes that scores in memory cost one forward beside its products."""
    model, job, layout = case.model, case.job, case.layout
    masked = case.masks_documents
    span = job.seq_len if masked else job.attention_span
    # Under a mask the whole square is computed, of which a causal one needs half.
    share = 2.0 if masked else model.attended(span) / span
    heads, kv_heads = model.heads * split / layout.cp, ceil_div(model.kv_heads, layout.tp) / layout.cp
    widths = model.qk_width / model.heads, model.v_width / model.heads
    sequences = layout.micro_batch_size * (job.seq_len / span)
    if case.parts.attention != "unfused":
        forward = Attention(sequences, span, heads, kv_heads, *widths, False, share)
        return (forward,), (forward._replace(backward=True),), 0.0
    rows = sequences * heads * span
    products = (Product(rows, span, widths[0]), Product(rows, widths[1], span))
    back = tuple(turned for one in products for turned in (one._replace(n=one.k, k=one.n), one))
    return products, back, SCORES_FORWARD * rows * span


def again_kernels(kernels: Iterable[Asked], products: Number, attention: Number) -> tuple[Asked, ...]:
    """The parts of a forward's kernels that run once more."""
    shares = ((one, attention if isinstance(one, Attention) else products) for one in kernels)
    return tuple(one._replace(times=one.times * share) for one, share in shares if is_column(share) or share)
