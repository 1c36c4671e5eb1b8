"""Which random numbers are shared by all ranks and which are each rank's own.

Weights come from one seed on every rank, because FSDP2 broadcasts nothing. Not here: the order of the data
(data.py), which has its own generator.
"""

from __future__ import annotations

import random

import torch


def seed_weights(seed: int) -> None:
    """Before the model is built: the same on every rank and in every layout."""
    _seed(seed)


def seed_rank(seed: int, data_parallel_rank: int) -> None:
    """After the model is built: ranks that see other sequences draw other numbers (dropout)."""
    _seed(seed + 1 + data_parallel_rank)


def _seed(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
