"""Experts on other ranks, reached by sending tokens: Transformers' own expert parallelism (AllToAllEP).

Every chosen pair of token and expert is a row that travels to the expert's rank and back. The receiver sorts the rows
it was sent once more, and clears those that would be of no expert of its own: of none, as it happens, but three masked
copies are made. Balanced routing: a rank receives as many rows as it sends. Read in transformers 5.23.0,
distributed/expert_parallel.py and integrations/moe.py. Not here: routing, the products and the gate (moe.py).
"""

from __future__ import annotations

from collections.abc import Callable

from planner.inventory.ops import cloned, copied
from planner.inventory.tape import Storage, Tape, Tensor
from planner.inventory.tensors import Size

Mlp = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(rows, each row's expert, which rows are to be cleared) -> the experts' outputs."""


def exchanged_experts(tape: Tape, x: Tensor, chosen: Tensor, top_k: int, element_bytes: float, experts: Mlp) -> Tensor:
    """The weighted sum of what other ranks' experts made of this rank's tokens."""
    index = Size(per_token=8.0 * top_k)
    order, token = tape.new(index), tape.new(index)
    sent = tape.replaced(token, tape.derived(x, x.size * top_k, saved=(token,)))
    received = copied(tape, sent)
    expert, unit = tape.new(index), tape.new(Size(per_token=element_bytes * top_k))
    tape.drop(sent)
    made = _received(tape, received, unit, index, experts)
    returned = copied(tape, made)
    placed = tape.derived(returned, saved=(order,))
    tape.drop(returned, order)
    weighed = weighed_rows(tape, placed, chosen)
    total = tape.derived(weighed, x.size, passes_on=True)
    tape.drop(placed, weighed, made, received, expert, unit)
    return total


def _received(tape: Tape, rows: Tensor, unit: Tensor, index: Size, experts: Mlp) -> Tensor:
    """Sorted by expert, through the products, and back in the order of their arrival."""
    expert, order, taken = tape.new(index), tape.new(index), tape.new(index)
    own = tape.replaced(taken, tape.derived(rows, saved=(taken,)))
    share, mask = tape.new(unit.size), tape.new(index * (1 / 8))
    masked = tape.view(own)  # in place
    tape.record(masked, (mask,), lambda grad: tape.grad_of(own))
    out = experts(masked, expert, mask)
    tape.drop(own, masked)
    weighed = tape.derived(out, saved=(share,))
    back = tape.new(index)
    restored = tape.replaced(weighed, tape.derived(weighed, saved=(back,)))
    total = cloned(tape, restored)
    tape.drop(restored, back, out, share, mask, expert, order)
    return total


def weighed_rows(tape: Tape, rows: Tensor, share: Tensor, wide: float = 1.0) -> Tensor:
    """Each row times its share: both are kept, and the share's gradient is summed of a product as large as the rows.
    Of shares in a wider format the products are `wide` times as large, and the rows' gradient is cast back."""
    output = tape.new(rows.size * wide, needs_grad=rows.needs_grad)

    def backward(grad: Storage) -> None:
        if wide == 1:
            tape.grad_of(rows)
        first = [] if wide == 1 else [tape.allocate(output.size)]
        inner = tape.allocate(output.size)
        tape.grad_of(share)
        tape.release(inner)
        if wide != 1:
            tape.grad_of(rows)
        tape.release(*first)

    return tape.record(output, (rows, share), backward)


def cleared(tape: Tape, x: Tensor, mask: Tensor) -> Tensor:
    """A copy with the masked rows zero; takes over the variable."""
    return tape.replaced(x, tape.derived(x, saved=(mask,)))
