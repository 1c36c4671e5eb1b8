"""Low-rank adapters: their weights, and what a linear module does with one beside it (peft's LoRA).

Source of the method: Hu et al. 2021. Not here: which modules a model has (attention.py, block.py).
"""

from __future__ import annotations

from planner.inventory.devices import mask_bytes
from planner.inventory.dora import with_magnitude
from planner.inventory.forms import NF4
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

    Under autocast the adapter's products are 16-bit all the same, from copies of its fp32 weights. Beside a 4-bit base
    peft clones the base's result, casts the adapter's to its format before it adds them (elsewhere their sum), and
    casts its input only where told (`casts_input`; peft 0.21, tuners/lora/bnb.py).
    """
    packed = weight.form in NF4
    a, b = adapter_weights(weight, lora)
    if packed:
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
    tape.drop(wide)
    copied = product_bytes < adapter_bytes
    down = linear(tape, dropped, a, element_bytes=product_bytes, copies_weight=copied, caches_copy=copied)
    up = linear(tape, down, b, element_bytes=product_bytes, copies_weight=copied, caches_copy=copied)
    tape.drop(dropped, down)
    beside = tape.replaced(up, scaled(tape, up))
    if packed:
        beside = tape.replaced(beside, cast(tape, beside, base.size.per_token / beside.size.per_token))
    total = add(tape, base, beside)
    tape.drop(base, beside)
    return tape.replaced(total, cast(tape, total, base.size.per_token / total.size.per_token))


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
