"""Rotary positions as eager PyTorch applies them, on a tape.

Not here: other operations (ops.py), or fused kernels (fused.py).
"""

from __future__ import annotations

from planner.inventory.ops import add, joined, slices, split
from planner.inventory.tape import Storage, Tape, Tensor


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
