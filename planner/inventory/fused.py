"""Fused kernels on a tape: one operation where Transformers' modules take several, and what it keeps for backward.

Written after Megatron-LM's, Transformer Engine's, flash-attn's and Liger's autograd functions; each docstring names
its own. Not here: the eager operations (ops.py), or which model code calls what (attention.py, mlp.py, ends.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from planner.basics.arith import Number, is_column
from planner.inventory.forms import NF4
from planner.inventory.ops import cast, copied, dropout, product_of, unpacked
from planner.inventory.tape import LOGITS, Storage, Tape, Tensor
from planner.inventory.tensors import Size, Weight
from planner.spec import Kernels


def rms_norm(tape: Tape, x: Tensor, weight: Weight, *, share: float = 1.0, rows: int = 1) -> Tensor:
    """RMSNorm in one kernel: keeps its input as it came and the reciprocal root (fp32 a row); one kernel makes both
    gradients.

    Apex's fused_rms_norm, Transformer Engine, flash-attn's Triton norm and torch's own rms_norm alike. `share` and
    `rows` as in ops.rms_norm_eager.
    """
    output = tape.new(x.size, needs_grad=x.needs_grad or weight.trainable)
    root = tape.new(Size(per_token=4.0 * rows * share))

    def backward(grad: Storage) -> None:
        tape.grad_of(x)
        if weight.trainable:
            tape.weight_grad(weight.elements)

    tape.record(output, (x, root), backward)
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


def recomputed(tape: Tape, inputs: tuple[Tensor, ...], forward: Callable[[tuple[Tensor, ...]], Tensor]) -> Tensor:
    """A part of a layer that keeps only its inputs; its forward runs again when backward reaches it."""
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

    return tape.record(output, inputs, backward)


def vocab_parallel_cross_entropy(tape: Tape, logits: Tensor, element_bytes: float, *, cast_outside: bool) -> Tensor:
    """Cross-entropy on this rank's part of the vocabulary: keeps the fp32 softmax, which becomes the gradient. Takes
    over the variable.

    Megatron-LM casts inside its function and works in place on that one copy. nanotron casts before it
    (`cast_outside`), and its function subtracts the maximum into a second fp32 tensor
    (parallel/tensor_parallel/functional.py, _ShardedCrossEntropy), so two are alive at once.
    """
    ratio = 4.0 / element_bytes
    wide = tape.replaced(logits, cast(tape, logits, ratio)) if cast_outside else logits
    softmax = tape.new(logits.size * ratio, needs_grad=logits.needs_grad, term=LOGITS)
    loss = tape.new(Size(fixed=4.0), needs_grad=logits.needs_grad)

    def backward(grad: Storage) -> None:
        in_place = wide.size == softmax.size
        tape.grad_of(wide, alias=softmax.storage if in_place else None)

    tape.record(loss, (softmax,), backward)
    tape.drop(softmax, wide)
    return loss


def in_place_cross_entropy(tape: Tape, logits: Tensor) -> Tensor:
    """Cross-entropy on this rank's part of the vocabulary whose forward writes the gradient over the 16-bit logits.
    Takes over the variable.

    TransformerEngine up to 2.17, pytorch/cross_entropy.py and triton/cross_entropy.py (X_ptr); from commit 01bbe3eea
    (July 2026) on it writes an fp32 gradient beside them.
    """
    loss = tape.new(Size(fixed=4.0), needs_grad=logits.needs_grad)
    tape.record(loss, (logits,), lambda grad: tape.grad_of(logits, alias=logits.storage))
    tape.drop(logits)
    return loss


def recomputed_cross_entropy(tape: Tape, logits: Tensor) -> Tensor:
    """Cross-entropy on fp32 logits as torch.compile makes it: their maximum and the sum of their exponentials stay, two
    fp32 figures a token beside the 16-bit logits, of which backward makes the 16-bit gradient. Takes over the variable.

    torch 2.13, the graphs that inductor makes of torchtitan's cross_entropy_loss (components/loss.py): the cast and
    the softmax are made again.
    """
    loss = tape.new(Size(fixed=4.0), needs_grad=logits.needs_grad)
    figures = tape.new(Size(per_token=8.0))
    tape.record(loss, (logits, figures), lambda grad: tape.grad_of(logits))
    tape.drop(logits, figures)
    return loss


def compiled_cross_entropy(tape: Tape, logits: Tensor) -> Tensor:
    """Cross-entropy on this rank's part of the vocabulary as torch.compile makes it of Megatron-LM's in 16 bits: the
    softmax is written over the logits, and backward makes two more, the softmax without the targets and its product
    with the gradient. Takes over the variable.

    Galvatron 3, core/runtime/transformer/fused_kernels.py, calculate_gradients. That there are two is read off its
    published peaks, whose part after forward and part on top differ by two of them at 1, 2, 4 and 8 tensor ranks.
    """
    loss = tape.new(Size(fixed=4.0), needs_grad=logits.needs_grad)

    def backward(grad: Storage) -> None:
        without_targets = tape.allocate(logits.size, LOGITS)
        tape.grad_of(logits)
        tape.release(without_targets)

    tape.record(loss, (logits,), backward)
    tape.drop(logits)
    return loss


def linear_cross_entropy(
    tape: Tape, x: Tensor, weight: Weight, *, element_bytes: float, share: float | None = None
) -> Tensor:
    """Head and loss together, a piece of the tokens at a time (Liger's FusedLinearCrossEntropy).

    Both gradients are made in forward and kept; of the logits only a piece is alive, with `share` of the tokens, or as
    many times fewer than all as the vocabulary is wider than the hidden size.
    """
    out_features, in_features = weight.features
    rows = x.size.per_token / (element_bytes * in_features)
    piece_width = min(in_features, out_features) if share is None else out_features * share
    piece = Size(per_token=rows * element_bytes * piece_width)
    tape.weight = weight.elements
    input_grad = tape.new(x.size)
    weight_grad = tape.new(Size(fixed=weight.elements * element_bytes)) if weight.trainable else None
    # the logits in their own format, the gradient written over them
    tape.release(tape.allocate(piece, LOGITS))
    loss = tape.new(Size(fixed=4.0), needs_grad=x.needs_grad or weight.trainable)

    def backward(grad: Storage) -> None:
        tape.grad_of(x, alias=input_grad.storage)
        if weight_grad is not None:
            tape.weight_grad(weight.elements)

    kept = (input_grad,) if weight_grad is None else (input_grad, weight_grad)
    tape.record(loss, kept, backward)
    tape.weight = 0
    tape.drop(*kept)
    return loss


IN_PIECES = ("fused-linear", "linear-chunked")
"""Losses that make the head's product too, a piece of the tokens at a time."""
TARGET_BYTES = 4 * 2**30
"""Bytes of fp32 logits that a piece of Unsloth's loss may have, were they written out."""


def piece_share(parts: Kernels, tokens: Number, vocab: int) -> float:
    """The part of a micro-batch's tokens whose logits are there at once: of Unsloth's loss all where their fp32 logits
    are within TARGET_BYTES, else a number of pieces that four divides. None of a column, as a bound.

    unslothai/unsloth-zoo ce232d6, fused_losses/cross_entropy_loss.py, get_chunk_size; where less than twice as much is
    free, pieces are smaller. torch.compile writes the gradient of a piece's 16-bit logits over them (torch 2.13).
    """
    if parts.loss != "linear-chunked":
        return 1.0
    if is_column(tokens):
        return 0.0
    exact = tokens * vocab * 4 / TARGET_BYTES
    return 1.0 if exact <= 1 else 0.25 / math.ceil(exact / 4)


CHUNK = 128
"""Tokens of a sequence in a piece of LitGPT's head and loss (lm_head_chunk_size, chunked_cross_entropy)."""
PIECES = 8
"""Pieces of a sequence in torchtune's (CEWithChunkedOutputLoss, num_output_chunks)."""


def chunked_cross_entropy(
    tape: Tape,
    x: Tensor,
    weight: Weight,
    *,
    element_bytes: float,
    share: float,
    fp32_results: bool,
    keeps_packed_input: bool = False,
    scales_logits: bool = False,
) -> Tensor:
    """Head and loss on pieces of the sequence, of which all logits stay; a piece has `share` of the tokens.

    torchtune's logits stay in the head's format, and fp32 copies and log-probabilities are a piece's
    (modules/loss/ce_chunked_output_loss.py, compiled). LitGPT's become fp32 all together (`fp32_results`, Fabric's
    convert_output): the training loop holds these, the graph their log-probabilities. Backward makes a piece's
    gradients in fp32, then in the head's format; gradients of a trained head are added up piece by piece. A head whose
    results are scaled by trained numbers (`scales_logits`) keeps them.
    """
    vocab, hidden = weight.features
    rows = x.size.per_token / (element_bytes * hidden)
    narrow, wide = (Size(per_token=rows * vocab * each) for each in (element_bytes, 4.0))
    needs_grad = x.needs_grad or weight.trainable
    tape.weight = weight.elements
    plain = unpacked(tape, weight, element_bytes, twice=keeps_packed_input)
    logits = tape.new(narrow, needs_grad=needs_grad, term=LOGITS)
    tape.release(*plain)
    kept = [logits]
    if fp32_results:
        kept = [tape.new(wide, term=LOGITS)]
        if scales_logits:
            kept.append(logits)
        else:
            tape.drop(logits)
        kept.append(tape.new(wide, term=LOGITS))
    else:
        tape.release(tape.allocate(wide * share, LOGITS), tape.allocate(wide * share, LOGITS))
    loss = tape.new(Size(fixed=4.0), needs_grad=needs_grad)

    def backward(grad: Storage) -> None:
        tape.release(tape.allocate(wide * share, LOGITS), tape.allocate(wide * share, LOGITS))
        piece = tape.allocate(narrow * share, LOGITS)
        again = unpacked(tape, weight, element_bytes, twice=keeps_packed_input)
        if weight.trainable:
            summed = tape.allocate(Size(fixed=weight.elements * element_bytes))
            tape.weight_grad(weight.elements)
            tape.release(summed)
        tape.grad_of(x)
        tape.release(piece, *again)

    keeps_x = weight.trainable or (weight.form in NF4 and keeps_packed_input)
    tape.record(loss, (*kept, x) if keeps_x else kept, backward)
    tape.weight = 0
    tape.drop(*kept)
    return loss
