"""DoRA: adapters that turn a frozen matrix, and a trained magnitude for each of its rows (Liu et al. 2024, as peft).

peft 0.21, tuners/lora/dora.py: the whole product B A is made of an identity matrix for every forward, added to the
frozen matrix and measured row by row, without a gradient; the results of the matrix and of the adapter are scaled row
by row. Nothing of that is as large as it need be, so what is only there for a moment is counted too. Not here: LoRA's
own weights and products (lora.py).
"""

from __future__ import annotations

from planner.inventory.ops import add, dropout, linear, scaled
from planner.inventory.tape import Storage, Tape, Tensor
from planner.inventory.tensors import Size, Weight
from planner.spec import Lora


def magnitude(weight: Weight) -> Weight:
    """A number for each row of one adapted linear."""
    return Weight(
        name=f"{weight.name}.lora_magnitude_vector",
        shape=weight.features[:1],
        unit=weight.unit,
        adapter=True,
        split=0 if weight.split == 0 else None,
        pieces=weight.pieces,
    )


def with_magnitude(
    tape: Tape,
    x: Tensor,
    base: Tensor,
    weight: Weight,
    adapters: tuple[Weight, Weight],
    lora: Lora,
    adapter_bytes: float,
    product_bytes: float,
    weight_bytes: float,
    mask_share: float,
) -> Tensor:
    """`base + (m - 1) * base + m * B(A(x)) * scaling`, of x in the adapters' format and of what the frozen `weight`
    made of it; takes over both variables. With dropout the product with the matrix is made anew, of what dropout left.
    """
    a, b = adapters
    copied = product_bytes < adapter_bytes
    dropped = dropout(tape, x, lora.dropout, mask_share)
    tape.drop(x)
    held = _measured(tape, weight, lora, adapter_bytes, product_bytes, weight_bytes)
    scale = _over_norm(tape, magnitude(weight), adapter_bytes)
    down = linear(tape, dropped, a, element_bytes=product_bytes, copies_weight=copied, caches_copy=copied)
    up = linear(tape, down, b, element_bytes=product_bytes, copies_weight=copied, caches_copy=copied)
    tape.drop(down)
    frozen = tape.hold(base)
    if lora.dropout:
        frozen = tape.replaced(frozen, linear(tape, dropped, weight, element_bytes=product_bytes, copies_weight=copied))
    tape.drop(dropped)
    less_one = tape.derived(scale)
    turned = _rows_scaled(tape, less_one, frozen, adapter_bytes)
    beside = _rows_scaled(tape, scale, up, adapter_bytes)
    beside = tape.replaced(beside, scaled(tape, beside))
    both = add(tape, turned, beside)
    tape.drop(turned, beside, less_one, up, frozen, scale)
    tape.release(*held)
    total = add(tape, base, both)
    tape.drop(base, both)
    return total


def _measured(
    tape: Tape, weight: Weight, lora: Lora, adapter_bytes: float, product_bytes: float, weight_bytes: float
) -> list[Storage]:
    """What measuring the rows of W + B A leaves until the module is done: the identity matrix (its copy in the
    product's format, which B A's graph saves, and A's product with it), B A, and W where it is cast."""
    in_features = weight.features[1]
    square, matrix = float(in_features**2), float(weight.elements)
    copied = product_bytes < adapter_bytes
    eye = tape.allocate(Size(fixed=square * adapter_bytes))
    saved = [tape.allocate(Size(fixed=square * product_bytes))] if copied else []
    copies = [tape.allocate(Size(fixed=lora.rank * side * product_bytes)) for side in weight.features if copied]
    saved.append(tape.allocate(Size(fixed=in_features * lora.rank * product_bytes)))
    product = tape.allocate(Size(fixed=matrix * product_bytes))
    if copied or not tape.keeping:
        tape.release(eye)
    else:
        saved.append(eye)
    if not tape.keeping:
        tape.release(*saved)
        saved = []
    if copied:
        wide = tape.allocate(Size(fixed=matrix * adapter_bytes))
        tape.release(product, *copies)
        product = wide
    held = [*saved, product]
    if weight_bytes != adapter_bytes:
        held.append(tape.allocate(Size(fixed=matrix * adapter_bytes)))
    times = tape.allocate(Size(fixed=matrix * adapter_bytes))
    whole = tape.allocate(Size(fixed=matrix * adapter_bytes))
    tape.release(times, whole)
    return held


def _over_norm(tape: Tape, weight: Weight, element_bytes: float) -> Tensor:
    """The trained magnitudes over the measured ones, which are kept for their gradient."""
    norm = tape.new(Size(fixed=weight.elements * element_bytes))
    over = tape.new(Size(fixed=weight.elements * element_bytes), needs_grad=True)
    tape.record(over, (norm,), lambda grad: tape.weight_grad(weight.elements))
    tape.drop(norm)
    return over


def _rows_scaled(tape: Tape, scale: Tensor, x: Tensor, element_bytes: float) -> Tensor:
    """`scale * x`, a number a feature: both are kept, and the gradient of the scale is made as large as the product
    before it is summed over the tokens."""
    features = scale.size.fixed / element_bytes
    output = tape.new(Size(per_token=features * element_bytes), needs_grad=True)

    def backward(grad: Storage) -> None:
        whole = tape.allocate(output.size)
        tape.grad_of(scale)
        tape.release(whole)
        if not x.needs_grad:
            return
        narrow = x.size.per_token < output.size.per_token
        wide = tape.allocate(output.size) if narrow else None
        tape.grad_of(x)
        if wide is not None:
            tape.release(wide)

    return tape.record(output, (x, scale) if x.needs_grad else (x,), backward)
