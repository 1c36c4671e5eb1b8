"""The two ends of the model: the embedding; the final norm, the head and the loss.

Not here: the layers between them (block.py).
"""

from __future__ import annotations

from planner.inventory import losses, ops
from planner.inventory.attention import is_written_out, mask_count
from planner.inventory.block import norm_weights, walk_norm
from planner.inventory.compute import Compute
from planner.inventory.moe import soft_cap
from planner.inventory.names import names_of
from planner.inventory.tape import LOGITS, Storage, Tape, Tensor
from planner.inventory.tensors import Size, Weight
from planner.spec import ModelSpec


def embedding_weight(model: ModelSpec) -> Weight:
    """The token table, vocab x hidden; tied models use it as the head too."""
    name = names_of(model.family).embedding
    unit = "tail" if model.tied else "embed"
    return Weight(name=name, shape=(model.vocab, model.hidden), unit=unit, split=0)


def first_weights(model: ModelSpec) -> tuple[Weight, ...]:
    """What is used before the layers: the token table, learned positions, the embedding's norm.

    All of it belongs to the tail where the table is the head too: engines then wrap both ends as one unit.
    """
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
    found = list(norm_weights(model, names_of(model.family).final_norm, "tail").values())
    if not model.tied:
        found.append(Weight(name="lm_head", shape=(model.vocab, model.hidden), unit="tail", split=0))
    if model.head_bias:
        found.append(Weight(name="lm_head.bias", shape=(model.vocab,), unit="tail", split=0))
    return tuple(found)


def walk_embedding(tape: Tape, model: ModelSpec, compute: Compute) -> Tensor:
    """Token lookup, and what positions and norms do to it."""
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
    looked_up = tape.new(size, needs_grad=weight.trainable)
    tape.record(looked_up, (), lambda grad: tape.weight_grad(weight.elements))
    output = tape.new(x.size, needs_grad=x.needs_grad or weight.trainable)

    def backward(grad: Storage) -> None:
        tape.grad_of(x, alias=grad)
        tape.grad_of(looked_up, alias=grad if looked_up.size == grad.size else None)

    tape.record(output, (), backward)
    tape.drop(looked_up)
    return output


def residual(model: ModelSpec, compute: Compute) -> Size:
    """The residual stream between layers on this rank."""
    return Size(per_token=model.hidden * compute.weight_bytes * compute.residual_share)


def rotary_tables(tape: Tape, model: ModelSpec, compute: Compute) -> tuple[Tensor, ...]:
    """What all layers of a stage share: cosines and sines, or ALiBi's line a head; the masks of attention that is
    written out; and that of packed documents, whose positions differ from row to row."""
    width = compute.weight_bytes
    tables: tuple[Size, ...] = ()
    if model.family == "deepseek_v2":
        tables = (Size(per_position=4.0 * model.rotary_dim),)  # complex numbers of two fp32
    elif model.positions == "rope":
        # Gemma 3 has one pair of tables for its sliding layers and one for the others.
        share = 0.5 if model.family == "gpt_oss" else 2.0 if model.rope_theta_local else 1.0
        each = model.rotary_dim * width * share
        tables = (Size(per_token=each) if compute.masked else Size(per_position=each),) * 2
    elif model.positions == "alibi":
        tables = (Size(per_token=model.heads * width),)
    if compute.masked:
        tables += (Size(per_pair=compute.element_bytes),)
    elif is_written_out(model, compute.kernels):
        tables += (Size(per_pair=width),) * mask_count(model, compute)
    elif model.family == "falcon":
        tables += (Size(per_pair=1.0),)
    return tuple(tape.new(size) for size in tables)


ON_NARROW_LOGITS = {
    "compiled": losses.compiled_cross_entropy,
    "recomputed": losses.recomputed_cross_entropy,
    "in-place": losses.in_place_cross_entropy,
}
"""Losses that read the logits as the head made them, whatever they compute in."""


def walk_loss(tape: Tape, x: Tensor, model: ModelSpec, compute: Compute) -> Tensor:
    """Final norm, head and loss, as the kernels have it. Lets go of x once it is normalised."""
    weights = {weight.name: weight for weight in tail_weights(model)}
    norm = norm_weights(model, names_of(model.family).final_norm, "tail")
    normal = walk_norm(tape, x, model, compute, norm)
    tape.drop(x)
    normal = compute.gather(tape, normal)
    head = weights.get("lm_head", embedding_weight(model))
    loss_kernel = compute.kernels.loss
    if loss_kernel in losses.IN_PIECES:
        tape.enter("loss")
        local = compute.local(compute.trained(head))
        share = compute.loss_share if loss_kernel == "linear-chunked" else None
        loss = losses.linear_cross_entropy(tape, normal, local, element_bytes=compute.element_bytes, share=share)
        tape.drop(normal)
        return loss
    # LitGPT's pieces are those of fine-tuning with adapters alone.
    if loss_kernel == "chunked" or (loss_kernel == "chunked-fp32" and not compute.trained(head).trainable):
        tape.enter("loss")
        in_fp32 = loss_kernel == "chunked-fp32"
        loss = losses.chunked_cross_entropy(
            tape,
            normal,
            compute.local(compute.trained(head)),
            element_bytes=compute.element_bytes,
            share=losses.CHUNK / max(losses.CHUNK, compute.seq_len) if in_fp32 else 1 / losses.PIECES,
            fp32_results=in_fp32,
            keeps_packed_input=compute.kernels.packed_input == "kept",
            scales_logits=compute.adapters is not None and compute.adapters.scales_logits,
        )
        tape.drop(normal)
        return loss
    logits = compute.linear(tape, normal, head, term=LOGITS, bias=weights.get("lm_head.bias"))
    tape.enter("loss")
    logits = compute.gather_logits(tape, logits, head)
    if model.logit_soft_cap is not None:
        logits = soft_cap(tape, logits)
    if one_kernel := ON_NARROW_LOGITS.get(loss_kernel):
        loss = one_kernel(tape, logits)
        tape.drop(normal)
        return loss
    if loss_kernel in ("megatron", "nanotron"):
        loss = losses.vocab_parallel_cross_entropy(
            tape, logits, compute.element_bytes, cast_outside=loss_kernel == "nanotron"
        )
        tape.drop(normal)
        return loss
    wide = compute.element_bytes if loss_kernel == "native" else 4.0
    logits32 = ops.cast(tape, logits, wide / compute.element_bytes)
    if loss_kernel == "shifted-fp32":
        # Transformers up to 4.44: what is upcast is the model's output, which the script holds until the step; all
        # tokens but the last are copied for the loss.
        shifted = ops.copied(tape, logits32)
        loss = losses.cross_entropy(tape, shifted)
        tape.drop(shifted, logits, normal)
        return loss
    split = compute.kernels.loss_parallel and compute.local(head).shape != head.shape
    loss = (losses.split_cross_entropy if split else losses.cross_entropy)(tape, logits32)
    tape.drop(logits32, logits, normal)
    return loss
