"""Activation functions on a tape, as Transformers writes them, and the gated product.

Not here: the matrix products around them (mlp.py, moe.py).
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
    output = tape.new(x.size, needs_grad=x.needs_grad)
    return tape.record(output, (output,), lambda grad: tape.grad_of(x))


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
    small = scaled(tape, cube)
    tape.drop(cube)
    inner = tape.new(x.size, needs_grad=x.needs_grad)

    def inner_backward(grad: Storage) -> None:
        tape.grad_of(x, alias=grad)
        tape.grad_of(small, alias=grad)

    tape.record(inner, (), inner_backward)
    tape.drop(small)
    argument = scaled(tape, inner)
    tape.drop(inner)
    bent = tape.new(x.size, needs_grad=x.needs_grad)
    tape.record(bent, (bent,), lambda grad: tape.grad_of(argument))
    tape.drop(argument)
    raised = tape.new(x.size, needs_grad=x.needs_grad)
    tape.record(raised, (), lambda grad: tape.grad_of(bent, alias=grad))
    tape.drop(bent)
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
    small = scaled(tape, x)
    tape.drop(x)
    bent = tape.new(small.size, needs_grad=small.needs_grad, term=small.storage.term)
    tape.record(bent, (bent,), lambda grad: tape.grad_of(small))
    tape.drop(small)
    output = scaled(tape, bent)
    tape.drop(bent)
    return output
