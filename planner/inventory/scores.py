"""Attention written out in Transformers' `eager_attention_forward`: scores of every pair of tokens exist as tensors.

For families whose attention no fused kernel computes: soft caps (Gemma 2), ALiBi (BLOOM), sinks (gpt-oss), and a
mask with fewer keys than queries (Falcon 7B), for which PyTorch itself writes it out, in fp32.
Not here: the projections around it (attention.py), or flash attention (ops.py).
"""

from __future__ import annotations

from planner.inventory.activations import soft_cap
from planner.inventory.compute import Compute
from planner.inventory.ops import cast, cloned, copied, product_of, scaled
from planner.inventory.tape import Storage, Tape, Tensor
from planner.inventory.tensors import Size
from planner.spec import Kernels, ModelSpec


def is_written_out(model: ModelSpec, kernels: Kernels) -> bool:
    """Whether this model's attention is computed without a fused kernel."""
    sinks = model.attention_sinks and not kernels.fused_sinks
    return model.attention_soft_cap is not None or sinks or model.positions == "alibi"


def written_out_attention(
    tape: Tape, q: Tensor, k: Tensor, v: Tensor, model: ModelSpec, compute: Compute, heads: int, groups: int
) -> Tensor:
    """softmax(q k / sqrt(d)) v with every step a tensor: kept are the repeated k and v, a copy of q, the soft cap's
    tanh, the fp32 softmax and its 16-bit copy."""
    if groups > 1:
        k, v = copied(tape, k, groups), copied(tape, v, groups)
    else:
        tape.hold(k), tape.hold(v)
    alibi = model.positions == "alibi"
    q_rows = copied(tape, q)
    width = compute.element_bytes * heads
    scores = product_of(tape, q_rows, k, Size(per_pair=width))
    tape.drop(q_rows, k)
    if not alibi:
        scores = tape.replaced(scores, scaled(tape, scores))
    if model.attention_soft_cap is not None:
        scores = soft_cap(tape, scores)
    scores = tape.replaced(scores, cloned(tape, scores))  # the mask is added
    if model.attention_sinks:
        # joined with the sinks, one more column; the largest of each row is taken off, and its place remembered
        scores = tape.replaced(scores, copied(tape, scores))
        places = tape.new(Size(per_token=8.0 * heads))
        scores = tape.replaced(scores, tape.derived(scores, saved=(places,)))
        tape.drop(places)
    ratio = 1.0 if model.attention_sinks else 4.0 / compute.element_bytes
    wide = tape.new(scores.size * ratio, needs_grad=scores.needs_grad)
    source = scores

    def softmax_backward(grad: Storage) -> None:
        inner = tape.allocate(wide.size) if ratio != 1 else None
        tape.grad_of(source)
        if inner is not None:
            tape.release(inner)

    tape.record(wide, (wide,), softmax_backward)
    tape.drop(scores)
    probabilities = tape.replaced(wide, cast(tape, wide, 1 / ratio))
    probabilities = compute.dropout(tape, probabilities, model.attention_dropout)
    product = product_of(tape, probabilities, v, q.size)
    tape.drop(probabilities, v)
    return tape.replaced(product, copied(tape, product))


def is_math(model: ModelSpec) -> bool:
    """Whether PyTorch computes this model's attention without a fused kernel: Falcon 7B has fewer key heads than query
    heads and does not say so to PyTorch."""
    return model.family == "falcon" and model.layer_norms == 1


def math_attention(
    tape: Tape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    heads: int,
    groups: int,
    element_bytes: float,
    one_sequence: bool = False,
) -> Tensor:
    """PyTorch's `_scaled_dot_product_attention_math`: fp32 copies of the scaled q and of k and v for every head, and
    the fp32 softmax are kept. Of `one_sequence` the one head of k and of v serves every head as a view (at::matmul
    expands and reshapes, which copies only where batch and heads cannot be one dimension)."""
    ratio = 4.0 / element_bytes
    mask = tape.new(Size(per_pair=element_bytes))
    wide = [cast(tape, one, ratio) for one in (q, k, v)]
    rows, columns = scaled(tape, wide[0]), scaled(tape, wide[1])
    repeated = _expanded if one_sequence else copied
    q32, k32 = copied(tape, rows), repeated(tape, columns, groups)
    scores = product_of(tape, q32, k32, Size(per_pair=4.0 * heads))
    tape.drop(q32, k32, columns)
    scores = tape.replaced(scores, cloned(tape, scores))  # the mask is added
    softmax = tape.replaced(scores, tape.derived(scores, keeps_result=True))
    narrow = tape.new(softmax.size * (1 / ratio)) if ratio != 1 else tape.hold(softmax)
    v32 = repeated(tape, wide[2], groups)
    product = product_of(tape, softmax, v32, rows.size)
    output = cast(tape, product, 1 / ratio)
    tape.drop(product, v32, softmax, narrow, rows, *wide, mask)
    return tape.replaced(output, copied(tape, output))


def _expanded(tape: Tape, x: Tensor, ratio: float) -> Tensor:
    """One head as `ratio` heads without a copy; their gradients are added up."""
    return tape.record(tape.view(x, ratio), (), lambda grad: tape.grad_of(x))
