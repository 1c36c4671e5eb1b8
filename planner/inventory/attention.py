"""Multi-head and grouped-query attention: its weights and its walk.

Not here: latent attention (mla.py), or the residual connections and norms around it (block.py).
"""

from __future__ import annotations

from planner.inventory import fused, ops, rotary
from planner.inventory.compute import Compute
from planner.inventory.names import names_of
from planner.inventory.scores import is_math, is_written_out, math_attention, written_out_attention
from planner.inventory.tape import Tape, Tensor
from planner.inventory.tensors import Size, Weight, with_bias
from planner.inventory.ulysses import dealt_attention
from planner.spec import ModelSpec


def attention_weights(model: ModelSpec, unit: str = "layer") -> dict[str, Weight]:
    """Weights by role in the order the model code registers them.

    Roles: q, k, v or the fused qkv, output, their biases, q_norm, k_norm, sinks.
    """
    names = names_of(model.family)
    query, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim

    def named(module: str) -> str:
        return f"{names.attention_module}.{module}"

    def linear(module: str, out: int, pieces: int) -> dict[str, Weight]:
        weight = Weight(
            name=named(module),
            shape=(model.hidden, out) if names.transposed else (out, model.hidden),
            unit=unit,
            transposed=names.transposed,
            split=1 if names.transposed else 0,
            pieces=pieces,
        )
        return with_bias(weight, model.qkv_bias)

    *inputs, last = names.attention
    if len(inputs) == 1:
        made = {inputs[0]: ("qkv", linear(inputs[0], query + 2 * kv, model.kv_heads))}
    else:
        widths = ((query, model.heads), (kv, model.kv_heads), (kv, model.kv_heads))
        made = {name: (role, linear(name, *width)) for name, role, width in zip(inputs, "qkv", widths, strict=True)}
    output = Weight(
        name=named(last),
        shape=(query, model.hidden) if names.transposed else (model.hidden, query),
        unit=unit,
        transposed=names.transposed,
        split=0 if names.transposed else 1,
        pieces=model.heads,
    )
    made[last] = ("output", with_bias(output, model.output_bias))
    found: dict[str, Weight] = {}
    if model.attention_sinks:
        found["sinks"] = Weight(name=named("sinks"), shape=(model.heads,), unit=unit, split=0, pieces=model.heads)
    for name in names.registered or names.attention:
        role, weights = made[name]
        found |= {role + suffix: weight for suffix, weight in weights.items()}
    if model.qk_norm:
        for role in ("q_norm", "k_norm"):
            found[role] = Weight(name=named(role), shape=(model.head_dim,), unit=unit)
    return found


def walk_attention(
    tape: Tape,
    x: Tensor,
    model: ModelSpec,
    compute: Compute,
    table: tuple[Tensor, ...],
    weights: dict[str, Weight],
) -> Tensor:
    """The attention module's forward; `table` holds what all layers share of the positions."""
    q, k, v = _queries_keys_values(tape, x, model, compute, weights)
    for role in ("q_norm", "k_norm"):
        if role in weights:
            plain, heads = (q, model.heads) if role == "q_norm" else (k, model.kv_heads)
            fp32 = model.block == "sandwich"
            normal = compute.norm(tape, plain, weights[role], rows=compute.heads(heads), scales_in_fp32=fp32)
            tape.drop(plain)
            q, k = (normal, k) if role == "q_norm" else (q, normal)
    if model.positions == "rope" and compute.kernels.rotary == "fused":
        q, k = _turned(tape, q, table), _turned(tape, k, table)
    elif model.positions == "rope":
        ratio = compute.rotary_ratio(model)
        q, k = _rotated(tape, q, model, table, ratio), _rotated(tape, k, model, table, ratio)
    heads = compute.heads(model.heads)
    shared = table[-1] if compute.masked else None
    if compute.kernels.attention == "unfused":
        attended = fused.core_attention(
            tape,
            q,
            k,
            v,
            heads=heads,
            groups=model.heads // model.kv_heads,
            element_bytes=compute.element_bytes,
            probability=model.attention_dropout,
            mask_share=compute.mask_bytes / compute.element_bytes,
            sequence_ranks=compute.cp,
            recompute=compute.recompute == "attention",
        )
    elif compute.recompute == "attention":

        def core(inputs: tuple[Tensor, ...]) -> Tensor:
            return _core(tape, inputs, model, compute, heads, shared)

        attended = fused.recomputed(tape, (q, k, v), core)
    else:
        attended = _core(tape, (q, k, v), model, compute, heads, shared)
    tape.drop(q, k, v)
    output = compute.linear(tape, attended, weights["output"], bias=weights.get("output.bias"))
    tape.drop(attended)
    return output


def _core(
    tape: Tape,
    inputs: tuple[Tensor, ...],
    model: ModelSpec,
    compute: Compute,
    heads: int,
    shared_mask: Tensor | None,
) -> Tensor:
    """What Transformers' attention functions compute of queries, keys and values, with the kernels PyTorch picks.

    Under autocast the fp32 tables of positions, or a norm's fp32 weight, have made queries and keys fp32; autocast
    casts them here, as products are on its list, so a checkpoint around this function keeps them in fp32. Both were
    found by `executor trace`: 26.6 kB a token too much in a layer of Qwen3, 384 bytes too little in one of tiny-llama.
    """
    if not compute.autocast:
        return _attended(tape, inputs, model, compute, heads, shared_mask)
    q, k, v = inputs
    wide = model.qk_norm or model.positions == "rope"
    ratio = compute.element_bytes / compute.weight_bytes if wide else 1.0
    narrow = (ops.cast(tape, q, ratio), ops.cast(tape, k, ratio), tape.hold(v))
    attended = _attended(tape, narrow, model, compute, heads, shared_mask)
    tape.drop(*narrow)
    return attended


