"""Decoder layers under torch.compile, each by itself (the layout's `compile`).

Not here: what a compiled layer keeps (planner/inventory/compute.py).
"""

from __future__ import annotations

from typing import Any

import torch

from executor.worker.model.layers import layers_of
from planner.spec import Layout


def enable(model: Any, layout: Layout) -> None:
    """Compile each layer in place with Inductor, before anything wraps or shards it.

    In place (nn.Module.compile) hooks that FSDP2 and ZeRO put on a layer later are still called. Transformers'
    checkpoint is inside what is compiled (5.23.0, modeling_layers.py, forward_with_checkpointing).
    """
    if layout.compile != "block":
        return
    # A layer's gradients come together, and so does its bucket: nothing is won by cutting its graph at buckets.
    torch._dynamo.config.optimize_ddp = False
    for layer in layers_of(model):
        layer.compile()
