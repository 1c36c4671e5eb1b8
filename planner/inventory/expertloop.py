"""Experts that Transformers 5 runs one after the other (experts_implementation eager): what each keeps, and what
backward makes of slices of stacked weights.

Read in transformers 5.23.0, models/qwen3_moe/modeling_qwen3_moe.py, Qwen3MoeExperts.forward. Each expert has an equal
part of the rows; all of them have some. Gradients that meet are added up in a new tensor, as they are while a run is
measured. Not here: grouped experts (mlp.py), or the time of a loop (figures/expertloop.py).
"""

from __future__ import annotations

from collections.abc import Callable

from planner.inventory import ops
from planner.inventory.compute import Compute
from planner.inventory.tape import GATHERED, Storage, Tape, Tensor
from planner.inventory.tensors import NOTHING, Size, Weight
from planner.spec import Moe

Weighed = Callable[[Tape, Tensor, Tensor, float], Tensor]
"""Rows times their shares."""


def walk_loop(
    tape: Tape,
    x: Tensor,
    chosen: Tensor,
    moe: Moe,
    weights: dict[str, Weight],
    compute: Compute,
    gate: Callable[[Tensor], Tensor],
    weigh: Weighed,
) -> Tensor:
    """The weighted sum of all experts' results; `gate` makes the gated product of both halves, and takes over the
    variable."""
    rows = moe.top_k / moe.experts
    width = x.size.per_token
    total = tape.new(x.size)
    mask = tape.new(Size(per_token=8.0 * moe.top_k * (moe.experts + 1)))
    stacks: dict[str, Tensor] = {}
    found = state = both = result = None
    for _ in range(moe.experts):
        found = _bound(tape, found, tape.new(Size(per_token=16.0 * rows)))
        state = _bound(tape, state, ops.taken(tape, x, Size(per_token=width * rows), found))
        fused = _sliced(tape, state, weights["gate_up"], "gate_up", stacks, compute, rows)
        both = _bound(tape, both, tape.hold(fused))
        result = _bound(tape, result, gate(fused))
        result = _bound(tape, result, _sliced(tape, result, weights["down"], "down", stacks, compute, rows))
        share = ops.taken(tape, chosen, chosen.size * (1 / moe.experts), found)
        result = _bound(tape, result, weigh(tape, result, share, compute.weight_bytes / compute.element_bytes))
        tape.drop(share)
        total = _added(tape, total, result, found)
    tape.drop(mask, *(one for one in (found, state, both, result) if one is not None))
    return total


def _bound(tape: Tape, old: Tensor | None, new: Tensor) -> Tensor:
    """A variable of the loop, once it is bound to what was just made."""
    if old is not None:
        tape.drop(old)
    return new


def _added(tape: Tape, total: Tensor, rows: Tensor, found: Tensor) -> Tensor:
    """`total.index_add_(0, found, rows)`, in place; takes over the variable of the total. The rows are kept for their
    shape (torch, derivatives.yaml, index_add)."""
    output = tape.view(total)
    output.needs_grad = total.needs_grad or rows.needs_grad

    def backward(grad: Storage) -> None:
        tape.grad_of(total, alias=grad)
        tape.grad_of(rows)

    tape.record(output, (found, rows), backward)
    tape.drop(total)
    return output


def _sliced(
    tape: Tape, x: Tensor, stacked: Weight, role: str, stacks: dict[str, Tensor], compute: Compute, rows: float
) -> Tensor:
    """One expert's product with its slice of a stacked weight. Autocast converts the slice each time, and keeps the
    copy; backward makes zeros as large as the whole weight for each slice's gradient. `stacks` are the whole weights
    that slices were taken of, by role."""
    weight = compute.local(compute.trained(stacked))
    out_features, in_features = weight.features
    each, element = weight.elements / weight.shape[0], compute.element_bytes
    whole = Size(fixed=weight.elements * compute.weight_bytes)
    if role not in stacks:
        stacks[role] = _whole(tape, weight)
    stack = stacks[role]
    part = tape.new(NOTHING, needs_grad=weight.trainable)
    part.size = Size(fixed=each * compute.weight_bytes)

    def of_slice(grad: Storage) -> None:
        value = tape.allocate(whole)
        tape.grad_of(stack, alias=value)
        tape.release(value)

    tape.record(part, (), of_slice)
    operand = part
    if element < compute.weight_bytes:
        operand = tape.new(Size(fixed=each * element), needs_grad=weight.trainable, term=GATHERED)
        tape.record(operand, (), lambda grad: tape.grad_of(part))
        tape.drop(part)
    inner = ops.cast(tape, x, element * in_features * rows / x.size.per_token)
    tape.weight = ops.fetched_elements(weight, element)
    output = tape.new(Size(per_token=out_features * element * rows), needs_grad=inner.needs_grad or weight.trainable)

    def backward(grad: Storage) -> None:
        tape.grad_of(operand)
        tape.grad_of(inner)

    kept = (inner,) if weight.trainable else ()
    tape.record(output, kept + ((operand,) if inner.needs_grad else ()), backward)
    tape.weight = 0
    tape.drop(inner, operand)
    return output


def _whole(tape: Tape, weight: Weight) -> Tensor:
    """A stacked weight, whose gradient is whole once the first expert's slice has given its own."""
    stack = tape.new(NOTHING, needs_grad=weight.trainable)

    def backward(grad: Storage) -> None:
        tape.live[grad.term] = tape.live[grad.term] - grad.size
        grad.size = NOTHING  # the engine's from here on, and counted there
        tape.weight_grad(weight.elements)

    return tape.record(stack, (), backward)
