"""Data parallelism: every rank holds the whole model and sees its own sequences; gradients are averaged.

Shards no logical axis but batch. Not here: sharding the model's states (zero.py).
"""

from __future__ import annotations

from planner.basics.arith import Number
from planner.parallelism.collectives import Call, ideal_call


def ideal_collectives(trained_elements: Number, grad_bytes: Number) -> list[Call]:
    """One all-reduce of the trained weights' gradients a step; Li et al. 2020 (PyTorch DDP)."""
    return [ideal_call("all_reduce", "dp_replicate", "backward", trained_elements * grad_bytes)]
