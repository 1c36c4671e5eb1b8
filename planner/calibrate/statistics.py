"""What is said of many errors together: medians, tails, bias, and how well an order is met.

An error is predicted / measured - 1; a factor is the larger of a ratio and its inverse. Not here: which measurements
belong together (score.py, planner/calibrate/report.py).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import msgspec


class RelativeErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Of e = predicted / measured - 1: the median and the 90th percentile of |e|, and the median of e."""

    n: int
    median: float
    p90: float
    bias: float


class Factors(msgspec.Struct, frozen=True, kw_only=True):
    """Of ratios predicted / measured: median and 90th percentile of max(r, 1/r), the median of r (`bias`), and the
    first two again after all predictions are divided by that one number."""

    n: int
    median: float
    p90: float
    bias: float
    scaled_median: float
    scaled_p90: float


def errors_of(errors: Sequence[float]) -> RelativeErrors:
    """Of one error or more."""
    sizes = [abs(error) for error in errors]
    return RelativeErrors(n=len(errors), median=median(sizes), p90=percentile(sizes, 0.9), bias=median(errors))


def factors_of(ratios: Sequence[float]) -> Factors:
    """Of one ratio or more, each above 0."""
    middle = median(ratios)
    plain, scaled = ([max(one, 1 / one) for one in some] for some in (ratios, [one / middle for one in ratios]))
    return Factors(
        n=len(ratios),
        median=median(plain),
        p90=percentile(plain, 0.9),
        bias=middle,
        scaled_median=median(scaled),
        scaled_p90=percentile(scaled, 0.9),
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed (nearest rank)."""
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


def spearman(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Spearman's rank correlation, equal values sharing their mean rank; None where one side never varies."""
    first, second = _rank_of(one), _rank_of(other)
    mean = (len(one) + 1) / 2
    shared = sum((a - mean) * (b - mean) for a, b in zip(first, second, strict=True))
    spread = math.sqrt(sum((a - mean) ** 2 for a in first) * sum((b - mean) ** 2 for b in second))
    return shared / spread if spread else None


def _rank_of(values: Sequence[float]) -> list[float]:
    order = sorted(range(len(values)), key=values.__getitem__)
    ranks = [0.0] * len(values)
    start = 0
    while start < len(order):
        stop = start
        while stop < len(order) and values[order[stop]] == values[order[start]]:
            stop += 1
        for place in order[start:stop]:
            ranks[place] = (start + stop + 1) / 2
        start = stop
    return ranks
