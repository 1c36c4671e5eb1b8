"""The dense MLP of a layer, gated or plain: its weights and its walk.

Not here: experts (moe.py), or the norm and residual connection around it (block.py).
"""

from __future__ import annotations

from planner.inventory import fused, ops
from planner.inventory.activations import activation
from planner.inventory.compute import Compute
from planner.inventory.names import names_of
from planner.inventory.tape import Tape, Tensor
from planner.inventory.tensors import Weight, with_bias
from planner.spec import ModelSpec


def mlp_weights(model: ModelSpec, unit: str = "layer", *, ffn: int = 0, module: str | None = None) -> dict[str, Weight]:
    """Weights by role: gate, up or the fused gate_up, down, and their biases. `ffn` and `module` are for shared
    experts."""
    names = names_of(model.family)
    ffn = ffn or model.ffn
    path = names.mlp_module if module is None else module

    def linear(name: str, out: int, into: int, split: int) -> dict[str, Weight]:
        weight = Weight(
            name=f"{path}.{name}" if path else name,
            shape=(into, out) if names.transposed else (out, into),
            unit=unit,
            transposed=names.transposed,
            split=1 - split if names.transposed else split,
        )
        return with_bias(weight, model.mlp_bias)

    *inputs, last = names.mlp
    roles = ("gate", "up") if len(inputs) == 2 else ("gate_up" if model.gated else "up",)
    width = 2 * ffn if roles == ("gate_up",) else ffn
    found: dict[str, Weight] = {}
    for role, name in zip(roles, inputs, strict=True):
        found |= {role + suffix: weight for suffix, weight in linear(name, width, model.hidden, 0).items()}
    found |= {"down" + suffix: weight for suffix, weight in linear(last, model.hidden, ffn, 1).items()}
    return found


def walk_mlp(tape: Tape, x: Tensor, model: ModelSpec, compute: Compute, weights: dict[str, Weight]) -> Tensor:
    """The MLP's forward; `weights` by role, without any prefix."""
    if compute.kernels.mlp != "eager":
        product = _fused_product(tape, x, compute, weights)
    elif "gate_up" in weights:
        fused = compute.linear(tape, x, weights["gate_up"], bias=weights.get("gate_up.bias"))
        gate, up = ops.split(tape, fused, (0.5, 0.5))
        tape.drop(fused)
        active = activation(tape, gate, model)
        tape.drop(gate)
        product = ops.mul(tape, active, up)
        tape.drop(active, up)
    elif "gate" in weights:
        gate = compute.linear(tape, x, weights["gate"], bias=weights.get("gate.bias"))
        active = activation(tape, gate, model)
        tape.drop(gate)
        up = compute.linear(tape, x, weights["up"], bias=weights.get("up.bias"))
        product = ops.mul(tape, active, up)
        tape.drop(active, up)
    else:
        up = compute.linear(tape, x, weights["up"], bias=weights.get("up.bias"))
        product = activation(tape, up, model)
        tape.drop(up)
    down = compute.linear(tape, product, weights["down"], bias=weights.get("down.bias"))
    tape.drop(product)
    return down


def _fused_product(tape: Tape, x: Tensor, compute: Compute, weights: dict[str, Weight]) -> Tensor:
    """What the down projection is given, its activation in one kernel. Gate and up count as one product's two halves
    however the weights are held."""
    kept = compute.kernels.mlp == "fused"
    if "up" in weights and "gate" not in weights:
        plain = compute.linear(tape, x, weights["up"], bias=weights.get("up.bias"))
        product = fused.activated(tape, plain, kept=kept)
        tape.drop(plain)
        return product
    if "gate_up" in weights:
        both = compute.linear(tape, x, weights["gate_up"], bias=weights.get("gate_up.bias"))
        gate, up = ops.split(tape, both, (0.5, 0.5))
        tape.drop(both)
    else:
        gate, up = (compute.linear(tape, x, weights[role], bias=weights.get(f"{role}.bias")) for role in ("gate", "up"))
    product = fused.gated(tape, gate, up, kept=kept)
    tape.drop(gate, up)
    return product
