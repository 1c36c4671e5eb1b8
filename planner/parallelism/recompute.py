"""Recomputation (activation checkpointing): keep less of a layer, run parts of its forward again in backward.

`full` keeps a layer's input alone (Chen et al. 2016). `attention` runs the attention core again (Korthikanti et al.
2022, selective; flash kernels do so anyway, so it spares a number a head and token). `sac:matmul` keeps the results of
matrix products and of attention and recomputes the rest (PyTorch's selective activation checkpointing). What is kept
follows from the inventory's walk, which really runs the layer twice; here stands what it costs.
"""

from __future__ import annotations

_SHARES = {
    "none": (0.0, 0.0, 0.0),
    "attention": (0.0, 1.0, 0.0),
    "sac:matmul": (0.0, 0.0, 1.0),
    "full": (1.0, 1.0, 1.0),
}


def recomputed_share(recompute: str) -> tuple[float, float, float]:
    """Parts of a layer's forward that run once more: its matrix products, its attention, its element-wise work."""
    return _SHARES[recompute]
