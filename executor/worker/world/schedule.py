"""The learning rate of each step: linear warm-up, then a cosine down to a floor.

Not here: setting it (each engine writes it into its optimizer).
"""

from __future__ import annotations

import math

from planner.spec import Optimizer, Recipe


def learning_rate(optimizer: Optimizer, recipe: Recipe, step: int) -> float:
    """Rate of optimizer step `step`, counted from 0."""
    if step < recipe.warmup_steps:
        return optimizer.lr * (step + 1) / recipe.warmup_steps
    progress = min(1.0, (step - recipe.warmup_steps) / max(1, recipe.steps - recipe.warmup_steps))
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    return optimizer.lr * (recipe.min_lr_ratio + (1 - recipe.min_lr_ratio) * cosine)
