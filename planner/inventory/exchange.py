"""Experts on other ranks, reached by sending tokens: Transformers' own expert parallelism (AllToAllEP).

Every chosen pair of token and expert is a row that travels to the expert's rank and back. The receiver sorts the rows
it was sent once more, and clears those that would be of no expert of its own: of none, as it happens, but three masked
copies are made. Balanced routing: a rank receives as many rows as it sends. Read in transformers 5.23.0,
distributed/expert_parallel.py and integrations/moe.py. Not here: routing, the products and the gate (moe.py).
"""

from __future__ import annotations

from collections.abc import Callable

from planner.inventory.tape import Storage, Tape, Tensor
from planner.inventory.tensors import Size

Mlp = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows, each row's expert, which rows are to be cleared) -> the experts' outputs."""


def exchanged_experts(tape: Tape, x: Tensor, chosen: Tensor, top_k: int, element_bytes: float, experts: Mlp) -> Tensor:
    """The weighted sum of what other ranks' experts made of this rank's tokens."""
    index = Size(per_token=8.0 * top_k)
    order, token = tape.new(index), tape.new(index)
    sent = _taken(tape, x, token, x.size * top_k)
    tape.drop(token)
    received = _sent(tape, sent)
    expert, unit = tape.new(index), tape.new(Size(per_token=element_bytes * top_k))
    tape.drop(sent)
    made = _received(tape, received, unit, index, experts)
    returned = _sent(tape, made)
    placed = tape.new(returned.size, needs_grad=returned.needs_grad)
    tape.record(placed, (order,), lambda grad: tape.grad_of(returned))
    tape.drop(returned, order)
    weighed = weighed_rows(tape, placed, chosen)
    total = tape.new(x.size, needs_grad=weighed.needs_grad)
    tape.record(total, (), lambda grad: tape.grad_of(weighed, alias=grad))
    tape.drop(placed, weighed, made, received, expert, unit)
    return total


def _received(tape: Tape, rows: Tensor, unit: Tensor, index: Size, experts: Mlp) -> Tensor:
    """Sorted by expert, through the products, and back in the order of their arrival."""
    expert, order, taken = tape.new(index), tape.new(index), tape.new(index)
    own = _taken(tape, rows, taken, rows.size)
    tape.drop(taken)
    share, mask = tape.new(unit.size), tape.new(index * (1 / 8))
    masked = tape.view(own)  # in place
    tape.record(masked, (mask,), lambda grad: tape.grad_of(own))
    out = experts(masked, expert, mask)
    tape.drop(own, masked)
    weighed = tape.new(out.size, needs_grad=out.needs_grad)
    tape.record(weighed, (share,), lambda grad: tape.grad_of(out))
    back = tape.new(index)
    restored = _taken(tape, weighed, back, weighed.size)
    tape.drop(weighed)
    total = tape.new(restored.size, needs_grad=restored.needs_grad)
    tape.record(total, (), lambda grad: tape.grad_of(restored, alias=grad))
    tape.drop(restored, back, out, share, mask, expert, order)
    return total


def weighed_rows(tape: Tape, rows: Tensor, share: Tensor) -> Tensor:
    """Each row times its share: both are kept, and the share's gradient is summed of a product as large as the rows."""
    output = tape.new(rows.size, needs_grad=rows.needs_grad)

    def backward(grad: Storage) -> None:
        tape.grad_of(rows)
        inner = tape.allocate(rows.size)
        tape.grad_of(share)
        tape.release(inner)

    return tape.record(output, (rows, share), backward)


def cleared(tape: Tape, x: Tensor, mask: Tensor) -> Tensor:
    """A copy with the masked rows zero; takes over the variable."""
    output = tape.new(x.size, needs_grad=x.needs_grad)
    tape.record(output, (mask,), lambda grad: tape.grad_of(x))
    tape.drop(x)
    return output


def _taken(tape: Tape, x: Tensor, index: Tensor, size: Size) -> Tensor:
    """`x[index]`: keeps the index."""
    output = tape.new(size, needs_grad=x.needs_grad)
    return tape.record(output, (index,), lambda grad: tape.grad_of(x))


def _sent(tape: Tape, x: Tensor) -> Tensor:
    """All-to-all: as much as was given, and back in backward."""
    output = tape.new(x.size, needs_grad=x.needs_grad)
    return tape.record(output, (), lambda grad: tape.grad_of(x))
