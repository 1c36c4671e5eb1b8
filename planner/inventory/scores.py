"""Attention written out in Transformers' `eager_attention_forward`: scores of every pair of tokens exist as tensors.

For families whose attention no fused kernel computes: soft caps (Gemma 2), ALiBi (BLOOM), sinks (gpt-oss), and a
mask with fewer keys than queries (Falcon 7B), for which PyTorch itself writes it out, in fp32.
Not here: the projections around it (attention.py), or flash attention (ops.py).
"""

from __future__ import annotations

from planner.inventory.activations import soft_cap
from planner.inventory.compute import Compute
from planner.inventory.ops import cast, copied, product_of, scaled
from planner.inventory.tape import Storage, Tape, Tensor
from planner.inventory.tensors import Size
from planner.spec import ModelSpec


def is_written_out(model: ModelSpec) -> bool:
    """Whether Transformers computes this model's attention without a fused kernel."""
    return model.attention_soft_cap is not None or model.attention_sinks or model.positions == "alibi"


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
        scores = _replaced(tape, scores, scaled(tape, scores))
    if model.attention_soft_cap is not None:
        scores = soft_cap(tape, scores)
    scores = _replaced(tape, scores, _masked(tape, scores))
    if model.attention_sinks:
        # joined with the sinks, one more column; the largest of each row is taken off, and its place remembered
        scores = _replaced(tape, scores, copied(tape, scores))
        places = tape.new(Size(per_token=8.0 * heads))
        shifted = tape.new(scores.size, needs_grad=scores.needs_grad)
        unshifted = scores
        tape.record(shifted, (places,), lambda grad: tape.grad_of(unshifted))
        tape.drop(places)
        scores = _replaced(tape, scores, shifted)
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
    probabilities = cast(tape, wide, 1 / ratio)
    tape.drop(wide)
    probabilities = compute.dropout(tape, probabilities, model.attention_dropout)
    product = product_of(tape, probabilities, v, q.size)
    tape.drop(probabilities, v)
    output = copied(tape, product)
    tape.drop(product)
    return output


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
    scores = _replaced(tape, scores, _masked(tape, scores))
    softmax = tape.new(scores.size, needs_grad=scores.needs_grad)
    source = scores
    tape.record(softmax, (softmax,), lambda grad: tape.grad_of(source))
    tape.drop(scores)
    narrow = tape.new(softmax.size * (1 / ratio)) if ratio != 1 else tape.hold(softmax)
    v32 = repeated(tape, wide[2], groups)
    product = product_of(tape, softmax, v32, rows.size)
    output = cast(tape, product, 1 / ratio)
    tape.drop(product, v32, softmax, narrow, rows, *wide, mask)
    laid_out = copied(tape, output)
    tape.drop(output)
    return laid_out


def _expanded(tape: Tape, x: Tensor, ratio: float) -> Tensor:
    """One head as `ratio` heads without a copy; their gradients are added up."""
    return tape.record(tape.view(x, ratio), (), lambda grad: tape.grad_of(x))


def _replaced(tape: Tape, old: Tensor, new: Tensor) -> Tensor:
    tape.drop(old)
    return new


def _masked(tape: Tape, x: Tensor) -> Tensor:
    """`x + mask`: keeps nothing, and hands its gradient on."""
    output = tape.new(x.size, needs_grad=x.needs_grad)
    return tape.record(output, (), lambda grad: tape.grad_of(x, alias=grad))
