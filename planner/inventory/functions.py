"""Functions of linear modules with their adapters that make one node of autograd's graph each: queries, keys and values
at once, one module alone, and a gated MLP, as Axolotl has them.

Each keeps its input, what dropout left of that, and its adapters in the format it computes in; the input's gradient is
new, and gate and up have theirs in their own place (067b021, kernels/lora.py and kernels/swiglu.py). Not here: peft's
modules and Unsloth's functions (lora.py), or which modules are taken (compute.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from planner.inventory.lora import adapter_weights
from planner.inventory.ops import dropout, fetched_elements, unpacked
from planner.inventory.tape import Backward, Storage, Tape, Tensor
from planner.inventory.tensors import Size, Weight
from planner.spec import Lora

QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
OUT = ("self_attn.o_proj",)
MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
"""The linear modules of each function, by their paths in a layer (067b021, monkeypatch/lora_kernels.py)."""
TAKEN = (*QKV, *OUT, *MLP)


class AdapterFormats(NamedTuple):
    """Bytes an element of adapters at rest and of what is computed, and the share that dropout's mask has of that."""

    lora: Lora
    adapter_bytes: float
    element_bytes: float
    mask_share: float


def linears(tape: Tape, x: Tensor, weights: Sequence[Weight], how: AdapterFormats) -> list[Tensor]:
    """Modules that read one input: LoRA_QKV of three, LoRA_O of one."""
    dropped = dropout(tape, x, how.lora.dropout, how.mask_share)
    outputs = [_product(tape, weight, how, _per_token(x)) for weight in weights]
    join, waiting = tape.new(Size(), needs_grad=True), list[Storage]()

    def backward(grad: Storage) -> None:
        _adapters_grads(tape, weights, how)
        _inputs_grads(tape, x, dropped, weights, how)
        tape.release(*waiting)

    _record(tape, join, (x, dropped), weights, how, backward)

    def hand_on(grad: Storage) -> None:
        grad.holders += 1
        waiting.append(grad)
        tape.grads.setdefault(join, Storage(Size(), join.storage.term))

    for output in outputs:
        tape.record(output, (), hand_on)
    tape.drop(join, dropped)
    return outputs


def gated_mlp(tape: Tape, x: Tensor, weights: Sequence[Weight], how: AdapterFormats) -> Tensor:
    """LoRA_MLP: gate and up of the input, their product, and down of that."""
    gate, up, down = weights
    dropped = dropout(tape, x, how.lora.dropout, how.mask_share)
    inner = [_product(tape, weight, how, _per_token(x)) for weight in (gate, up)]
    product = tape.new(inner[1].size)
    output = _product(tape, down, how, _per_token(product))
    tape.drop(product)

    def backward(grad: Storage) -> None:
        forms = unpacked(tape, down, how.element_bytes)
        again = tape.allocate(product.size)  # the product's gradient, over which the product is made again
        tape.release(*forms)
        _adapters_grads(tape, (down, up, gate), how)
        _inputs_grads(tape, x, dropped, (up, gate), how)
        tape.release(again)

    _record(tape, output, (x, dropped, *inner), weights, how, backward)
    tape.drop(dropped, *inner)
    return output


def _per_token(x: Tensor) -> float:
    return float(x.size.per_token)


def _product(tape: Tape, weight: Weight, how: AdapterFormats, input_bytes: float) -> Tensor:
    """A module's result with its adapter's, added in place, from copies of A and B (matmul_lora)."""
    forms = unpacked(tape, weight, how.element_bytes)
    tape.reach(weight.name)
    share = input_bytes / how.element_bytes / weight.features[1]
    output = tape.new(Size(per_token=weight.features[0] * how.element_bytes * share), needs_grad=True)
    tape.release(*forms)
    tape.release(tape.allocate(_copies((weight,), how)), tape.allocate(_narrow(how)))
    return output


def _narrow(how: AdapterFormats) -> Size:
    """A product of an adapter's rank."""
    return Size(per_token=how.lora.rank * how.element_bytes)


def _copies(weights: Sequence[Weight], how: AdapterFormats) -> Size:
    """A and B in the format of products; nothing where that is their own."""
    if how.element_bytes == how.adapter_bytes:
        return Size()
    elements = sum(one.elements for weight in weights for one in adapter_weights(weight, how.lora))
    return Size(fixed=elements * how.element_bytes)


def _record(
    tape: Tape, output: Tensor, kept: Sequence[Tensor], weights: Sequence[Weight], how: AdapterFormats, run: Backward
) -> None:
    copies = tape.new(_copies(weights, how))
    saved = [x.source if x.discarded and x.source is not None else x for x in kept]
    tape.weight = sum(fetched_elements(weight, how.element_bytes) for weight in weights)
    tape.record(output, (*saved, copies), run, saves_after=True)
    tape.weight = 0
    tape.drop(copies)


def _adapters_grads(tape: Tape, weights: Sequence[Weight], how: AdapterFormats) -> None:
    made = [tape.allocate(_narrow(how)) for _ in weights]
    for weight in weights:
        tape.weight_grad(sum(one.elements for one in adapter_weights(weight, how.lora)))
    tape.release(*made)


def _inputs_grads(tape: Tape, x: Tensor, dropped: Tensor, weights: Sequence[Weight], how: AdapterFormats) -> None:
    for weight in weights[:1]:
        forms = unpacked(tape, weight, how.element_bytes)
        tape.grad_of(x)
        tape.release(*forms)
    for weight in weights[1:]:
        tape.release(*unpacked(tape, weight, how.element_bytes))
    if how.lora.dropout:
        tape.grad_of(dropped)
