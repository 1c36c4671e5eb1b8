"""Queries, keys and values from one matrix for every family, and adapters on parts of it: LitGPT's code.

Read in Lightning-AI/litgpt at 8641822, lit_gpt/model.py and lora.py. Not here: rotary positions and attention after it
(planner/inventory/attention.py), or peft's adapters (lora.py there).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planner.inventory.compute import Compute, ModelPass
from planner.inventory.ops import add, copied, dropout, linear, scaled, split
from planner.inventory.tape import Storage, Tensor
from planner.inventory.tensors import Size, Weight
from planner.spec import Lora

ROLES = ("q", "k", "v")


class Joint:
    """One matrix, of which keys' and values' weights and their adapters are part as the queries' are."""

    def is_part(self, weight: Weight) -> bool:
        """Keys', values' and their adapters' are parts of the queries'."""
        return ".k_proj" in weight.name or ".v_proj" in weight.name

    def walk(self, run: ModelPass, x: Tensor, weights: dict[str, Weight]) -> tuple[Tensor, Tensor, Tensor]:
        """Views of one result; copies where heads are grouped."""
        return joint_projection(run, x, weights)


def joint_projection(run: ModelPass, x: Tensor, weights: dict[str, Weight]) -> tuple[Tensor, Tensor, Tensor]:
    """Views of one result; copies, with keys and values for every query head, where heads are grouped."""
    tape, model, compute, _ = run
    heads = (model.heads, model.kv_heads, model.kv_heads)
    widths = dict(zip(ROLES, (count * model.head_dim for count in heads), strict=True))
    bias = _joined(weights, ".bias", widths) if {"q.bias", "qkv.bias"} & set(weights) else None
    joint = compute.base_linear(tape, x, _joined(weights, "", widths), bias=bias)
    parts, lora = _adapted(compute, weights)
    if lora is not None:
        joint = tape.replaced(joint, _with_adapters(run, x, joint, lora, [widths[part] for part in parts]))
    q, k, v = split(tape, joint, [count / sum(heads) for count in heads])
    tape.drop(joint)
    groups = model.heads // model.kv_heads
    if groups == 1:
        return q, k, v
    each = copied(tape, q), copied(tape, k, groups), copied(tape, v, groups)
    tape.drop(q, k, v)
    return each


def _joined(weights: dict[str, Weight], suffix: str, widths: dict[str, int]) -> Weight:
    """The one matrix (or its bias) that takes the place of three."""
    if f"qkv{suffix}" in weights:
        return weights[f"qkv{suffix}"]
    first = weights[f"q{suffix}"]
    return msgspec.structs.replace(first, shape=(sum(widths.values()), *first.shape[1:]), pieces=None)


def _adapted(compute: Compute, weights: dict[str, Weight]) -> tuple[Sequence[str], Lora | None]:
    """The parts that have adapters, and these."""
    if "qkv" in weights:
        lora = compute.adapter_of(weights["qkv"])
        return () if lora is None else compute.kernels.adapted_parts, lora
    parts = [role for role in ROLES if compute.adapter_of(weights[role])]
    return parts, compute.lora if parts else None


def _with_adapters(run: ModelPass, x: Tensor, base: Tensor, lora: Lora, widths: Sequence[int]) -> Tensor:
    """`base + zero_pad(conv1d(A(dropout(x)), B)) * scaling`: one A for all parts, a group of B for each.

    Keeps the input of A with its mask, A's result, and, where a part has no adapter, the result of B that is copied
    into zeros (index_copy keeps its source).
    """
    tape, model, compute, _ = run
    element = compute.adapter_product_bytes
    rank = lora.rank * len(widths)
    matrix = Weight(name="lora_A", shape=(rank, model.hidden), unit="layer", adapter=True)
    dropped = dropout(tape, x, lora.dropout, compute.mask_share(element))
    down = linear(tape, dropped, matrix, element_bytes=element)
    tape.drop(dropped)
    up = tape.new(Size(per_token=sum(widths) * element), needs_grad=True)

    def groups_backward(grad: Storage) -> None:
        tape.weight_grad(sum(widths) * lora.rank)
        tape.grad_of(down)

    tape.record(up, (down,), groups_backward)
    tape.drop(down)
    if up.size != base.size:
        zeros = tape.allocate(base.size)
        source = up
        up = tape.new(base.size, needs_grad=True)
        tape.record(up, (source,), lambda grad: tape.grad_of(source))
        tape.release(zeros)
        tape.drop(source)
    larger = tape.replaced(up, scaled(tape, up))
    total = add(tape, base, larger)
    tape.drop(larger)
    return total
