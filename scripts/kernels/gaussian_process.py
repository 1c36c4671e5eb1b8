"""A Gaussian process over logarithms of sizes: what a model without any knowledge of GPUs makes of the same rows.

A Matern 3/2 kernel with a length for each size, a linear one and noise, on the logarithm of seconds a FLOP; the
numbers are those of the greatest marginal likelihood, sought in plain NumPy so that nothing is installed for it. Not
here: what it is compared with (judge.py).
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

Column: TypeAlias = np.ndarray[tuple[int, ...], np.dtype[np.float64]]
SEARCHED = 300
"""Rows among which lengths are sought; all are used to predict."""
TRIALS = 140


def predicted(known: Column, values: Column, asked: Column, seed: int = 0) -> Column:
    """Values at the rows `asked`, from those of the rows `known` (columns are standardised here)."""
    middle, width = known.mean(axis=0), known.std(axis=0)
    known, asked = (known - middle) / width, (asked - middle) / width
    level, spread = values.mean(), values.std()
    targets = (values - level) / spread
    numbers = _sought(known, targets, seed)
    covariance = _covariance(known, known, numbers) + np.exp(numbers[-1]) * np.eye(len(known))
    weights = np.linalg.solve(covariance, targets)
    found: Column = level + spread * (_covariance(asked, known, numbers) @ weights)
    return found


def _sought(known: Column, targets: Column, seed: int) -> Column:
    """Logarithms of variance, lengths, slope's variance and noise: the best of a shrinking random search."""
    chance = np.random.default_rng(seed)
    some = chance.permutation(len(known))[:SEARCHED]
    known, targets = known[some], targets[some]
    best = np.array([0.0, *np.zeros(known.shape[1]), -1.0, -3.0])
    loss = _loss(known, targets, best)
    for trial in range(TRIALS):
        tried = best + chance.normal(0, 1.5 * 0.97**trial + 0.05, len(best))
        if (reached := _loss(known, targets, tried)) < loss:
            best, loss = tried, reached
    return best


def _loss(known: Column, targets: Column, numbers: Column) -> float:
    """The negative logarithm of the marginal likelihood."""
    covariance = _covariance(known, known, numbers) + (np.exp(numbers[-1]) + 1e-6) * np.eye(len(known))
    try:
        root = np.linalg.cholesky(covariance)
    except np.linalg.LinAlgError:
        return float("inf")
    half = np.linalg.solve(root, targets)
    return float(0.5 * half @ half + np.log(np.diag(root)).sum())


def _covariance(first: Column, second: Column, numbers: Column) -> Column:
    lengths = np.exp(numbers[1 : 1 + first.shape[1]])
    apart = np.sqrt(3 * np.square((first[:, None, :] - second[None, :, :]) / lengths).sum(axis=2))
    found: Column = np.exp(numbers[0]) * (1 + apart) * np.exp(-apart) + np.exp(numbers[-2]) * (first @ second.T)
    return found
