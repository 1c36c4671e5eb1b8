"""Transformer Engine's recipes of 8-bit and 4-bit products: what its modules hold of inputs and weights in them.

Read in TransformerEngine (commit d0067d0d): pytorch/module/linear.py and layernorm_linear.py (an input is quantised by
rows for the forward and by columns for the weight's gradient, of which the second stays), grouped_linear.py (experts),
common/recipe/__init__.py; and in Megatron-LM (commit d98e8a64): core/transformer/attention.py (save_original_input).
No published run measures these bytes: they are derived, not measured. Not here: rates (figures/passes.py), or torchao's
float8, which keeps 16-bit inputs (ops.py).
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from planner.basics.arith import Number, maximum, where
from planner.basics.formula import formula
from planner.basics.quantities import BYTES
from planner.inventory.tensors import Weight
from planner.spec import Kernels, Quantization

CODE_BYTES, CODE_8_BYTES = 0.5, 1.0
"""A 4-bit code, and one of 8 bits."""
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


INT8 = ("int8", "int8-half")
"""Forms of LLM.int8's weights: multiplied into bf16 or fp32, and into fp16, in which its kernels read and write."""


@formula(unit="bytes", source="bitsandbytes 0.50.2, nn/modules.py, Int8Params: 8-bit codes, an fp32 scale (SCB) a row")
def int8_element_bytes(in_features: Number) -> Number:
    """One element of an LLM.int8 weight: its code, and its share of the row's scale."""
    return CODE_8_BYTES + BYTES["fp32"] / in_features


@formula(
    unit="bytes",
    source="bitsandbytes 0.50.2, autograd/_functions.py, MatMul8bitLt, and backends/cuda/ops.py, int8_vectorwise_quant",
)
def int8_quantising_bytes(half: bool) -> Number:
    """Bytes an element of an input while it is quantised, beside its codes.

    Magnitudes in fp16 and which are outliers, and an fp16 copy of what is in another format.
    """
    return BYTES["fp16"] + 1 + BYTES["fp16"] * (1 - half)


@formula(
    unit="bytes",
    source="bitsandbytes 0.50.2, backends/cuda/ops.py, int8_linear_matmul and int8_mm_dequant",
)
def int8_product_bytes(half: bool) -> Number:
    """Bytes an element of a result while it is made, beside it: 32-bit sums, and fp16 ones where others are asked.

    Columns of inputs with a value beyond 6 are kept and multiplied once more in 16 bits. They are as many as the data
    have and are not counted: 0.1 % more memory by section 3.2 of the paper (Dettmers et al. 2022).
    """
    return BYTES["fp32"] + BYTES["fp16"] * (1 - half)


@formula(unit="bytes", source="AutoGPTQ, qlinear_cuda_old.py: 4-bit codes and zeros, fp16 scales, an int32 a row")
def gptq_element_bytes(out_features: Number) -> Number:
    """One element of a GPTQ weight: its 4-bit code, and its share of the scales, zeros and group indices."""
    return CODE_BYTES + (BYTES["fp16"] + CODE_BYTES) / GPTQ_GROUP + BYTES["fp32"] / out_features


def is_layer_linear(weight: Weight, kernels: Kernels, *, stacks: bool = False) -> bool:
    """Whether bitsandbytes and torchao convert it: the linear modules of layers; norms and embedding stay, and the
    head unless the kernels have it packed. Experts that run one after the other are linear modules, with their router,
    but gpt-oss's, whose matrices are held as (in, out); in one parameter they are converted where `stacks` are."""
    if stacks and is_stack(weight):
        return True
    if (weight.alone or weight.bare) and kernels.experts != "looped":
        return False
    inside = weight.unit not in ("embed", "tail") or (kernels.packed_head and weight.name == "lm_head")
    one_by_one = kernels.experts == "looped" and weight.expert and not weight.transposed
    matrix = len(weight.shape) == 2 + one_by_one and weight.expert == one_by_one
    return inside and matrix and not weight.adapter


def is_stack(weight: Weight) -> bool:
    """Whether a weight is the matrices of all experts of a layer in one parameter, not their biases."""
    return weight.expert and len(weight.shape) == 3


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


