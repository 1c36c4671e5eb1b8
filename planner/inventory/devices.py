"""What PyTorch's kernels keep on one kind of device and not on another: a dropout's mask, and attention's scores.

Read in PyTorch, aten/src/ATen/native: Dropout.cpp (commit 03d697c), SoftMax.cpp (0298aaa: what is converted before a
softmax), cuda/SoftMax.cu (000cace: its backward's product), transformers/cuda/sdp_utils.cpp (001f694: which attention
a GPU takes) and, as installed with torch 2.13, transformers/sdp_utils_cpp.h (which a CPU does); what a CPU saves for
backward was looked at in 2.13. A mask of numbers changes nothing on either: a CPU's flash kernel takes it, a GPU's
leaves it to cuDNN's or the memory-efficient one, and all keep queries, keys, values, the mask, the result and the
log-sum-exp. Not here: the operations on a tape (ops.py, attention.py).
"""

from __future__ import annotations

from planner.spec import Kernels, ModelSpec


def mask_bytes(element_bytes: float, *, on_cpu: bool) -> float:
    """Bytes an element of a dropout's mask, for an input of `element_bytes` an element: a GPU's native_dropout keeps
    a boolean; a CPU's dropout is a product with noise in the input's own format (Dropout.cpp,
    is_fused_kernel_acceptable and _dropout_impl)."""
    return element_bytes if on_cpu else 1.0


def fuses_conversion(precision: str, *, on_cpu: bool) -> bool:
    """Whether softmax(x, dtype=float32) reads x as it is: a GPU's kernel does of fp16 alone, and writes x's gradient in
    fp16; any other x is converted before (SoftMax.cpp, softmax: half_to_float)."""
    return precision == "fp16" and not on_cpu


def is_math(model: ModelSpec, kernels: Kernels, *, on_cpu: bool) -> bool:
    """Whether PyTorch computes this model's attention without a fused kernel.

    Falcon 7B has fewer key heads than query heads and does not say so to PyTorch, so no device's fused kernel takes
    it. Where probabilities are dropped, a GPU's fused kernels draw the mask again in backward from a seed, and a CPU's
    refuses (sdp_utils_cpp.h, check_for_dropout).
    """
    one_key_head = model.family == "falcon" and model.layer_norms == 1
    return one_key_head or (on_cpu and kernels.dropouts and model.attention_dropout > 0)
