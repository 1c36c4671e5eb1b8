"""Fused kernels on a tape: one operation where Transformers' modules take several, and what it keeps for backward.

Written after Megatron-LM's, Transformer Engine's, flash-attn's and Liger's autograd functions; each docstring names
its own. Not here: the eager operations (ops.py), or which model code calls what (attention.py, mlp.py, ends.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from planner.inventory.ops import copied, dropout, product_of
from planner.inventory.tape import Storage, Tape, Tensor
from planner.inventory.tensors import Size, Weight


def rms_norm(tape: Tape, x: Tensor, weight: Weight, *, share: float = 1.0, rows: int = 1) -> Tensor:
    """RMSNorm in one kernel: keeps its input as it came and the reciprocal root (fp32 a row); one kernel makes both
    gradients.

    Apex's fused_rms_norm, Transformer Engine, flash-attn's Triton norm and torch's own rms_norm alike. `share` and
    `rows` as in ops.rms_norm_eager. An input that is made again of something smaller (torch.compile) stays as that.
    """
    output = tape.new(x.size, needs_grad=x.needs_grad or weight.trainable)
    root = tape.new(Size(per_token=4.0 * rows * share))

    def backward(grad: Storage) -> None:
        tape.grad_of(x)
        if weight.trainable:
            tape.weight_grad(weight.elements)

    tape.record(output, (x if x.source is None else x.source, root), backward)
    tape.drop(root)
    return output


def rotary(tape: Tape, x: Tensor, table: Sequence[Tensor]) -> Tensor:
    """Rotary positions in one kernel (flash-attn's, Transformer Engine's): keeps only the shared tables."""
    return tape.derived(x, saved=table)


def gated(tape: Tape, gate: Tensor, up: Tensor, *, kept: bool = True, in_place: bool = False) -> Tensor:
    """`act(gate) * up` in one kernel (Megatron-LM's SwiGLUFunction): keeps gate and up.

    With `kept` False the product is made again in backward instead of staying for the next matrix product. Gradients
    are written over gate and up where it works `in_place`, and the product over its own (Unsloth, kernels/swiglu.py,
    swiglu_DWf_DW_dfg_kernel).
    """
    output = tape.new(up.size, needs_grad=gate.needs_grad or up.needs_grad)

    def backward(grad: Storage) -> None:
        tape.grad_of(gate, alias=gate.storage if in_place else None)
        tape.grad_of(up, alias=up.storage if in_place else None)

    tape.record(output, (gate, up), backward)
    if not kept or in_place:
        output.source, output.discarded = tape.hold(up), True
    return output


def activated(tape: Tape, x: Tensor, *, kept: bool = True) -> Tensor:
    """A plain activation in one kernel with its bias (Megatron-LM's bias_gelu): keeps its input; `kept` as in gated."""
    output = tape.derived(x, saved=(x,))
    if not kept:
        output.source, output.discarded = tape.hold(x), True
    return output


def core_attention(
    tape: Tape,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    heads: int,
    groups: int,
    element_bytes: float,
    probability: float = 0.0,
    mask_share: float = 0.5,
    sequence_ranks: int = 1,
    recompute: bool = False,
) -> Tensor:
    """softmax(q k) v with the scores of every pair of tokens as tensors: Megatron-LM's DotProductAttention.

    Keeps q, k, v, the softmax's result and, with dropout, its mask and result: 5 bytes a head and pair in 16 bits
    (Korthikanti et al. 2022, section 4.1). Scaling, masking and softmax are one kernel that writes its gradient in
    place. Keys and values of grouped queries are repeated. `recompute` is Megatron's selective recomputation: q, k, v
    are kept and the rest is made again.
    """

    def forward(tensors: tuple[Tensor, ...]) -> Tensor:
        rows, keys, values = tensors
        if groups > 1:
            keys, values = copied(tape, keys, groups), copied(tape, values, groups)
        else:
            tape.hold(keys), tape.hold(values)
        pairs = Size(per_pair=element_bytes * heads * sequence_ranks)
        scores = product_of(tape, rows, keys, pairs)
        softmax = tape.derived(scores, keeps_result=True, passes_on=True)
        tape.drop(scores, keys)
        dropped = tape.replaced(softmax, dropout(tape, softmax, probability, mask_share))
        attended = product_of(tape, dropped, values, rows.size)
        tape.drop(dropped, values)
        return attended

    return recomputed(tape, (q, k, v), forward) if recompute else forward((q, k, v))


def recomputed(
    tape: Tape,
    inputs: tuple[Tensor, ...],
    forward: Callable[[tuple[Tensor, ...]], Tensor],
    beside: Sequence[Tensor] = (),
) -> Tensor:
    """A part of a layer that keeps only its inputs, and what all layers share of them (`beside`); its forward runs
    again when backward reaches it."""
    if not tape.keeping:
        return forward(inputs)
    nodes, tape.nodes = tape.nodes, []
    tape.keeping = False
    output = forward(inputs)
    tape.keeping = True
    tape.nodes = nodes

    def backward(grad: Storage) -> None:
        outer, tape.nodes = tape.nodes, []
        again = tuple(tape.view(one) for one in inputs)
        result = forward(again)
        inner, tape.nodes = tape.nodes, outer
        tape.drop(result)
        grad.holders += 1
        tape.grads[result] = grad
        tape.play(inner)
        tape.drop(*again)
        for one, copy in zip(inputs, again, strict=True):
            value = tape.grads.pop(copy, None)
            if value is not None:
                tape.grad_of(one, alias=value)
                tape.release(value)

    return tape.record(output, (*inputs, *beside), backward)
