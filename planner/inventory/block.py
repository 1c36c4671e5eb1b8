"""One decoder layer: its weights, and the norms and residual connections between its two branches.

Not here: the branches' inside (attention.py, mlp.py), embedding and head (ends.py).
"""

from __future__ import annotations

from functools import lru_cache

from planner.inventory import fused, ops
from planner.inventory.attention import attention_weights, mla_weights, walk_attention, walk_mla
from planner.inventory.compute import Compute, ModelPass
from planner.inventory.mlp import mlp_weights, moe_weights, walk_mlp, walk_moe
from planner.inventory.names import names_of
from planner.inventory.played import described_order, described_weights, play_layer
from planner.inventory.tape import Tape, Tensor
from planner.inventory.tensors import Weight
from planner.spec import ModelSpec

LayerWeights = dict[str, dict[str, Weight]]
"""Weights of one layer by part and role."""


@lru_cache(maxsize=512)
def layer_parts(model: ModelSpec, kind: str) -> LayerWeights:
    """Weights of one layer by part and role, in the order the model code registers them.

    Parts: "attention", "mlp", and each norm by its place in `Names.norms`: "norm0" to "norm3".
    """
    names = names_of(model.family, model.layer_norms)
    parts: LayerWeights = {}
    for module in names.layer:
        if module == names.attention_module:
            attention = mla_weights(model, model.mla, kind) if model.mla else attention_weights(model, kind)
            parts["attention"] = attention
        elif module == names.mlp_module:
            experts = model.moe is not None and kind == "layer"
            parts["mlp"] = moe_weights(model, model.moe, kind) if experts and model.moe else mlp_weights(model, kind)
        else:
            parts[f"norm{names.norms.index(module)}"] = norm_weights(model, module, kind)
    return parts


def norm_weights(model: ModelSpec, name: str, unit: str) -> dict[str, Weight]:
    """A norm over the hidden size: its weight and, for LayerNorm, its bias."""
    weight = Weight(name=name, shape=(model.hidden,), unit=unit)
    if model.norm == "rmsnorm":
        return {"": weight}
    return {"": weight, ".bias": Weight(name=f"{name}.bias", shape=(model.hidden,), unit=unit)}


def layer_weights(model: ModelSpec, kind: str = "layer") -> tuple[Weight, ...]:
    """All weights of one layer of a kind in the order the model code registers them."""
    if model.described is not None:
        return described_weights(model, kind)
    return tuple(weight for part in layer_parts(model, kind).values() for weight in part.values())


def execution_order(model: ModelSpec, kind: str = "layer") -> dict[str, tuple[int, int]]:
    """Names of a layer's weights in the order they are used: their place, and the tensor their module reads, counted
    along the way (two that read the same tensor have the same count)."""
    if model.described is not None:
        return described_order(model, kind)
    parts = layer_parts(model, kind)
    attention, mlp = parts["attention"], parts["mlp"]
    steps = [
        parts["norm0"],
        {role: weight for role, weight in attention.items() if not role.startswith("output")},
        {role: weight for role, weight in attention.items() if role.startswith("output")},
        parts.get("norm2", {}),
        parts.get("norm1", {}),
        {role: weight for role, weight in mlp.items() if "down" not in role},
        {role: weight for role, weight in mlp.items() if "down" in role},
        parts.get("norm3", {}),
    ]
    ordered = [(weight.name, reads) for reads, step in enumerate(steps) for weight in step.values()]
    return {name: (place, reads) for place, (name, reads) in enumerate(ordered)}


def walk_layer(run: ModelPass, x: Tensor, kind: str) -> Tensor:
    """The layer's forward from its input (held by the caller) to its output."""
    tape, model, compute, _ = run
    if model.described is not None:
        return play_layer(run, x, kind)
    parts = layer_parts(model, kind)
    if model.block == "parallel":
        return _parallel(run, x, parts)
    normal = compute.gather(tape, _normed(run, x, parts["norm0"], apart=model.mla is not None))
    if model.family == "bloom":  # its attention adds the residual itself, while the layer has the norm's result
        tape.variables.append(tape.hold(normal))
    attended = tape.replaced(normal, _attention(run, normal, parts))
    attended = _after(run, attended, parts.get("norm2"))
    middle = ops.add(tape, x, attended)
    if compute.kernels.compiled and attended.size.per_token < middle.size.per_token:
        middle.source, middle.discarded = tape.hold(attended), True  # the sum is made again of its 16-bit part
    tape.drop(attended)
    tape.end_call()
    if "mlp" in compute.modules and "router" not in parts["mlp"]:
        down = fused.recomputed(tape, (middle,), lambda inputs: _second_branch(run, inputs[0], parts))
    else:
        down = _second_branch(run, middle, parts)
    down = _after(run, down, parts.get("norm3"))
    output = ops.add(tape, middle, down)
    tape.drop(middle, down)
    return output


