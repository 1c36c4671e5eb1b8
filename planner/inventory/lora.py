"""Low-rank adapters: their weights, and what a linear module does with one beside it (peft's LoRA, dropout 0).

Source of the method: Hu et al. 2021. Not here: which modules a model has (attention.py, block.py).
"""

from __future__ import annotations

from planner.inventory.forms import NF4
from planner.inventory.ops import add, cast, cloned, linear
from planner.inventory.tape import Storage, Tape, Tensor
from planner.inventory.tensors import Weight
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


def adapted_linear(
    tape: Tape,
    x: Tensor,
    weight: Weight,
    lora: Lora,
    *,
    element_bytes: float,
    adapter_bytes: float,
    product_bytes: float,
    base_copied: bool,
    keeps_input: bool,
    keeps_codes: bool,
    casts_input: bool,
    bias: Weight | None = None,
) -> Tensor:
    """`base(x) + B(A(x)) * scaling`: the base is frozen; peft casts x to the adapter's own format first.

    Under autocast the adapter's products are 16-bit all the same, from copies of its fp32 weights. Beside a 4-bit base
    peft clones the base's result, casts the adapter's to its format before it adds them (elsewhere their sum), and
    casts its input only where told (`casts_input`; peft 0.21, tuners/lora/bnb.py).
    """
    packed = weight.form in NF4
    a, b = adapter_weights(weight, lora)
    base = linear(
        tape,
        x,
        weight,
        element_bytes=element_bytes,
        copies_weight=base_copied,
        caches_copy=base_copied,
        keeps_input=keeps_input,
        keeps_codes=keeps_codes,
        bias=bias,
    )
    if packed:
        result = base
        base = cloned(tape, result)
        tape.drop(result)
    casts = casts_input or not packed
    wide = cast(tape, x, adapter_bytes * weight.features[1] / x.size.per_token) if casts else tape.hold(x)
    copied = product_bytes < adapter_bytes
    down = linear(tape, wide, a, element_bytes=product_bytes, copies_weight=copied, caches_copy=copied)
    up = linear(tape, down, b, element_bytes=product_bytes, copies_weight=copied, caches_copy=copied)
    tape.drop(wide, down)
    scaled = tape.new(up.size, needs_grad=True)

    def scale_backward(grad: Storage) -> None:
        tape.grad_of(up)

    tape.record(scaled, (), scale_backward)
    tape.drop(up)
    if packed:
        scaled = cast_back(tape, scaled, base.size.per_token / scaled.size.per_token)
    total = add(tape, base, scaled)
    tape.drop(base, scaled)
    return cast_back(tape, total, base.size.per_token / total.size.per_token)


def cast_back(tape: Tape, x: Tensor, ratio: float) -> Tensor:
    """Cast a result and let go of the original."""
    output = cast(tape, x, ratio)
    tape.drop(x)
    return output
