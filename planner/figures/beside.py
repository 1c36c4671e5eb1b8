"""What a layer's linear modules do beside their products: peft's adapters, and 4-bit weights that are unpacked.

Works on one layout and on columns. Not here: the products (unitkernels.py), or what an engine's own code takes
(the hooks of engines/base.py).
"""

from __future__ import annotations

from typing import NamedTuple

from planner.basics.arith import Number
from planner.basics.formula import formula
from planner.engines import engine_of
from planner.engines.common import packed
from planner.inventory.forms import gptq_element_bytes, nf4_element_bytes
from planner.inventory.packaged import is_part
from planner.parallelism.case import Case

ADAPTER_OPERATIONS, CAST_OPERATIONS = 3, 4
"""Of one adapted linear beside its three products, forward as well as backward: dropout, scale and sum; and where fp32
adapters run under autocast, casts of the input to fp32 and back and of both matrices. Counted with a dispatch mode over
peft 0.21 and Transformers 5.23's Llama, a dropout as the one kernel that it is on a GPU: 101 forward and 137 backward
of a layer with seven such linears under autocast, 73 and 109 in bf16, 38 and 71 without adapters."""

GPTQ_OPERATIONS = 9
"""Of one linear: shifts, casts and masks of codes and zeros, difference and scale (AutoGPTQ, qlinear_cuda_old.py)."""
GPTQ_BYTES = 16.0
"""Bytes an element that these move beside reading the codes: shifted as int32 and cast (4 + 4 + 1), masked (1 + 1), the
zero taken away (1 + 1), scaled to fp16 (1 + 2)."""


class PassTraffic(NamedTuple):
    """Bytes of memory that one pass moves, and operations that the host starts for it."""

    moved_bytes: Number
    operations: Number


@formula(unit="bytes", source="peft, tuners/lora/layer.py, Linear.forward: casts, dropout, scale and sum, by operand")
def adapter_forward_bytes(
    inputs: Number, outputs: Number, element_bytes: float, dropped_bytes: float, cast_bytes: float
) -> Number:
    """Memory traffic of adapters beside their products, over elements of their inputs and outputs.

    A dropout moves `dropped_bytes` an element, casts there and back `cast_bytes`.
    """
    return inputs * (dropped_bytes + cast_bytes) + outputs * 5 * element_bytes


@formula(unit="bytes", source="backward of the same: its gradient is added to that of the frozen product's input")
def adapter_backward_bytes(
    inputs: Number, outputs: Number, element_bytes: float, dropped_bytes: float, cast_bytes: float
) -> Number:
    """Memory traffic of adapters' backward beside their products."""
    return inputs * (dropped_bytes + cast_bytes + 3 * element_bytes) + outputs * 2 * element_bytes


@formula(
    unit="bytes", source="bitsandbytes' MatMul4Bit: codes and scales are read, 16-bit weights written, each product"
)
def unpack_bytes(elements: Number, stored_bytes: Number, element_bytes: Number) -> Number:
    """Memory traffic of one pass over 4-bit weights before they can be multiplied."""
    return elements * (stored_bytes + element_bytes)


def adapters_beside(case: Case, unit: str, element_bytes: float) -> tuple[PassTraffic, PassTraffic]:
    """Forward and backward of one layer's adapters beside their products; Unsloth's are one function with the frozen
    product and count as products alone."""
    lora, nothing = case.lora, PassTraffic(0.0, 0.0)
    if lora is None or lora.kind != "lora" or case.parts.adapters == "in-place":
        return nothing, nothing
    inputs: Number = 0.0
    outputs: Number = 0.0
    adapted = 0
    for weight in case.units()[unit]:
        if weight.name.endswith(".lora_A") and not is_part(case.parts, weight):
            inputs, adapted = inputs + case.tokens * weight.shape[1], adapted + 1
        elif weight.name.endswith(".lora_B"):
            outputs = outputs + case.tokens * weight.shape[0]
    held = engine_of(case.layout.engine).compute(case).adapter_bytes
    casts = held > element_bytes
    dropped = 2 * (held if casts else element_bytes) + 1 if lora.dropout else 0.0
    cast = 2 * (held + element_bytes) if casts else 0.0
    operations = adapted * (ADAPTER_OPERATIONS - (not lora.dropout) + CAST_OPERATIONS * casts)
    return (
        PassTraffic(adapter_forward_bytes(inputs, outputs, element_bytes, dropped, cast), operations),
        PassTraffic(adapter_backward_bytes(inputs, outputs, element_bytes, dropped, cast), operations),
    )


def unpacking(case: Case, unit: str, element_bytes: float) -> tuple[PassTraffic, PassTraffic]:
    """Forward and backward of one layer's 4-bit weights before they are multiplied. GPTQ's are unpacked by operations
    that autograd sees, so backward has the weights that forward made."""
    quantization, nothing = case.job.base_quantization, PassTraffic(0.0, 0.0)
    if quantization is None:
        return nothing, nothing
    found = [weight for weight in case.units()[unit] if packed(case, weight)]
    elements = sum(weight.elements for weight in found) + 0.0
    if quantization.base == "gptq":
        stored = gptq_element_bytes(case.model.hidden)
        operations = GPTQ_OPERATIONS * sum(not is_part(case.parts, weight) for weight in found)
        return PassTraffic(unpack_bytes(elements, stored, GPTQ_BYTES), operations), nothing
    once = PassTraffic(unpack_bytes(elements, nf4_element_bytes(quantization), element_bytes), 0.0)
    return once, once
