"""Activation functions on a tape, as Transformers writes them, and the gated product.

Not here: the matrix products around them (moe.py, moe.py).
"""

from __future__ import annotations

from planner.inventory.ops import mul, scaled, silu
from planner.inventory.tape import Storage, Tape, Tensor
from planner.spec import ModelSpec


def activation(tape: Tape, x: Tensor, model: ModelSpec) -> Tensor:
    """The function a model's MLP applies."""
    if model.family == "bloom":
        return _bloom_gelu(tape, x)
    if model.activation == "gelu_new":
        return _new_gelu(tape, x)
    if model.activation == "relu":
        return _relu(tape, x)
    return silu(tape, x)  # torch's gelu, too, keeps its input and makes one gradient


def _relu(tape: Tape, x: Tensor) -> Tensor:
    """ReLU keeps its result, which the next product keeps anyway."""
    return tape.derived(x, keeps_result=True)


def _new_gelu(tape: Tape, x: Tensor) -> Tensor:
    """`0.5 * x * (1 + tanh(c * (x + 0.044715 * x ** 3)))` in Python: keeps x, tanh and both factors.

    CUDA's autocast computes the power, and all that follows from it, in fp32: not counted here.
    """
    half = scaled(tape, x)
    cube = tape.new(x.size, needs_grad=x.needs_grad)

    def cube_backward(grad: Storage) -> None:
        power, tripled = tape.allocate(x.size), tape.allocate(x.size)
        tape.grad_of(x)
        tape.release(power, tripled)

    tape.record(cube, (x,), cube_backward)
    small = tape.replaced(cube, scaled(tape, cube))
    inner = tape.new(x.size, needs_grad=x.needs_grad)

    def inner_backward(grad: Storage) -> None:
        tape.grad_of(x, alias=grad)
        tape.grad_of(small, alias=grad)

    tape.record(inner, (), inner_backward)
    tape.drop(small)
    argument = tape.replaced(inner, scaled(tape, inner))
    bent = tape.replaced(argument, tape.derived(argument, keeps_result=True))
    raised = tape.replaced(bent, tape.derived(bent, passes_on=True))
    output = mul(tape, half, raised)
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