def _second_branch(run: ModelPass, x: Tensor, parts: LayerWeights) -> Tensor:
    """The norm before the MLP, and the MLP."""
    tape, _, compute, _ = run
    normal = _normed(run, x, parts["norm1"], apart="router" in parts["mlp"])
    if not _deals(compute, parts):
        normal = compute.gather(tape, normal)
    if "moe" in compute.modules and "router" in parts["mlp"]:
        return tape.replaced(normal, fused.recomputed(tape, (normal,), lambda inputs: _mlp(run, inputs[0], parts)))
    return tape.replaced(normal, _mlp(run, normal, parts))


def _normed(run: ModelPass, x: Tensor, weights: dict[str, Weight], *, apart: bool) -> Tensor:
    """A norm over the hidden size; under Megatron-Core's `layernorm` one that is a module `apart` has its result made
    again of its input, which it keeps in any case."""
    tape, model, compute, _ = run
    normal = walk_norm(tape, x, model, compute, weights)
    if apart and "layernorm" in compute.modules:
        normal.source, normal.discarded = tape.hold(x), True
    return normal


def walk_norm(tape: Tape, x: Tensor, model: ModelSpec, compute: Compute, weights: dict[str, Weight]) -> Tensor:
    """A norm over the hidden size."""
    if model.norm == "layernorm":
        return ops.layer_norm(tape, x, compute.trained(weights[""]), weights[".bias"], share=compute.residual_share)
    gemma = model.block == "sandwich"
    return compute.norm(tape, x, weights[""], scales_in_fp32=gemma or model.family == "gpt_oss", from_one=gemma)


def _after(run: ModelPass, x: Tensor, weights: dict[str, Weight] | None) -> Tensor:
    """The norm after a branch, of those that have one; lets go of x."""
    tape, model, compute, _ = run
    return x if weights is None else tape.replaced(x, walk_norm(tape, x, model, compute, weights))


def _attention(run: ModelPass, x: Tensor, parts: LayerWeights) -> Tensor:
    tape, model, compute, _ = run
    if model.mla:
        output = walk_mla(run, x, model.mla, parts["attention"])
    else:
        output = walk_attention(run, x, parts["attention"])
    return compute.dropout(tape, compute.reduce(tape, output), _branch_dropout(model))


def _mlp(run: ModelPass, x: Tensor, parts: LayerWeights) -> Tensor:
    tape, model, compute, _ = run
    if model.moe and "router" in parts["mlp"]:
        output = walk_moe(run, x, model.moe, parts["mlp"])
    else:
        output = walk_mlp(run, x, parts["mlp"])
    if not _deals(compute, parts):
        output = compute.reduce(tape, output)
    return compute.dropout(tape, output, _branch_dropout(model))


def _deals(compute: Compute, parts: LayerWeights) -> bool:
    """Whether the layer's experts are whole ones elsewhere, to which each tensor rank sends its own tokens."""
    return "router" in parts["mlp"] and compute.routed_share < 1


def _branch_dropout(model: ModelSpec) -> float:
    """Falcon drops out of the sum of both branches instead."""
    return 0.0 if model.family == "falcon" else model.dropout


def _parallel(run: ModelPass, x: Tensor, parts: LayerWeights) -> Tensor:
    """Attention and MLP from one input: GPT-NeoX and Falcon 40B with a norm each, phi and Falcon 7B with one."""
    tape, model, compute, _ = run
    normal = compute.gather(tape, walk_norm(tape, x, model, compute, parts["norm0"]))
    early = model.family == "falcon" and "norm1" in parts
    second = _second_norm(run, x, parts) if early else None
    attended = _attention(run, normal, parts)
    if second is None:
        second = _second_norm(run, x, parts) if "norm1" in parts else tape.hold(normal)
    if early:  # in a variable of Falcon's layer
        tape.variables.append(normal)
    else:
        tape.drop(normal)
    down = tape.replaced(second, _mlp(run, second, parts))
    both = ops.add(tape, down, attended)
    tape.drop(down, attended)
    if model.family == "falcon":
        both = compute.dropout(tape, both, model.dropout)
    output = tape.replaced(both, ops.add(tape, both, x))
    tape.end_call()
    return output


def _second_norm(run: ModelPass, x: Tensor, parts: LayerWeights) -> Tensor:
    tape, model, compute, _ = run
    return compute.gather(tape, walk_norm(tape, x, model, compute, parts["norm1"]))
