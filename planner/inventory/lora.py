"""Low-rank adapters: their weights, and what a linear module does with one beside it (peft's LoRA).

Source of the method: Hu et al. 2021. Not here: which modules a model has (attention.py, block.py).
"""

from __future__ import annotations

from planner.inventory.devices import mask_bytes
from planner.inventory.narrow import INT8, NF4
from planner.inventory.ops import add, cast, cloned, dropout, linear, scaled
from planner.inventory.tape import Storage, Tape, Tensor
from planner.inventory.tensors import Size, Weight
from planner.spec import Lora

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Linear modules of a layer that can carry an adapter."""


def adapter_weights(weight: Weight, lora: Lora) -> tuple[Weight, Weight]:
    """A (rank x in) and B (out x rank) of one adapted linear."""
    out_features, in_features = weight.features
    return (
        Weight(
            name=f"{weight.name}.lora_A",
            shape=(lora.rank, in_features),
            unit=weight.unit,
            adapter=True,
            split=1 if weight.split == 1 else None,
            pieces=weight.pieces,
        ),
        Weight(
            name=f"{weight.name}.lora_B",
            shape=(out_features, lora.rank),
            unit=weight.unit,
            adapter=True,
            split=0 if weight.split == 0 else None,
            pieces=weight.pieces,
        ),
    )


def with_adapter(
    tape: Tape,
    x: Tensor,
    base: Tensor,
    weight: Weight,
    lora: Lora,
    *,
    adapter_bytes: float,
    product_bytes: float,
    casts_input: bool,
    on_cpu: bool,
    weight_bytes: float,
) -> Tensor:
    """`base + B(A(dropout(x))) * scaling`, of what the frozen `weight` made of x; takes over the base's variable. peft
    casts x to the adapter's own format first.

    Under autocast the adapter's products are 16-bit all the same, from copies of its fp32 weights. Beside a base of
    bitsandbytes peft casts the adapter's result to the base's format before it adds them (elsewhere their sum), casts
    its input only where told (`casts_input`), and clones the result of a 4-bit base (peft 0.21, tuners/lora/bnb.py).
    """
    packed = weight.form in (*NF4, *INT8)
    a, b = adapter_weights(weight, lora)
    if weight.form in NF4:
        base = tape.replaced(base, cloned(tape, base))
    casts = casts_input or not packed
    wide = cast(tape, x, adapter_bytes * weight.features[1] / x.size.per_token) if casts else tape.hold(x)
    element_bytes = wide.size.per_token / weight.features[1]
    mask_share = mask_bytes(element_bytes, on_cpu=on_cpu) / element_bytes
    if lora.dora:
        width, formats = base.size.per_token, (adapter_bytes, product_bytes, weight_bytes)
        total = with_magnitude(tape, wide, base, weight, (a, b), lora, *formats, mask_share)
        return tape.replaced(total, cast(tape, total, width / total.size.per_token))
    dropped = dropout(tape, wide, lora.dropout, mask_share)
    copied = product_bytes < adapter_bytes
    down = linear(tape, dropped, a, element_bytes=product_bytes, copies_weight=copied, caches_copy=copied)
    up = linear(tape, down, b, element_bytes=product_bytes, copies_weight=copied, caches_copy=copied)
    tape.drop(dropped, down)
    beside = tape.replaced(up, scaled(tape, up))
    if packed:
        beside = tape.replaced(beside, cast(tape, beside, base.size.per_token / beside.size.per_token))
    total = add(tape, base, beside)
    tape.drop(base, beside)
    output = tape.replaced(total, cast(tape, total, base.size.per_token / total.size.per_token))
    tape.drop(wide)  # a variable of peft's module until that returns
    return output


def added_in_place(
    tape: Tape, x: Tensor, base: Tensor, weight: Weight, lora: Lora, adapter_bytes: float, element_bytes: float
) -> Tensor:
    """`base + B(A(x)) * scaling`, written into what the frozen `weight` made of x; takes over that variable.

    Keeps x alone, or what a discarded x is made of: backward makes A's product again, and copies of A and B in the
    format of x. Unsloth, kernels/utils.py, matmul_lora, and kernels/fast_lora.py, LoRA_W.
    """
    a, b = adapter_weights(weight, lora)
    product = Size(per_token=lora.rank * base.size.per_token / weight.features[0])
    copies = Size(fixed=(a.elements + b.elements) * element_bytes if element_bytes != adapter_bytes else 0.0)

    def factors() -> tuple[Storage, ...]:
        return tape.allocate(copies), tape.allocate(product)

    tape.release(*factors())
    output = tape.view(base)
    output.needs_grad = True

    def backward(grad: Storage) -> None:
        made = factors()
        tape.weight_grad(a.elements + b.elements)
        tape.release(*made)
        tape.grad_of(base, alias=grad)

    kept = x.source if x.discarded and x.source is not None else x
    tape.record(output, (kept,), backward, saves_after=True)
    tape.drop(base)
    return output


# -- DoRA --------------------------------------------------------------------------------------------------------------


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
