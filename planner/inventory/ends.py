"""The two ends of the model: the embedding; the final norm, the head and the loss.

Not here: the layers between them (block.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from planner.basics.arith import Number, is_column
from planner.inventory import ops
from planner.inventory.attention import builds_mask, is_written_out, mask_count
from planner.inventory.block import norm_weights, walk_norm
from planner.inventory.compute import HF, Compute
from planner.inventory.names import names_of
from planner.inventory.narrow import NF4
from planner.inventory.ops import cast, unpacked
from planner.inventory.played import (
    described_first,
    described_weights,
    head_weight,
    play_embedding,
    play_tail,
    shared_tables,
)
from planner.inventory.tape import LOGITS, Storage, Tape, Tensor
from planner.inventory.tensors import Size, Weight
from planner.spec import Kernels, ModelSpec


def cross_entropy(tape: Tape, logits: Tensor) -> Tensor:
    """log-softmax and negative log-likelihood in fp32: keeps the log-probabilities, makes two gradients as large."""
    log_probabilities = tape.derived(logits, keeps_result=True)
    loss = tape.new(Size(fixed=4.0), needs_grad=logits.needs_grad)
    tape.record(loss, (log_probabilities,), lambda grad: tape.grad_of(log_probabilities))
    return tape.replaced(log_probabilities, loss)


def split_cross_entropy(tape: Tape, logits: Tensor) -> Tensor:
    """`cross_entropy` on a rank's part of the vocabulary, operation by operation.

    Forward makes shifted logits and their exponentials beside the log-probabilities; backward the targets' part, the
    softmax, their sum and its product with the loss's gradient.
    torch 2.13, distributed/tensor/parallel/loss.py: _log_softmax, _nll_loss_and_log_softmax_backward.
    """
    shifted = tape.allocate(logits.size, LOGITS)
    tape.release(tape.allocate(logits.size, LOGITS))
    log_probabilities = tape.new(logits.size, needs_grad=logits.needs_grad, term=LOGITS)
    tape.release(shifted)
    loss = tape.new(Size(fixed=4.0), needs_grad=logits.needs_grad)

    def backward(grad: Storage) -> None:
        targets, softmax, both = (tape.allocate(logits.size, LOGITS) for _ in range(3))
        tape.release(softmax)
        tape.grad_of(logits)
        tape.release(targets, both)

    tape.record(loss, (log_probabilities,), backward)
    tape.drop(log_probabilities)
    return loss


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


def pieced_cross_entropy(tape: Tape, x: Tensor, head: Weight, model: ModelSpec, compute: Compute) -> Tensor:
    """Head and loss of this project's trainer, a piece of the tokens at a time (executor/worker/model/losses.py).

    Both gradients are made in forward, the weight's in its own format, and wait for backward. A piece's logits are
    converted to fp32, of which log-probabilities are made that become the gradient; capped logits keep their tangent
    until then. Under autocast the whole weight and each piece of the input are converted for it.
    """
    vocab, hidden = head.features
    element, own, tokens = compute.element_bytes, compute.weight_bytes, compute.loss_share
    narrow, wide, inputs = (Size(per_token=tokens * each) for each in (vocab * element, vocab * 4.0, hidden * element))
    converts, tangents = element < own, () if model.logit_soft_cap is None else (wide,)
    tape.weight = head.elements
    input_grad = tape.new(x.size) if x.needs_grad else None
    weight_grad = tape.allocate(Size(fixed=head.elements * own)) if head.trainable else None
    operands = [tape.allocate(Size(fixed=head.elements * element)), tape.allocate(inputs)] if converts else []
    logits = tape.allocate(narrow, LOGITS)
    if element < 4:
        logits = _instead(tape, logits, wide)
    kept = [tape.allocate(one, LOGITS) for one in tangents]
    gradient = _instead(tape, logits, wide)
    tape.release(*kept)
    if element < 4:
        gradient = _instead(tape, gradient, narrow)
    if converts:
        tape.release(tape.allocate(inputs))
        tape.release(*([tape.allocate(Size(fixed=head.elements * element))] if head.trainable else []))
    tape.release(gradient, *operands)
    loss = tape.new(Size(fixed=4.0), needs_grad=x.needs_grad or head.trainable)

    def backward(grad: Storage) -> None:
        if weight_grad is not None:
            tape.release(weight_grad)  # it is handed on as it is
            tape.weight_grad(head.elements)
        if input_grad is not None:
            tape.grad_of(x, alias=input_grad.storage)

    tape.record(loss, () if input_grad is None else (input_grad,), backward)
    tape.weight = 0
    if input_grad is not None:
        tape.drop(input_grad)
    return loss


def _instead(tape: Tape, old: Storage, size: Size) -> Storage:
    """Logits, or what is made of them, in another format, once they are there: the old ones are let go."""
    made = tape.allocate(size, LOGITS)
    tape.release(old)
    return made


def cross_entropy_in_place(tape: Tape, logits: Tensor, compute: Compute, vocab: int) -> Tensor:
    """Cross-entropy of this project's trainer that writes the gradient over the logits, a piece of the tokens at a
    time: a piece is converted to fp32, and log-probabilities are made of it (executor/worker/model/losses.py). Takes
    over the variable."""
    wide = Size(per_token=compute.loss_share * vocab * 4.0)
    converted = [tape.allocate(wide, LOGITS)] if compute.element_bytes < 4 else []
    tape.release(tape.allocate(wide, LOGITS), *converted)
    return in_place_cross_entropy(tape, logits)


IN_PIECES = ("fused-linear", "linear-chunked", "trainer-chunked")
"""Losses that make the head's product too, a piece of the tokens at a time."""
TRAINERS = ("trainer-chunked", "trainer-in-place")
"""Losses of executor/worker/model/losses.py."""
MOST_PIECES = 16
"""Pieces of a sequence: each reads the head's whole weight, and of 8,192 tokens one in 16 has 512, enough rows for a
product to be limited by its arithmetic."""
TARGET_BYTES = 4 * 2**30
"""Bytes of fp32 logits that a piece of Unsloth's loss may have, were they written out."""


