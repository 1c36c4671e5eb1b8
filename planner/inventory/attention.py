"""Attention, of several heads, of groups of queries, or of latents (MLA): its weights and its walk, rotary positions,
and scores where they are written out.

Not here: the residual connections and norms around it (block.py).
"""

from __future__ import annotations

from functools import partial

from planner.inventory import functions, fused, ops
from planner.inventory.compute import HF, Compute, ModelPass
from planner.inventory.devices import is_math
from planner.inventory.names import names_of
from planner.inventory.ops import add, cast, cloned, copied, dropout, joined, product_of, scaled, slices, softmax, split
from planner.inventory.packaged import projection_of
from planner.inventory.tape import Storage, Tape, Tensor
from planner.inventory.tensors import NOTHING, Size, Weight, matrix, with_bias
from planner.inventory.ulysses import dealt_attention
from planner.spec import Kernels, Mla, ModelSpec


def is_written_out(model: ModelSpec, kernels: Kernels) -> bool:
    """Whether this model's attention is computed without a fused kernel."""
    if model.described is not None:
        return False  # its operations say so themselves
    if kernels.attention == "eager" or model.positions == "alibi":
        return True
    # FlashAttention and flex_attention take a soft cap; torch's scaled_dot_product_attention does not.
    capped = model.attention_soft_cap is not None and kernels.attention in ("flash", "unfused")
    return capped or (model.attention_sinks and not kernels.fused_sinks)


def has_scores(model: ModelSpec, kernels: Kernels, *, on_cpu: bool) -> bool:
    """Whether scores of every pair of tokens exist as tensors, by the family's code or by PyTorch's."""
    return is_written_out(model, kernels) or is_math(model, kernels, on_cpu=on_cpu)


def mask_count(model: ModelSpec, compute: Compute) -> int:
    """Masks of numbers that all layers share: of packed documents, or of attention that is written out, where layers
    that slide have one of their own."""
    if compute.masked:
        return 1
    return (2 if model.sliding_window else 1) if is_written_out(model, compute.kernels) else 0


def builds_mask(model: ModelSpec, compute: Compute) -> bool:
    """Whether layers share a mask of booleans, which PyTorch's attention makes numbers in each: Falcon's code always
    builds one, Transformers' others where a sequence is longer than their window. Of packed documents it is numbers."""
    kernels, window = compute.kernels, model.sliding_window
    if compute.masked or is_written_out(model, kernels):
        return False
    beyond = window is not None and compute.seq_len > window and kernels.attention == "flash"
    return model.family == "falcon" or (beyond and (kernels.holds_inputs or kernels == HF))


