"""A model of Transformers with its layers' linears in 4 bits, as the trainer packs them."""

from __future__ import annotations

import torch
from torch import nn

from planner.spec import Quantization


def pack(model: nn.Module, quantization: Quantization, dtype: torch.dtype) -> None:
    """Put 4-bit linears that hold the same numbers in the place of the layers' own."""
    from executor.worker.model.quantized import awaits_codes, pack_layers, quantized

    weights = dict(model.named_parameters())
    pack_layers(model, quantization, dtype)
    for name, module in model.named_modules():
        if awaits_codes(module):
            module.weight = quantized(module, weights[f"{name}.weight"].detach().to(dtype), torch.device("cpu"))
