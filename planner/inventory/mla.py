"""Multi-head latent attention (DeepSeek-V2, 2024): its weights and its walk.

Not here: ordinary attention (attention.py).
"""

from __future__ import annotations

from planner.inventory import attention, ops
from planner.inventory.compute import ModelPass
from planner.inventory.tape import Storage, Tensor
from planner.inventory.tensors import Size, Weight
from planner.spec import Mla, ModelSpec


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
        return attention.rotary_halves(tape, x, table[:2], sliced=True)
    wide = ops.copied(tape, x)
    return tape.replaced(wide, tape.derived(wide, saved=table[:1]))
