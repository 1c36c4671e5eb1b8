"""Attention between two exchanges: DeepSpeed's Ulysses deals heads for positions, with a copy before and after each.

Every rank comes with some positions of all heads and attends with all positions of some heads, so no tensor changes
its size. Read in deepspeed 0.19.8, runtime/sequence_parallel/ulysses_sp.py and sequence/layer.py. Not here: what
travels (engines/deepspeed_ulysses.py).
"""

from __future__ import annotations

from planner.inventory import ops
from planner.inventory.tape import Storage, Tape, Tensor
from planner.inventory.tensors import Size

POSITION_BYTES = 8
"""A position id; every rank's are gathered, and joined in a second tensor."""


def dealt_attention(tape: Tape, q: Tensor, k: Tensor, v: Tensor, *, heads: int, ranks: float) -> Tensor:
    """The flash kernel on this rank's heads; keeps its queries, keys, values and result in their dealt form."""
    positions = tape.allocate(Size(per_position=2 * POSITION_BYTES * ranks))
    received = [_heads_received(tape, one) for one in (q, k, v)]
    mine = [tape.replaced(one, ops.cloned(tape, one)) for one in received]  # from positions first to heads first
    attended = ops.flash_attention(tape, *mine, heads=heads)
    by_position = tape.replaced(attended, ops.cloned(tape, attended))
    sent = ops.cloned(tape, by_position)
    back = _exchanged(tape, sent)
    joined = ops.cloned(tape, back)
    tape.drop(back, sent, by_position, *mine)
    tape.release(positions)
    return tape.replaced(joined, ops.cloned(tape, joined))  # Transformers wants it sequence by sequence


def _heads_received(tape: Tape, x: Tensor) -> Tensor:
    """Dealt in the order of the ranks that get the parts, and exchanged."""
    sent = ops.cloned(tape, x)
    return tape.replaced(sent, _exchanged(tape, sent))


def _exchanged(tape: Tape, x: Tensor) -> Tensor:
    """An all-to-all, whose gradient comes in another order of axes and is copied to be sent back."""
    output = tape.new(x.size, needs_grad=x.needs_grad)

    def backward(grad: Storage) -> None:
        laid_out = tape.allocate(x.size)
        tape.grad_of(x)
        tape.release(laid_out)

    return tape.record(output, (), backward)
