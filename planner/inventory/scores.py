"""Attention written out in Transformers' `eager_attention_forward`: scores of every pair of tokens exist as tensors.

For families whose attention no fused kernel computes: soft caps (Gemma 2), ALiBi (BLOOM), sinks (gpt-oss), and a
mask with fewer keys than queries (Falcon 7B), for which PyTorch itself writes it out, in fp32.
Not here: the projections around it (attention.py), or flash attention (ops.py).
"""

from __future__ import annotations

from planner.inventory.activations import soft_cap
from planner.inventory.compute import Compute, ModelPass
from planner.inventory.devices import is_math
from planner.inventory.ops import cast, cloned, copied, dropout, product_of, scaled, slices
from planner.inventory.tape import Storage, Tape, Tensor
from planner.inventory.tensors import NOTHING, Size
from planner.spec import Kernels, ModelSpec


def is_written_out(model: ModelSpec, kernels: Kernels) -> bool:
    """Whether this model's attention is computed without a fused kernel."""
    sinks = model.attention_sinks and not kernels.fused_sinks
    return model.attention_soft_cap is not None or sinks or model.positions == "alibi"


def has_scores(model: ModelSpec, kernels: Kernels, *, on_cpu: bool) -> bool:
    """Whether scores of every pair of tokens exist as tensors, by the family's code or by PyTorch's."""
    return is_written_out(model, kernels) or is_math(model, kernels, on_cpu=on_cpu)


def mask_count(model: ModelSpec, compute: Compute) -> int:
    """Masks of numbers that all layers share: of packed documents, or of attention that is written out, where layers
    that slide have one of their own."""
    if compute.masked:
        return 1
    return (2 if model.sliding_window else 1) if is_written_out(model, compute.kernels) else 0


def masks_of(run: ModelPass) -> tuple[Tensor, ...]:
    """Those of the layer at hand that it keeps where it runs again: all, but that the first of layers that slide by
    turns, which backward reaches last, has no need of the others' mask."""
    tape, model, compute, table = run
    masks = table[len(table) - mask_count(model, compute) :]
    return masks[:1] if tape.layer == 0 and model.full_attention_every > 1 else masks


def written_out_attention(
    tape: Tape, q: Tensor, k: Tensor, v: Tensor, model: ModelSpec, compute: Compute, heads: int, groups: int
) -> Tensor:
    """softmax(q k / sqrt(d)) v with every step a tensor: kept are the repeated k and v, a copy of q, the soft cap's
    tanh, the fp32 softmax and its 16-bit copy."""
    if groups > 1:
        k, v = copied(tape, k, groups), copied(tape, v, groups)
    else:
        tape.hold(k), tape.hold(v)
    alibi, sinks = model.positions == "alibi", model.attention_sinks
    # BLOOM's are copies by now, and turned halves that are joined anew lie head by head, as those of one sequence do.
    q_rows = tape.hold(q) if sinks or alibi or compute.one_sequence else copied(tape, q)
    width = compute.element_bytes * heads
    scores = product_of(tape, q_rows, k, Size(per_pair=width))
    tape.drop(q_rows)
    if not alibi:
        scores = tape.replaced(scores, scaled(tape, scores))
    if model.attention_soft_cap is not None:
        scores = soft_cap(tape, scores)
    # The mask is added; that of the model's own code is as wide as the residual stream, and makes the sum so.
    score_bytes = compute.weight_bytes if compute.autocast and not compute.masked else compute.element_bytes
    masked_size = scores.size * (score_bytes / compute.element_bytes)
    unmasked, scores = scores, tape.derived(scores, masked_size, passes_on=score_bytes == compute.element_bytes)
    if alibi:  # one function with the output's product, which has them until it ends
        tape.variables += (unmasked, tape.hold(scores))
    else:
        tape.drop(unmasked)
    rows = _with_sinks(tape, scores, heads, score_bytes * heads) if sinks else tape.hold(scores)
    softmax_bytes = score_bytes if sinks else 4.0
    wide = _softmax(
        tape, rows, softmax_bytes / score_bytes, converts=not compute.fuses_conversion, on_cpu=compute.on_cpu
    )
    own = slices(tape, wide, (1.0,))[0] if sinks else tape.hold(wide)
    own.size = scores.size * (softmax_bytes / score_bytes)
    narrow = cast(tape, own, compute.element_bytes / softmax_bytes)
    tape.drop(wide, own, scores)
    probabilities = compute.dropout(tape, narrow, model.attention_dropout)
    product = product_of(tape, probabilities, v, q.size)
    output = tape.replaced(product, copied(tape, product))
    tape.drop(k, v, rows)
    if alibi:  # BLOOM's layers return them
        tape.returned.append(probabilities)
    else:
        tape.drop(probabilities)
    return output


