"""Forms in which a layer's linear weights are held or multiplied: 4-bit NormalFloat (QLoRA), 4-bit integers (GPTQ),
8-bit float (fp8).

What the linear function allocates for them stands in ops.py. Not here: who is asked for which (spec/job.py).
"""

from __future__ import annotations

from planner.basics.arith import Number
from planner.basics.formula import formula
from planner.basics.units import BYTES
from planner.inventory.tensors import Weight
from planner.spec import Quantization

CODE_BYTES = 0.5
"""A 4-bit code."""
BLOCK, OUTER_BLOCK = 64, 256
"""Weights a scale, and scales a scale of scales (bitsandbytes' defaults)."""
TABLE_BYTES, SCALE_TABLE_BYTES = 16 * BYTES["fp32"], 256 * BYTES["fp32"] + BYTES["fp32"]
"""What every 4-bit weight has of its own: the values of its codes, and under double quantisation those of its scales
with their mean (bitsandbytes 0.50, functional.quantize_4bit)."""
PACKED = CODE_BYTES / BYTES["bf16"]
"""16-bit elements that one 4-bit weight is stored in."""
NF4 = ("nf4", "nf4-double")
"""Forms of 4-bit weights: with fp32 scales, and with scales that are quantised too."""


GPTQ_GROUP = 128
"""Rows of a GPTQ checkpoint that share a scale and a zero (AutoGPTQ's BaseQuantizeConfig, group_size)."""
GPTQ_UNPACKING_BYTES = 5.0
"""Bytes an element while GPTQ's codes are unpacked: shifted 32-bit integers beside 8-bit ones (AutoGPTQ,
nn_modules/qlinear/qlinear_cuda_old.py, forward)."""


@formula(unit="bytes", source="AutoGPTQ, qlinear_cuda_old.py: 4-bit codes and zeros, fp16 scales, an int32 a row")
def gptq_element_bytes(out_features: Number) -> Number:
    """A 4-bit code of a weight with so many outputs, and its part of scales, zeros and group indices."""
    return CODE_BYTES + (BYTES["fp16"] + CODE_BYTES) / GPTQ_GROUP + BYTES["fp32"] / out_features


def is_layer_linear(weight: Weight, *, head: bool = False) -> bool:
    """Whether bitsandbytes and torchao convert it: the linear modules of layers; norms and embedding stay, and the
    head unless it is asked for."""
    inside = weight.unit not in ("embed", "tail") or (head and weight.name == "lm_head")
    return inside and len(weight.shape) == 2 and not weight.adapter


@formula(unit="bytes", source="QLoRA, Dettmers et al. 2023, section 3: fp32 scales of 64, or 8-bit ones scaled by 256")
def nf4_scale_bytes(elements: Number, double: bool) -> Number:
    """Scales beside the codes: 0.0625 bytes a weight, 0.0159 with double quantisation."""
    if not double:
        return elements * BYTES["fp32"] / BLOCK
    return elements / BLOCK + elements * BYTES["fp32"] / (BLOCK * OUTER_BLOCK)


def storage_bytes(quantization: Quantization) -> float:
    """Bytes of one element of the tensor that codes are packed in."""
    return float(BYTES["bf16"]) if quantization.storage == "bf16" else 1.0


def nf4_state_bytes(elements: Number, double: bool) -> Number:
    """What one weight has beside its codes: scales and tables. No framework shards them: they are not weights."""
    return nf4_scale_bytes(elements, double) + TABLE_BYTES + (SCALE_TABLE_BYTES if double else 0)


def unpacked_scale_bytes(weight: Weight) -> float:
    """fp32 scales that are made anew from quantised ones for every product."""
    return weight.elements * BYTES["fp32"] / BLOCK if weight.form == "nf4-double" else 0.0


def nf4_element_bytes(quantization: Quantization) -> float:
    """Code and scales of one weight element."""
    return CODE_BYTES + float(nf4_scale_bytes(1.0, quantization.double))
