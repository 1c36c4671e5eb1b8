"""Activation functions on a tape, as Transformers writes them, and the gated product.

Not here: the matrix products around them (mlp.py, moe.py).
"""

from __future__ import annotations

from planner.inventory.compute import ModelPass
from planner.inventory.ops import add, cast, product_of, scaled, silu
from planner.inventory.tape import Storage, Tape, Tensor


def activation(run: ModelPass, x: Tensor) -> Tensor:
    """The function a model's MLP applies."""
    tape, model, compute, _ = run
    if model.family == "bloom":
        return _bloom_gelu(tape, x)
    if model.activation == "gelu_new":
        return _new_gelu(tape, x, compute.power_ratio)
    if model.activation == "relu":
        return _relu(tape, x)
    return silu(tape, x)  # torch's gelu, too, keeps its input and makes one gradient


def _relu(tape: Tape, x: Tensor) -> Tensor:
    """ReLU keeps its result, which the next product keeps anyway."""
    return tape.derived(x, keeps_result=True)


def _new_gelu(tape: Tape, x: Tensor, power_ratio: float) -> Tensor:
    """`0.5 * x * (1 + tanh(c * (x + 0.044715 * x ** 3)))` in Python: keeps x, tanh and both factors.

    The power is taken of a copy of x `power_ratio` times as large, and all that follows from it is as large
    (Compute.power_ratio). Measured on an H100 under bf16 autocast: 18,464 bytes a token and layer of GPT-2 more than
    on a CPU; this rule says 18,432.
    """
    half = scaled(tape, x)
    base = cast(tape, x, power_ratio)
    cube = tape.new(base.size, needs_grad=x.needs_grad)

    def cube_backward(grad: Storage) -> None:
        power, tripled = tape.allocate(base.size), tape.allocate(base.size)
        tape.grad_of(base)
        tape.release(power, tripled)

    tape.record(cube, (base,), cube_backward)
    small = tape.replaced(cube, scaled(tape, cube))
    inner = add(tape, x, small)
    tape.drop(base, small)
    argument = tape.replaced(inner, scaled(tape, inner))
    bent = tape.replaced(argument, tape.derived(argument, keeps_result=True))
    raised = tape.replaced(bent, tape.derived(bent, passes_on=True))
    output = product_of(tape, half, raised, raised.size)
    tape.drop(half, raised)
    return output


def _bloom_gelu(tape: Tape, x: Tensor) -> Tensor:
    """BLOOM's own autograd function: keeps its input; Python arithmetic holds three tensors at a time forward and
    five backward."""
    temporary = [tape.allocate(x.size) for _ in range(3)]
    output = tape.new(x.size, needs_grad=x.needs_grad)
    tape.release(*temporary)

    def backward(grad: Storage) -> None:
        temporary = [tape.allocate(x.size) for _ in range(4)]
        tape.grad_of(x)
        tape.release(*temporary)

    return tape.record(output, (x,), backward)


def soft_cap(tape: Tape, x: Tensor) -> Tensor:
    """`tanh(x / cap) * cap` in Python: keeps the tanh; lets go of x."""
    small = tape.replaced(x, scaled(tape, x))
    bent = tape.replaced(small, tape.derived(small, keeps_result=True))
    return tape.replaced(bent, scaled(tape, bent))