def _softmax(tape: Tape, x: Tensor, ratio: float, *, converts: bool, on_cpu: bool) -> Tensor:
    """softmax(x, dtype=...) `ratio` times as large as x: keeps its result, and a GPU's backward multiplies that by its
    gradient in a tensor apart. Unless one kernel does both, x is converted before (devices.fuses_conversion)."""
    source = cast(tape, x, ratio) if converts else tape.hold(x)
    output = tape.new(x.size * ratio, needs_grad=x.needs_grad)

    def backward(grad: Storage) -> None:
        tape.grad_of(source)
        if not on_cpu:
            tape.release(tape.allocate(output.size))

    return tape.replaced(source, tape.record(output, (output,), backward))


def _with_sinks(tape: Tape, scores: Tensor, heads: int, width: float) -> Tensor:
    """Scores joined with the sinks, one more column of `width` bytes a token, less the largest of each row, whose place
    is kept; backward writes the gradient of the largest into zeros, and adds it to that of the rest."""
    joined = tape.new(scores.size + Size(per_token=width), needs_grad=scores.needs_grad)
    tape.record(joined, (), lambda grad: tape.grad_of(scores, alias=grad))
    places = tape.new(Size(per_token=8.0 * heads))
    output = tape.new(joined.size, needs_grad=joined.needs_grad)

    def backward(grad: Storage) -> None:
        tape.grad_of(joined, alias=grad)
        zeros = tape.allocate(joined.size)
        tape.grad_of(joined)
        tape.release(zeros)

    tape.record(output, (places,), backward)
    tape.drop(joined, places)
    return output


def math_attention(
    tape: Tape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    heads: int,
    groups: int,
    element_bytes: float,
    mask: Size = NOTHING,
    causal: Size = NOTHING,
    probability: float = 0.0,
    one_sequence: bool = False,
    on_cpu: bool = False,
) -> Tensor:
    """PyTorch's `_scaled_dot_product_attention_math` (devices.py says where): fp32 copies of the scaled q and of k and
    v for every head, and the fp32 softmax are kept; where probabilities are dropped, so are the noise and what it
    leaves. `mask` is one of booleans as numbers, `causal` the one it makes where it is given none. Of `one_sequence`
    heads are matrices as they lie, and the one head of k and of v serves every head as a view (at::matmul expands and
    reshapes, which copies only where batch and heads cannot be one dimension)."""
    ratio = 4.0 / element_bytes
    masks = [tape.new(mask)]
    wide = [cast(tape, one, ratio) for one in (q, k, v)]
    rows = scaled(tape, wide[0])
    masks.append(tape.new(causal))
    columns = scaled(tape, wide[1])
    repeated = _expanded if one_sequence else copied
    q32, k32 = repeated(tape, rows, 1.0), repeated(tape, columns, groups)
    scores = product_of(tape, q32, k32, Size(per_pair=4.0 * heads))
    tape.drop(q32, k32, columns)
    scores = tape.replaced(scores, cloned(tape, scores))  # the mask is added
    weights = tape.replaced(scores, _softmax(tape, scores, 1.0, converts=False, on_cpu=on_cpu))
    weights = tape.replaced(weights, dropout(tape, weights, probability, 1.0))
    narrow = tape.new(weights.size * (1 / ratio)) if ratio != 1 else tape.hold(weights)
    v32 = repeated(tape, wide[2], groups)
    product = product_of(tape, weights, v32, rows.size)
    output = cast(tape, product, 1 / ratio)
    tape.drop(product, v32, weights, narrow, rows, *wide, *masks)
    return tape.replaced(output, copied(tape, output))


def _expanded(tape: Tape, x: Tensor, ratio: float) -> Tensor:
    """One head as `ratio` heads without a copy; their gradients are added up."""
    return tape.hold(x) if ratio == 1 else tape.record(tape.view(x, ratio), (), lambda grad: tape.grad_of(x))