def pieces_of(parts: Kernels, model: ModelSpec) -> int:
    """Pieces in which head and loss take each sequence, of Liger's loss as many as the vocabulary is wider than the
    hidden size (ops/fused_linear_cross_entropy.py, inc_factor), of the trainer's no more than MOST_PIECES; 1 of others.
    """
    wider = -(-model.vocab // model.hidden)
    return {"fused-linear": wider, **dict.fromkeys(TRAINERS, min(wider, MOST_PIECES))}.get(parts.loss, 1)


def piece_share(parts: Kernels, tokens: Number, rank_seq_len: Number, model: ModelSpec) -> float:
    """The part of a micro-batch's tokens whose logits are there at once, or less of a column, as a bound.

    Of the trainer's losses each sequence is cut into `pieces_of`. Of Unsloth's it is all tokens where their fp32 logits
    are within TARGET_BYTES, else a number of pieces that four divides: unslothai/unsloth-zoo ce232d6,
    fused_losses/cross_entropy_loss.py, get_chunk_size; where less than twice as much is free, pieces are smaller.
    torch.compile writes the gradient of a piece's 16-bit logits over them (torch 2.13).
    """
    if parts.loss in TRAINERS:
        pieces = pieces_of(parts, model)
        return 1 / pieces if is_column(rank_seq_len) else float(math.ceil(rank_seq_len / pieces) / rank_seq_len)
    if parts.loss != "linear-chunked":
        return 1.0
    if is_column(tokens):
        return 0.0
    exact = tokens * model.vocab * 4 / TARGET_BYTES
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


# -- Losses ------------------------------------------------------------------------------------------------------------


def embedding_weight(model: ModelSpec) -> Weight:
    """The token table, vocab x hidden; tied models use it as the head too."""
    if model.described is not None:
        return described_first(model)[0]
    name = names_of(model.family).embedding
    unit = "tail" if model.tied else "embed"
    return Weight(name=name, shape=(model.vocab, model.hidden), unit=unit, split=0)


def first_weights(model: ModelSpec) -> tuple[Weight, ...]:
    """What is used before the layers: the token table, learned positions, the embedding's norm.

    All of it belongs to the tail where the table is the head too: engines then wrap both ends as one unit.
    """
    if model.described is not None:
        return described_first(model)
    names = names_of(model.family)
    found = [embedding_weight(model)]
    unit = found[0].unit
    if model.positions == "learned":
        rows = model.max_seq_len + POSITION_OFFSET.get(model.family, 0)
        found.append(Weight(name=names.positions, shape=(rows, model.hidden), unit=unit))
    if model.embedding_norm:
        found += norm_weights(model, names.embedding_norm, unit).values()
    return tuple(found)


POSITION_OFFSET = {"opt": 2}
"""Rows of the table of positions that no position uses (OPTLearnedPositionalEmbedding)."""


def tail_weights(model: ModelSpec) -> tuple[Weight, ...]:
    """The final norm and, unless tied, the head; the head's bias."""
    if model.described is not None:
        first = {one.name for one in first_weights(model)} if model.tied else set()
        return tuple(one for one in described_weights(model, "tail") if one.name not in first)
    found = list(norm_weights(model, names_of(model.family).final_norm, "tail").values())
    if not model.tied:
        found.append(Weight(name="lm_head", shape=(model.vocab, model.hidden), unit="tail", split=0))
    if model.head_bias:
        found.append(Weight(name="lm_head.bias", shape=(model.vocab,), unit="tail", split=0))
    return tuple(found)


def walk_embedding(tape: Tape, model: ModelSpec, compute: Compute) -> Tensor:
    """Token lookup, and what positions and norms do to it."""
    if model.described is not None:
        return play_embedding(tape, model, compute)
    weight = compute.local(compute.trained(embedding_weight(model)))
    tape.weight = weight.elements
    # Transformers asks for the gradient of what a frozen table gives too where layers run again, for checkpoints that
    # pass none on otherwise (activation_checkpointing_enable, enable_input_require_grads).
    x = tape.new(residual(model, compute), needs_grad=weight.trainable or compute.runs_layers_again)

    def backward(grad: Storage) -> None:
        # Tied: the head's gradient waits for this one, and the two are added into a third tensor.
        if weight.trainable:
            tape.weight_grad(2 * weight.elements if model.tied else weight.elements)

    # What a frozen table gives is a leaf where it is asked for a gradient, and stays; of Gemma the scaled one is, which
    # its first layer keeps anyway.
    leaf = not weight.trainable and model.block != "sandwich"
    tape.record(x, (x,) if leaf else (), backward)
    tape.weight = 0
    if model.block == "sandwich":  # Gemma multiplies by the root of the hidden size
        x = tape.replaced(x, ops.scaled(tape, x))
    if model.positions == "learned":
        x = tape.replaced(x, _with_positions(tape, x, model, compute))
    if model.family in ("gpt2", "gpt_neox"):
        x = compute.dropout(tape, x, model.dropout, compute.weight_bytes)
    if model.embedding_norm:
        names = names_of(model.family)
        x = tape.replaced(x, walk_norm(tape, x, model, compute, norm_weights(model, names.embedding_norm, "embed")))
    return x


def _with_positions(tape: Tape, x: Tensor, model: ModelSpec, compute: Compute) -> Tensor:
    """`x + table[position]`: one row a position, or one a token where the model code looks up every token's."""
    name = names_of(model.family).positions
    weight = next(compute.trained(one) for one in first_weights(model) if one.name == name)
    size = x.size if model.family == "opt" else Size(per_position=x.size.per_token)
    index = tape.new(_positions(model))
    looked_up = tape.new(size, needs_grad=weight.trainable)
    tape.record(looked_up, (index,), lambda grad: tape.weight_grad(weight.elements))
    tape.drop(index)
    output = tape.new(x.size, needs_grad=x.needs_grad or weight.trainable)

    def backward(grad: Storage) -> None:
        tape.grad_of(x, alias=grad)
        tape.grad_of(looked_up, alias=grad if looked_up.size == grad.size else None)

    tape.record(output, (), backward)
    tape.drop(looked_up)
    return output


def _positions(model: ModelSpec) -> Size:
    """Indices of positions (int64): OPT counts those of every token."""
    return Size(per_token=8.0) if model.family == "opt" else Size(per_position=8.0)


def residual(model: ModelSpec, compute: Compute) -> Size:
    """The residual stream between layers on this rank."""
    return Size(per_token=model.hidden * compute.weight_bytes * compute.residual_share)


WITHOUT_POSITIONS = ("bloom", "gpt2")
"""Families whose layers are called without indices of positions, or with those that the embedding keeps."""


def rotary_tables(tape: Tape, model: ModelSpec, compute: Compute) -> tuple[Tensor, ...]:
    """What all layers of a stage share: cosines and sines, or ALiBi's line a head; the indices of positions that
    Transformers' code calls them with, for a checkpoint to keep; the masks of attention that is written out; and that
    of packed documents, whose positions differ from row to row and are the batch's own."""
    if model.described is not None:
        return shared_tables(tape, model, compute)
    width = compute.weight_bytes
    tables: tuple[Size, ...] = ()
    if model.family == "deepseek_v2":
        tables = (Size(per_position=4.0 * model.rotary_dim),)  # complex numbers of two fp32
    elif model.positions == "rope":
        # Gemma 3 has one pair of tables for its sliding layers and one for the others.
        both = model.rope_theta_local and model.layers >= model.full_attention_every
        share = 0.5 if model.family == "gpt_oss" else 2.0 if both else 1.0
        each = model.rotary_dim * width * share
        tables = (Size(per_token=each) if compute.masked else Size(per_position=each),) * 2
    elif model.positions == "alibi":
        tables = (Size(per_token=model.heads * width),)
    own = compute.kernels.holds_inputs or compute.kernels == HF  # older plans lack `holds_inputs`
    if own and not compute.masked and model.family not in WITHOUT_POSITIONS:
        tables += (_positions(model),)
    if compute.masked:
        tables += (Size(per_pair=compute.element_bytes),)
    elif is_written_out(model, compute.kernels):
        tables += (Size(per_pair=width),) * mask_count(model, compute)
    elif builds_mask(model, compute):
        tables += (Size(per_square=1.0),)
    return tuple(tape.new(size) for size in tables)


ON_NARROW_LOGITS = {
    "compiled": compiled_cross_entropy,
    "recomputed": recomputed_cross_entropy,
    "in-place": in_place_cross_entropy,
}
"""Losses that read the logits as the head made them, whatever they compute in."""


def walk_loss(tape: Tape, x: Tensor, model: ModelSpec, compute: Compute) -> Tensor:
    """Final norm, head and loss, as the kernels have it. Lets go of x once it is normalised."""
    after: Callable[[Tensor], Tensor] | None = None
    if model.described is not None:
        normal, after = play_tail(tape, x, model, compute)
        tape.end_model()
        head, bias = head_weight(model)
    else:
        weights = {weight.name: weight for weight in tail_weights(model)}
        norm = norm_weights(model, names_of(model.family).final_norm, "tail")
        normal = walk_norm(tape, x, model, compute, norm)
        tape.drop(x)
        tape.end_model()
        normal = compute.gather(tape, normal)
        head, bias = weights.get("lm_head", embedding_weight(model)), weights.get("lm_head.bias")
    loss_kernel = compute.kernels.loss
    if loss_kernel in IN_PIECES:  # what the head's weight is used for belongs to the unit that has it
        local = compute.local(compute.trained(head))
        if loss_kernel == "trainer-chunked":
            loss = pieced_cross_entropy(tape, normal, local, model, compute)
        else:
            share = compute.loss_share if loss_kernel == "linear-chunked" else None
            loss = linear_cross_entropy(tape, normal, local, element_bytes=compute.element_bytes, share=share)
        tape.enter("loss")
        tape.drop(normal)
        return loss
    # LitGPT's pieces are those of fine-tuning with adapters alone.
    if loss_kernel == "chunked" or (loss_kernel == "chunked-fp32" and not compute.trained(head).trainable):
        tape.enter("loss")
        in_fp32 = loss_kernel == "chunked-fp32"
        loss = chunked_cross_entropy(
            tape,
            normal,
            compute.local(compute.trained(head)),
            element_bytes=compute.element_bytes,
            share=CHUNK / max(CHUNK, compute.seq_len) if in_fp32 else 1 / PIECES,
            fp32_results=in_fp32,
            keeps_packed_input=compute.kernels.packed_input == "kept",
            scales_logits=compute.adapters is not None and compute.adapters.scales_logits,
        )
        tape.drop(normal)
        return loss
    logits, element = compute.linear(tape, normal, head, term=LOGITS, bias=bias), compute.element_bytes
    tape.enter("loss")
    logits = compute.gather_logits(tape, logits, head)
    if after is not None:
        logits = after(logits)
        element = logits.size.per_token / head.features[0]  # some make them fp32 themselves
    elif model.logit_soft_cap is not None:
        logits = ops.soft_cap(tape, logits)
    if loss_kernel == "trainer-in-place":
        loss = cross_entropy_in_place(tape, logits, compute, model.vocab)
        tape.drop(normal)
        return loss
    if one_kernel := ON_NARROW_LOGITS.get(loss_kernel):
        loss = one_kernel(tape, logits)
        tape.drop(normal)
        return loss
    if loss_kernel in ("megatron", "nanotron"):
        loss = vocab_parallel_cross_entropy(tape, logits, compute.element_bytes, cast_outside=loss_kernel == "nanotron")
        tape.drop(normal)
        return loss
    wide = compute.element_bytes if loss_kernel == "native" else 4.0
    logits32 = ops.cast(tape, logits, wide / element)
    if loss_kernel == "shifted-fp32":
        # Transformers up to 4.44: what is upcast is the model's output, which the script holds until the step; all
        # tokens but the last are copied for the loss.
        shifted = ops.copied(tape, logits32)
        loss = cross_entropy(tape, shifted)
        tape.drop(shifted, logits, normal)
        return loss
    split = compute.kernels.loss_parallel and compute.local(head).shape != head.shape
    loss = (split_cross_entropy if split else cross_entropy)(tape, logits32)
    tape.drop(logits32, logits, normal)
    return loss
