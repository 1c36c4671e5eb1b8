"""Data parallelism: every rank holds the whole model and sees its own sequences; gradients are averaged.

Shards no logical axis but batch. Not here: sharding the model's states (zero.py).
"""

from __future__ import annotations

from planner.basics.arith import Number
from planner.basics.formula import formula
from planner.parallelism.base import IdealCollective


@formula(unit="sequences", source="definition; nodes x GPUs x micro-batch x accumulation for pure data parallelism")
def global_batch_size(data_parallel: Number, micro_batch_size: Number, grad_accum: Number) -> Number:
    """Sequences one optimizer step sees."""
    return data_parallel * micro_batch_size * grad_accum


def ideal_collectives(trained_elements: Number, grad_bytes: Number) -> list[IdealCollective]:
    """One all-reduce of the trained weights' gradients a step; Li et al. 2020 (PyTorch DDP)."""
    return [IdealCollective("all_reduce", "dp_replicate", "backward", trained_elements * grad_bytes)]
