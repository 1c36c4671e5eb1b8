"""The dense MLP of a layer, gated or plain: its weights and its walk.

Not here: experts (moe.py), or the norm and residual connection around it (block.py).
"""

from __future__ import annotations

from planner.inventory import fused, ops
from planner.inventory.activations import activation
from planner.inventory.compute import ModelPass
from planner.inventory.names import names_of
from planner.inventory.tape import Tensor
from planner.inventory.tensors import Weight, matrix, with_bias
from planner.spec import ModelSpec


def mlp_weights(model: ModelSpec, unit: str = "layer", *, ffn: int = 0, module: str | None = None) -> dict[str, Weight]:
    """Weights by role: gate, up or the fused gate_up, down, and their biases. `ffn` and `module` are for shared
    experts."""
    names = names_of(model.family)
    ffn = ffn or model.ffn
    path = names.mlp_module if module is None else module

    def linear(role: str, name: str, out: int, into: int) -> dict[str, Weight]:
        name = f"{path}.{name}" if path else name
        weight = matrix(name, unit, out, into, splits_inputs=role == "down", transposed=names.transposed)
        return with_bias(role, weight, model.mlp_bias)

    *inputs, last = names.mlp
    roles = ("gate", "up") if len(inputs) == 2 else ("gate_up" if model.gated else "up",)
    width = 2 * ffn if roles == ("gate_up",) else ffn
    found: dict[str, Weight] = {}
    for role, name in zip(roles, inputs, strict=True):
        found |= linear(role, name, width, model.hidden)
    return found | linear("down", last, model.hidden, ffn)


def walk_mlp(run: ModelPass, x: Tensor, weights: dict[str, Weight]) -> Tensor:
    """The MLP's forward; `weights` by role, without any prefix."""
    tape, _, compute, _ = run
    kernel = compute.kernels.mlp

    in_place = "gate" in weights and compute.in_place(weights, "gate", "up", "down")

    def linear(role: str, x: Tensor) -> Tensor:
        into = in_place and role != "down"
        bias = weights.get(f"{role}.bias")
        return compute.linear(tape, x, weights[role], bias=bias, in_place=in_place, into_input=into)

    if "gate_up" in weights:
        product = gated_halves(run, linear("gate_up", x))
    elif "gate" not in weights:
        up = linear("up", x)
        one = activation(run, up) if kernel == "eager" else fused.activated(tape, up, kept=kernel == "fused")
        product = tape.replaced(up, one)
    elif kernel == "eager" and not in_place:
        gate = linear("gate", x)
        active = tape.replaced(gate, activation(run, gate))
        up = linear("up", x)
        product = ops.mul(tape, active, up)
        tape.drop(active, up)
    else:
        gate, up = linear("gate", x), linear("up", x)
        product = fused.gated(tape, gate, up, kept=kernel == "fused", in_place=in_place)
        tape.drop(gate, up)
    return tape.replaced(product, linear("down", product))


def gated_halves(run: ModelPass, both: Tensor, *, kept: bool = True) -> Tensor:
    """The gated product of one tensor's halves, gate and up; takes over the variable. Fused, it may be made again in
    backward (`kept`)."""
    tape, _, compute, _ = run
    gate, up = ops.split(tape, both, (0.5, 0.5))
    tape.drop(both)
    if compute.kernels.mlp != "eager":
        product = fused.gated(tape, gate, up, kept=kept and compute.kernels.mlp == "fused")
        tape.drop(gate, up)
        return product
    active = tape.replaced(gate, activation(run, gate))
    product = ops.mul(tape, active, up)
    tape.drop(active, up)
    return product
