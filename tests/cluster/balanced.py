"""A router whose choice is forced: token t's k-th expert is (t * top_k + k) modulo the experts.

Every rank then sends as many tokens as the planner assumes, and one process chooses as a split run does. For tests
alone: the trainer knows nothing of it. Not here: who asks for it (warm.py, by the environment).
"""

from __future__ import annotations

import torch


def balance_routers() -> None:
    """From now on in this process `torch.topk`, by which routers choose, takes its turn, not the best."""
    torch.topk = _in_turn  # type: ignore[assignment]


def _in_turn(scores: torch.Tensor, k: int, dim: int = -1, *, sorted: bool = True) -> torch.return_types.topk:
    assert dim in (-1, scores.dim() - 1)
    rows, choices = scores.shape[:-1], scores.shape[-1]
    index = torch.arange(rows.numel() * k, device=scores.device).remainder_(choices).view(*rows, k)
    return torch.return_types.topk((scores.gather(-1, index), index))