def _sliding_share(model: ModelSpec, compute: Compute) -> float:
    """Layers that have such a mask of all that stand for each other; one that runs again is one of them."""
    every = model.full_attention_every
    return 1.0 if compute.runs_layers_again or not every else 1 - model.layers // every / model.layers


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
    columns = cast(tape, k, q.size.per_token / k.size.per_token)  # repeated as they came, in fp32 under autocast
    scores = product_of(tape, q_rows, columns, Size(per_pair=compute.element_bytes * heads))
    tape.drop(q_rows, columns)
    if not alibi:
        scores = tape.replaced(scores, scaled(tape, scores))
    if model.attention_soft_cap is not None:
        scores = ops.soft_cap(tape, scores)
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
    wide = softmax(
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
    """PyTorch's `_scaled_dot_product_attention_math` (tensors.py says where): fp32 copies of the scaled q and of k and
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
    weights = tape.replaced(scores, softmax(tape, scores, 1.0, converts=False, on_cpu=on_cpu))
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


# -- Scores ------------------------------------------------------------------------------------------------------------


def rotary_eager(tape: Tape, x: Tensor, table: tuple[Tensor, ...], *, ratio: float = 1.0) -> Tensor:
    """`x * cos + rotate_half(x) * sin` as Transformers writes it: keeps only the two shared tables.

    Tables of a wider format make a result `ratio` times as large; each gradient is made in it and then cast.
    """
    half, wide = x.size * 0.5, x.size * ratio
    with_cos = tape.new(wide, needs_grad=x.needs_grad)

    def cos_backward(grad: Storage) -> None:
        product = None if ratio == 1 else tape.allocate(wide)
        tape.grad_of(x)
        if product is not None:
            tape.release(product)

    tape.record(with_cos, (table[0],), cos_backward)
    negated = tape.allocate(half)
    turned = tape.allocate(x.size)
    tape.release(negated)
    with_sin = tape.new(wide, needs_grad=x.needs_grad)

    def turn_backward(grad: Storage) -> None:
        # grad * sin, cut into halves, one negated, each padded to full width, then added
        product = tape.allocate(wide)
        if ratio != 1:
            narrow = tape.allocate(x.size)
            tape.release(product)
            product = narrow
        negative = tape.allocate(half)
        first = tape.allocate(x.size)
        tape.release(negative)
        second = tape.allocate(x.size)
        tape.release(product)
        tape.grad_of(x)
        tape.release(first, second)

    tape.record(with_sin, (table[1],), turn_backward)
    tape.release(turned)
    output = tape.new(wide, needs_grad=x.needs_grad)

    def add_backward(grad: Storage) -> None:
        tape.grad_of(with_cos, alias=grad)
        tape.grad_of(with_sin, alias=grad)

    tape.record(output, (), add_backward)
    tape.drop(with_cos, with_sin)
    return output


def rotary_halves(
    tape: Tape, x: Tensor, table: tuple[Tensor, ...], *, ratio: float = 1.0, sliced: bool = False
) -> Tensor:
    """gpt-oss and DeepSeek-V3: each half of a head (or its even and odd elements, `sliced`) times the half tables,
    then joined: keeps only the tables. Wider ones make a result `ratio` times as large."""
    half = x.size * (0.5 * ratio)
    first, second = (slices if sliced else split)(tape, x, (0.5, 0.5))
    parts = []
    for _ in range(2):
        one, two = tape.derived(first, half, saved=table[:1]), tape.derived(second, half, saved=table[1:2])
        parts.append(add(tape, one, two))
        tape.drop(one, two)
    tape.drop(first, second)
    output = joined(tape, parts)
    tape.drop(*parts)
    return output


# -- Rotary positions --------------------------------------------------------------------------------------------------


def attention_weights(model: ModelSpec, unit: str = "layer") -> dict[str, Weight]:
    """Weights by role in the order the model code registers them.

    Roles: q, k, v or the fused qkv, output, their biases, q_norm, k_norm, sinks.
    """
    names = names_of(model.family)
    query, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim

    def named(module: str) -> str:
        return f"{names.attention_module}.{module}"

    def linear(module: str, role: str, out: int, into: int, pieces: int) -> dict[str, Weight]:
        last = role == "output"
        weight = matrix(named(module), unit, out, into, splits_inputs=last, transposed=names.transposed, pieces=pieces)
        return with_bias(role, weight, model.output_bias if last else model.qkv_bias)

    *inputs, last = names.attention
    outs = [("qkv", query + 2 * kv, model.kv_heads)]
    if len(inputs) > 1:
        outs = [("q", query, model.heads), ("k", kv, model.kv_heads), ("v", kv, model.kv_heads)]
    made = {
        name: linear(name, role, out, model.hidden, pieces)
        for name, (role, out, pieces) in zip(inputs, outs, strict=True)
    }
    made[last] = linear(last, "output", model.hidden, query, model.heads)
    found: dict[str, Weight] = {}
    if model.attention_sinks:
        found["sinks"] = Weight(name=named("sinks"), shape=(model.heads,), unit=unit, split=0, pieces=model.heads)
    for name in names.registered or names.attention:
        found |= made[name]
    if model.qk_norm:
        for role in ("q_norm", "k_norm"):
            found[role] = Weight(name=named(role), shape=(model.head_dim,), unit=unit)
    return found


def walk_attention(run: ModelPass, x: Tensor, weights: dict[str, Weight]) -> Tensor:
    """The attention module's forward."""
    tape, model, compute, table = run
    q, k, v = _queries_keys_values(run, x, weights)
    for role in ("q_norm", "k_norm"):
        if role in weights:
            plain, heads = (q, model.heads) if role == "q_norm" else (k, model.kv_heads)
            gemma = model.block == "sandwich"
            rows = compute.heads(heads)
            normal = compute.norm(tape, plain, weights[role], rows=rows, scales_in_fp32=gemma, from_one=gemma)
            tape.drop(plain)
            q, k = (normal, k) if role == "q_norm" else (q, normal)
    if model.positions == "rope" and compute.kernels.rotary == "fused":  # which leaves a part of the head alone itself
        q, k = (tape.replaced(one, fused.rotary(tape, one, table[:2])) for one in (q, k))
    elif model.positions == "rope":
        q, k = _rotated(run, q), _rotated(run, k)
    if compute.kernels.attention == "unfused":
        attended = fused.core_attention(
            tape,
            q,
            k,
            v,
            heads=compute.heads(model.heads),
            groups=model.heads // model.kv_heads,
            element_bytes=compute.element_bytes,
            probability=model.attention_dropout,
            mask_share=compute.mask_share(compute.element_bytes),
            sequence_ranks=compute.cp,
            recompute=compute.recompute == "attention",
        )
    elif compute.recompute == "attention":
        attended = fused.recomputed(tape, (q, k, v), partial(_core, run), masks_of(run))
    else:
        attended = _core(run, (q, k, v))
    if (adapters := compute.adapters) is not None:
        attended = adapters.attended(tape, q, attended, model)
    tape.drop(q, k, v)
    if (how := compute.functions(weights["output"])) is not None:
        return tape.replaced(attended, functions.linears(tape, attended, [compute.trained(weights["output"])], how)[0])
    bias, in_place = weights.get("output.bias"), compute.in_place(weights, "output")
    output = compute.linear(tape, attended, weights["output"], bias=bias, result=True, in_place=in_place)
    return tape.replaced(attended, output)


def _core(run: ModelPass, inputs: tuple[Tensor, ...]) -> Tensor:
    """What Transformers' attention functions compute of queries, keys and values, with the kernels PyTorch picks.

    Under autocast the fp32 tables of positions, or a norm's fp32 weight, have made queries and keys fp32; autocast
    casts them here, as products are on its list, so a checkpoint around this function keeps them in fp32. Both were
    found by `executor trace`: 26.6 kB a token too much in a layer of Qwen3, 384 bytes too little in one of tiny-llama.
    """
    tape, model, compute, _ = run
    if not compute.autocast:
        return _attended(run, inputs)
    q, k, v = inputs
    kernels = compute.kernels  # fused ones give back the format that they were given
    turned = model.positions == "rope" and kernels.rotary != "fused"
    wide = turned or (model.qk_norm and kernels.norm == "eager-fp32")
    ratio = compute.element_bytes / compute.weight_bytes if wide else 1.0
    later = is_written_out(model, kernels)
    narrow = (ops.cast(tape, q, ratio), tape.hold(k) if later else ops.cast(tape, k, ratio), tape.hold(v))
    attended = _attended(run, narrow)
    tape.drop(*narrow)
    return attended


def _attended(run: ModelPass, inputs: tuple[Tensor, ...]) -> Tensor:
    (tape, model, compute, table), (q, k, v) = run, inputs
    heads, shared_mask = compute.heads(model.heads), table[-1] if compute.masked else None
    if compute.deals_heads:
        return dealt_attention(tape, q, k, v, heads=heads, ranks=compute.cp)
    groups = model.heads // model.kv_heads
    if is_written_out(model, compute.kernels):
        return written_out_attention(tape, q, k, v, model, compute, heads, groups)
    own = builds_mask(model, compute)
    mask = Size(per_pair=compute.element_bytes * _sliding_share(model, compute)) if own else None
    if is_math(model, compute.kernels, on_cpu=compute.on_cpu):
        causal = NOTHING if own or compute.masked else Size(fixed=4.0 * compute.seq_len**2)
        return math_attention(
            tape, q, k, v, heads=heads, groups=groups, element_bytes=compute.element_bytes, mask=mask or NOTHING,
            causal=causal, probability=compute.probability(model.attention_dropout), one_sequence=compute.one_sequence,
            on_cpu=compute.on_cpu,
        )  # fmt: skip
    repeated: tuple[Tensor, ...] = ()
    if (compute.masked or (own and model.family != "falcon")) and groups > 1:
        # With a mask, grouped heads are repeated (integrations/sdpa_attention.py, use_gqa_in_sdpa).
        k, v = repeated = (ops.copied(tape, k, groups), ops.copied(tape, v, groups))
    workspace = compute.attention_workspace(k, v)
    attended = ops.flash_attention(tape, q, k, v, heads=heads, workspace=workspace, mask=mask, shared_mask=shared_mask)
    tape.drop(*repeated)
    return ops.laid_out(tape, attended) if _joins(run) else attended


def _projected(run: ModelPass, x: Tensor, weights: dict[str, Weight]) -> list[Tensor]:
    tape, _, compute, _ = run
    if (how := compute.functions(*(weights[role] for role in "qkv"))) is not None:
        return functions.linears(tape, x, [compute.trained(weights[role]) for role in "qkv"], how)
    at_once = compute.in_place(weights, *"qkv")
    return [
        compute.linear(tape, x, weights[role], bias=weights.get(f"{role}.bias"), in_place=at_once, into_input=at_once)
        for role in "qkv"
    ]


def _queries_keys_values(run: ModelPass, x: Tensor, weights: dict[str, Weight]) -> tuple[Tensor, Tensor, Tensor]:
    tape, model, compute, _ = run
    if projection := projection_of(compute.kernels):
        return projection.walk(run, x, weights)
    if "qkv" not in weights:
        flat = _projected(run, x, weights)
        if model.family == "opt":  # scales the queries before attention does
            flat[0] = tape.replaced(flat[0], ops.scaled(tape, flat[0]))
        q, k, v = (ops.split_heads(tape, one) for one in flat)
        tape.drop(*flat)
        return q, k, v
    fused = compute.linear(tape, x, weights["qkv"], bias=weights.get("qkv.bias"))
    total = model.heads + 2 * model.kv_heads
    parts = (model.heads / total, model.kv_heads / total, model.kv_heads / total)
    q, k, v = (ops.split if model.family in ("gpt2", "gpt_neox") else ops.slices)(tape, fused, parts)
    if model.family == "bloom":  # heads as matrices: of one sequence they lie so
        tape.variables.append(fused)
        if not compute.one_sequence:
            q, k, v = (tape.replaced(one, ops.copied(tape, one)) for one in (q, k, v))
        tape.variables += [tape.hold(one) for one in (q, k, v)]
        return q, k, v
    tape.drop(fused)
    if model.family == "falcon":  # keys and values repeated for every query head, or picked out
        groups = model.heads / model.kv_heads if model.layer_norms == 2 else 1.0
        k, v = (tape.replaced(one, ops.copied(tape, one, groups)) for one in (k, v))
    return q, k, v


def _rotated(run: ModelPass, x: Tensor) -> Tensor:
    """Rotary positions on all of a head or on a part of it; lets go of x."""
    tape, model, compute, table = run
    ratio = compute.rotary_ratio(model)
    if not _joins(run):
        turn = rotary_halves if model.family == "gpt_oss" else rotary_eager
        return tape.replaced(x, turn(tape, x, table[:2], ratio=ratio))
    part = model.rotary_dim / model.head_dim
    turning, still = ops.slices(tape, x, (part, 1 - part))
    tape.drop(x)
    turned = tape.replaced(turning, rotary_eager(tape, turning, table[:2], ratio=ratio))
    wide = ops.cast(tape, still, ratio)
    whole = ops.joined(tape, (turned, wide))
    tape.drop(turned, wide, still)
    return whole


PARTIAL = ("phi", "phi3", "gpt_neox")
"""Families whose code turns a slice of each head and joins it with the rest, be the rest empty."""


def _joins(run: ModelPass) -> bool:
    """Whether what is turned of a head is joined with the rest, by the family's code or by the kernels'."""
    return run.compute.kernels.rotary == "joined" or run.model.family in PARTIAL


# -- Latent attention --------------------------------------------------------------------------------------------------


def mla_weights(model: ModelSpec, mla: Mla, unit: str = "layer") -> dict[str, Weight]:
    """Weights by role in the order the model code registers them: q or q_a, q_norm, q_b; kv_a, kv_norm, kv_b; output.

    The projections down to the latents are replicated under tensor parallelism: every head reads the whole latent.
    """

    def weight(module: str, *shape: int, split: int | None = None) -> Weight:
        return Weight(
            name=f"self_attn.{module}",
            shape=shape,
            unit=unit,
            split=split,
            pieces=None if split is None else model.heads,
        )

    found: dict[str, Weight] = {}
    if mla.q_lora_rank is None:
        found["q"] = weight("q_proj", model.qk_width, model.hidden, split=0)
    else:
        found["q_a"] = weight("q_a_proj", mla.q_lora_rank, model.hidden)
        found["q_norm"] = weight("q_a_layernorm", mla.q_lora_rank)
        found["q_b"] = weight("q_b_proj", model.qk_width, mla.q_lora_rank, split=0)
    found["kv_a"] = weight("kv_a_proj_with_mqa", mla.kv_lora_rank + mla.qk_rope_head_dim, model.hidden)
    found["kv_norm"] = weight("kv_a_layernorm", mla.kv_lora_rank)
    found["kv_b"] = weight(
        "kv_b_proj", model.heads * (mla.qk_nope_head_dim + mla.v_head_dim), mla.kv_lora_rank, split=0
    )
    found["output"] = weight("o_proj", model.hidden, model.v_width, split=1)
    return found


def walk_mla(run: ModelPass, x: Tensor, mla: Mla, weights: dict[str, Weight]) -> Tensor:
    """Latent attention's forward: queries and keys are put together from a part without positions and one with."""
    tape, model, compute, table = run
    if "q" in weights:
        flat = compute.linear(tape, x, weights["q"])
    else:
        down = compute.linear(tape, x, weights["q_a"])
        latent = tape.replaced(down, compute.norm(tape, down, weights["q_norm"], rows=1))
        flat = tape.replaced(latent, compute.linear(tape, latent, weights["q_b"]))
    turning = mla.qk_rope_head_dim / mla.qk_head_dim
    q_still, q_turning = ops.split(tape, flat, (1 - turning, turning))
    tape.drop(flat)
    (x if x.source is None else x.source).narrow = None  # another module, which narrows the input for itself
    compressed = compute.linear(tape, x, weights["kv_a"])
    share = mla.kv_lora_rank / (mla.kv_lora_rank + mla.qk_rope_head_dim)
    kv_plain, k_turning = ops.split(tape, compressed, (share, 1 - share))
    tape.drop(compressed)
    kv_latent = tape.replaced(kv_plain, compute.norm(tape, kv_plain, weights["kv_norm"], rows=1))
    q_turned, k_turned = _latent_rotated(run, q_turning), _latent_rotated(run, k_turning)
    tape.drop(q_turning, k_turning)
    q = ops.joined(tape, (q_still, q_turned))
    tape.drop(q_still, q_turned)
    k, v = _latent_expanded(run, kv_latent, k_turned, mla, weights["kv_b"])
    tape.drop(kv_latent, k_turned)
    value_share = mla.v_head_dim / mla.qk_head_dim
    workspace = compute.attention_workspace(k, v)
    heads = compute.heads(model.heads)
    shared = table[-1] if compute.masked else None
    attended = ops.flash_attention(
        tape, q, k, v, heads=heads, workspace=workspace, value_share=value_share, shared_mask=shared,
        discards="mla_up_proj" in compute.modules,
    )  # fmt: skip
    tape.drop(q, k, v)
    if value_share == 1:  # else the memory-efficient kernel, whose result lies token by token
        attended = ops.laid_out(tape, attended)
    return tape.replaced(attended, compute.linear(tape, attended, weights["output"], result=True))


def _latent_expanded(run: ModelPass, latent: Tensor, turned: Tensor, mla: Mla, weight: Weight) -> tuple[Tensor, Tensor]:
    """Keys and values of every head from the latent; values stay a view, so the product is kept whole."""
    tape, model, compute, _ = run
    flat = compute.linear(tape, latent, weight)
    share = mla.qk_nope_head_dim / (mla.qk_nope_head_dim + mla.v_head_dim)
    k_still, v = ops.split(tape, flat, (share, 1 - share))
    tape.drop(flat)
    size = Size(per_token=compute.element_bytes * compute.heads(model.heads) * mla.qk_head_dim)
    keys = tape.new(size, needs_grad=latent.needs_grad or k_still.needs_grad)

    def backward(grad: Storage) -> None:
        # two writes into slices: each makes the gradient anew, with zeros where it wrote
        whole = tape.allocate(size)
        tape.grad_of(k_still)
        again = tape.allocate(size)
        tape.release(whole)
        tape.grad_of(turned)
        tape.release(again)

    tape.record(keys, (), backward)
    tape.drop(k_still)
    return keys, v


def _latent_rotated(run: ModelPass, x: Tensor) -> Tensor:
    """DeepSeek-V3: even and odd elements times the half tables, then joined; V2: complex numbers in fp32. Both keep
    only the tables."""
    tape, model, _, table = run
    if model.family != "deepseek_v2":
        return rotary_halves(tape, x, table[:2], sliced=True)
    wide = ops.copied(tape, x)
    return tape.replaced(wide, tape.derived(wide, saved=table[:1]))