# -- Forms -------------------------------------------------------------------------------------------------------------


class ScalingRecipe(msgspec.Struct, frozen=True):
    """One way to scale. `block` elements of a row of an input share a scale of `scale_bytes`, `weight_block` of a
    weight; 0: a tensor has one. `turned`: a product reads its operands by rows and by columns from two copies on every
    device, not only on those that multiply in one order. `result_once`: attention's result is kept as attention keeps
    it, in 16 bits, and quantised again in backward. `history` are the largest values that each tensor remembers.
    """

    bits: int
    block: int
    weight_block: int
    scale_bytes: float
    turned: bool
    result_once: bool
    history: int
    source: str


RECIPES = {
    "fp8": ScalingRecipe(
        8, 0, 0, 4.0, False, True, 0,
        "recipe.Float8CurrentScaling: a scale a tensor, from the tensor itself (tensorwise)",
    ),
    "fp8-delayed": ScalingRecipe(
        8, 0, 0, 4.0, False, False, 1024,
        "recipe.DelayedScaling: a scale a tensor, from the largest values of the last 1,024 steps; linear.py refuses "
        "save_original_input with it",
    ),
    "fp8-blockwise": ScalingRecipe(
        8, 128, 128 * 128, 4.0, True, True, 0, "recipe.Float8BlockScaling: 1 x 128 of an input, 128 x 128 of a weight"
    ),
    "mxfp8": ScalingRecipe(
        8, 32, 32, 1.0, True, True, 0,
        "recipe.MXFP8BlockScaling: an E8M0 scale for 32 elements; a copy by columns is not a transpose of one by rows",
    ),
    "nvfp4": ScalingRecipe(
        4, 16, 16, 1.0, True, True, 0, "recipe.NVFP4BlockScaling: an E4M3 scale for 16 elements, and one a tensor"
    ),
}  # fmt: skip
"""By the job's precision, under an engine that has them."""

MODULE_TENSORS = 5
"""Tensors of a linear module whose largest values delayed scaling remembers: input, weight and output, gradients of
output and input (pytorch/module/base.py, set_meta_tensor)."""


class Narrow(NamedTuple):
    """How one linear module narrows: bytes an element of the input that it keeps (0: it keeps the 16-bit one), of a
    copy by rows, and of all copies of an operand that products in both directions need."""

    kept: float
    one: float
    both: float


@formula(unit="bytes", source="TransformerEngine, pytorch/tensor: codes, and a scale for each block of elements")
def element_bytes(bits: Number, block: Number, scale_bytes: Number) -> Number:
    """One element of a narrow copy with its part of a scale."""
    return bits / 8 + where(block > 0, scale_bytes / maximum(block, 1), 0.0)


def input_bytes(recipe: ScalingRecipe) -> float:
    """An element of one copy of an input."""
    return float(element_bytes(recipe.bits, recipe.block, recipe.scale_bytes))


def gathered_ratio(precision: str) -> float:
    """Bytes that tensor ranks gather of an input of split linears, or of a gradient of their results, for each byte in
    16 bits, where each narrows its own tokens first (torchao, float8/float8_tensor_parallel.py)."""
    return input_bytes(RECIPES[precision]) / BYTES["bf16"]


def copies(recipe: ScalingRecipe, either_order: bool) -> int:
    """Copies of an operand for products that read it by rows and by columns: one where a device multiplies in either
    order (Blackwell: pytorch/utils.py, is_non_tn_fp8_gemm_supported) and a tensor has one scale."""
    return 1 if either_order and not recipe.turned else 2


def weight_bytes(recipe: ScalingRecipe, either_order: bool) -> float:
    """An element of a weight in all its narrow copies, which stay (module/base.py, quantize_weight; with
    fp8_param_gather they are the weight)."""
    each = element_bytes(recipe.bits, recipe.weight_block, recipe.scale_bytes)
    return copies(recipe, either_order) * float(each)


def history_bytes(recipe: ScalingRecipe) -> float:
    """What one linear module remembers of the largest values."""
    return float(recipe.history * MODULE_TENSORS * BYTES["fp32"])
