"""The textbook table: model states of a parameter count alone, by what is sharded.

No activations, buffers or padding. Not here: a real model's memory (memory.py), or the formulas (parallelism/zero.py).
"""

from __future__ import annotations

from planner.parallelism.zero import grad_state_bytes, optimizer_state_bytes, state_bytes, weight_state_bytes
from planner.spec import Optimizer

SHARDED = ("nothing (DDP)", "optimizer (ZeRO-1)", "and gradients (ZeRO-2)", "and weights (ZeRO-3, FSDP)")
"""By stage."""


def states_table(params: float, precision: str, gpus: int) -> list[tuple[str, float, float, float]]:
    """(what is sharded, weights, gradients, optimizer) in bytes a GPU. "mixed" is the ZeRO paper's 2 + 2 + 12."""
    each = state_bytes(precision, Optimizer(), separate_master=precision == "mixed")
    return [
        (
            name,
            float(weight_state_bytes(params, each, stage, gpus)),
            float(grad_state_bytes(params, each, stage, gpus)),
            float(optimizer_state_bytes(params, each, stage, gpus)),
        )
        for stage, name in enumerate(SHARDED)
    ]