def _attended(
    tape: Tape,
    inputs: tuple[Tensor, ...],
    model: ModelSpec,
    compute: Compute,
    heads: int,
    shared_mask: Tensor | None,
) -> Tensor:
    q, k, v = inputs
    if compute.deals_heads:
        return dealt_attention(tape, q, k, v, heads=heads, ranks=compute.cp)
    groups = model.heads // model.kv_heads
    if is_written_out(model):
        return written_out_attention(tape, q, k, v, model, compute, heads, groups)
    if is_math(model):
        element, one = compute.element_bytes, compute.one_sequence
        return math_attention(tape, q, k, v, heads=heads, groups=groups, element_bytes=element, one_sequence=one)
    # Falcon always builds a mask, which the kernels want as numbers. One of packed documents is numbers already.
    own = model.family == "falcon" and not compute.masked
    mask = Size(per_pair=compute.element_bytes) if own else None
    repeated: tuple[Tensor, ...] = ()
    if compute.masked and groups > 1:
        # With a mask, grouped heads are repeated (integrations/sdpa_attention.py, use_gqa_in_sdpa).
        k, v = repeated = (ops.copied(tape, k, groups), ops.copied(tape, v, groups))
    workspace = compute.attention_workspace(k, v)
    attended = ops.flash_attention(tape, q, k, v, heads=heads, workspace=workspace, mask=mask, shared_mask=shared_mask)
    tape.drop(*repeated)
    return ops.laid_out(tape, attended) if model.family in PARTIAL else attended


def _queries_keys_values(
    tape: Tape, x: Tensor, model: ModelSpec, compute: Compute, weights: dict[str, Weight]
) -> tuple[Tensor, Tensor, Tensor]:
    if "qkv" not in weights:
        flat = [compute.linear(tape, x, weights[role], bias=weights.get(f"{role}.bias")) for role in "qkv"]
        if model.family == "opt":  # scales the queries before attention does
            raw, flat[0] = flat[0], ops.scaled(tape, flat[0])
            tape.drop(raw)
        q, k, v = (ops.split_heads(tape, one) for one in flat)
        tape.drop(*flat)
        return q, k, v
    fused = compute.linear(tape, x, weights["qkv"], bias=weights.get("qkv.bias"))
    total = model.heads + 2 * model.kv_heads
    parts = (model.heads / total, model.kv_heads / total, model.kv_heads / total)
    q, k, v = (ops.split if model.family in ("gpt2", "gpt_neox") else ops.slices)(tape, fused, parts)
    tape.drop(fused)
    if model.family == "bloom":
        return _each(tape, (q, k, v), (1.0, 1.0, 1.0))
    if model.family == "falcon":  # keys and values repeated for every query head, or picked out
        groups = model.heads / model.kv_heads if model.layer_norms == 2 else 1.0
        keys, values = ops.copied(tape, k, groups), ops.copied(tape, v, groups)
        tape.drop(k, v)
        return q, keys, values
    return q, k, v


def _each(
    tape: Tape, tensors: tuple[Tensor, Tensor, Tensor], ratios: tuple[float, float, float]
) -> tuple[Tensor, Tensor, Tensor]:
    """Copies in the order of axes that the products want."""
    q, k, v = (ops.copied(tape, one, ratio) for one, ratio in zip(tensors, ratios, strict=True))
    tape.drop(*tensors)
    return q, k, v


def _rotated(tape: Tape, x: Tensor, model: ModelSpec, table: tuple[Tensor, ...], ratio: float) -> Tensor:
    """Rotary positions on all of a head or on a part of it, `ratio` times as wide as x; lets go of x."""
    if model.family not in PARTIAL:
        turn = rotary.rotary_halves if model.family == "gpt_oss" else rotary.rotary_eager
        turned = turn(tape, x, (table[0], table[1]), ratio=ratio)
        tape.drop(x)
        return turned
    part = model.rotary_dim / model.head_dim
    turning, still = ops.slices(tape, x, (part, 1 - part))
    tape.drop(x)
    turned = rotary.rotary_eager(tape, turning, (table[0], table[1]), ratio=ratio)
    tape.drop(turning)
    wide = ops.cast(tape, still, ratio)
    whole = ops.joined(tape, (turned, wide))
    tape.drop(turned, wide, still)
    return whole


def _turned(tape: Tape, x: Tensor, table: tuple[Tensor, ...]) -> Tensor:
    """Rotary positions in one kernel, which leaves a part of the head alone by itself; lets go of x."""
    turned = fused.rotary(tape, x, table[:2])
    tape.drop(x)
    return turned


PARTIAL = ("phi", "phi3", "gpt_neox")
"""Families whose code turns a slice of each head and joins it with the rest, be the rest empty."""
