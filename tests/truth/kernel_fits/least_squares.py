"""Fit a few numbers to many logarithms of times: least squares that hold outliers at arm's length, and keep near a
first guess what the measurements do not tell.

Levenberg and Marquardt's steps with weights by residual (iteratively reweighted). Not here: what is fitted (fit.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np

    Column: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
else:
    Column: TypeAlias = Any

OUTLYING = 0.05
"""Residuals (of logarithms) beyond which a measurement counts by its size and not its square."""
STEP = 0.02
LONGEST = 0.7
ENOUGH = 1e-4
"""Relative gain below which it stops."""


def fitted(residuals: Callable[[Column], Column], start: Column, rounds: int = 40) -> Column:
    """Values near `start` with the least sum of pseudo-Huber losses of `residuals`."""
    import numpy as np

    here: Column = np.array(start, float)
    damping = 1e-2
    found = residuals(here)
    loss = _loss(found)
    for _ in range(rounds):
        slopes = np.stack([_slope(residuals, here, place) for place in range(len(here))], axis=1)
        weights = 1 / np.sqrt(1 + (found / OUTLYING) ** 2)
        normal, gradient = slopes.T @ (slopes * weights[:, None]), slopes.T @ (weights * found)
        for _ in range(8):
            damped = normal + damping * np.diag(np.diag(normal) + 1e-6)
            there = here + np.clip(np.linalg.solve(damped, -gradient), -LONGEST, LONGEST)
            tried = residuals(there)
            if (reached := _loss(tried)) < loss:
                break
            damping *= 5
        else:
            break
        gained, here, found, loss = (loss - reached) / loss, there, tried, reached
        damping = max(damping / 4, 1e-6)
        if gained < ENOUGH:
            break
    return here


def held(values: Column, first: Column, widths: Sequence[float], rows: int, weight: float) -> Column:
    """Residuals of values that leave their first guess: `weight` times each width for a hundred rows."""
    import numpy as np

    off: Column = weight * np.sqrt(rows / 100) * (values - first) / np.array(widths)
    return off


def _slope(residuals: Callable[[Column], Column], here: Column, place: int) -> Column:
    above, below = here.copy(), here.copy()
    above[place] += STEP
    below[place] -= STEP
    return (residuals(above) - residuals(below)) / (2 * STEP)


def _loss(found: Column) -> float:
    import numpy as np

    return float(OUTLYING**2 * np.sum(np.sqrt(1 + (found / OUTLYING) ** 2) - 1))
