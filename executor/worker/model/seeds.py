"""Seeds of random numbers: shared by all ranks, or each rank's own.

Weights come from one seed on every rank, because FSDP2 broadcasts nothing. Not here: the order of the data
(data.py), which has its own generator.
"""

from __future__ import annotations

import hashlib
import random

import torch


def seed_all(seed: int) -> None:
    """Seed what draws weights and dropout; before a model is built, the same on every rank and in every layout."""
    random.seed(seed)
    torch.manual_seed(seed)


def seed_step(seed: int, step: int, data_parallel_rank: int) -> None:
    """Before each step: what it draws (dropout) follows from these three, so that a resumed run draws the same and no
    generator has to be saved. Ranks that see other sequences draw other numbers."""
    found = hashlib.sha256(f"{seed} {step} {data_parallel_rank}".encode()).digest()
    seed_all(int.from_bytes(found[:8], "little") >> 1)
