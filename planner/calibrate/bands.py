"""How far a prediction may be trusted: factors between which nine left-out measurements of ten lie, by runtime.

Taken from residuals of calibrations that never saw the measurement (holdout.py). Not here: these calibrations, or how
many measurements such bands hold (tests/truth/published/coverage.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planner.calibrate.holdout import Residual
from planner.spec.calibration import BandEntry

LEAST = 10
"""Residuals below which a band would be an anecdote: the default stays."""
SEVERAL = 3
"""Runtimes with residuals before those without are given theirs."""
TAIL = 0.025
"""Share of the residuals at hand beyond each end of a band. The next model, or software, is not one of those measured:
with a twentieth beyond each end 80 to 88 % of the measurements lay inside whose model or source was left out, with this
about nine in ten (docs/accuracy/fitted.md)."""
NARROWEST_MEMORY, NARROWEST_TIME = 0.02, 0.08
"""No band is narrower: live bytes are counted to 2 %, and equal machines differ by 5 to 10 % in step time (truth rows'
README, noise floor)."""

Weighted = list[tuple[float, float]]
"""(measured/predicted, weight) of residuals."""


def bands(by_model: Sequence[Residual], by_source: Sequence[Residual]) -> list[BandEntry]:
    """One entry for each runtime that has enough residuals, after one for all others on CUDA devices.

    Of others nothing is known but how far software was off whose source had been left out, each runtime counting once
    however often it was measured. Of a runtime itself its residuals count, one for each model; and the others count as
    one model more, since the next may be as unlike those measured as other software. A spread is of memory and time
    together.
    """
    inside = [one for one in by_model if one.sample.device_kind != "cpu"]
    outside = [one for one in by_source if one.sample.device_kind != "cpu"]
    names = sorted({one.sample.runtime for one in inside})
    own = [_own([one for one in inside if one.sample.runtime == name], outside) for name in names]
    found = [one for one in own if one is not None]
    numbers: dict[str, float] = {}
    for what, error in ERRORS.items():
        if len({one.sample.runtime for one in outside if getattr(one, error) is not None}) >= SEVERAL:
            numbers |= _numbers(what, _others(outside, error))
    if not numbers:
        return found
    source = "nine in ten of measured/predicted where the source was left out, each runtime counting once"
    about = {"gpu": "cuda", "n": len(outside), "spread": _spread(outside), "source": source}
    return [msgspec.convert(about | numbers, BandEntry), *found]


ERRORS = {"memory": "memory_error", "time": "time_error"}
NARROWEST = {"memory": NARROWEST_MEMORY, "time": NARROWEST_TIME}


def _own(residuals: Sequence[Residual], outside: Sequence[Residual]) -> BandEntry | None:
    runtime = residuals[0].sample.runtime
    numbers: dict[str, float] = {}
    counts = []
    for what, error in ERRORS.items():
        mine = [one for one in residuals if getattr(one, error) is not None]
        if len(mine) < LEAST:
            continue
        models = len({one.sample.model for one in mine})
        others = _others([one for one in outside if one.sample.runtime != runtime], error)
        numbers |= _numbers(what, _weighted(mine, error, models) + others)
        counts.append(len(mine))
    if not numbers:
        return None
    source = "nine in ten of measured/predicted, each predicted without its model's measurements"
    about = {"runtime": runtime, "n": max(counts), "spread": _spread(residuals), "source": source}
    return msgspec.convert(about | numbers, BandEntry)


def _others(outside: Sequence[Residual], error: str) -> Weighted:
    """Residuals that together weigh 1, each runtime as much as any other."""
    known = [one for one in outside if getattr(one, error) is not None]
    names = sorted({one.sample.runtime for one in known})
    return [
        pair
        for name in names
        for pair in _weighted([one for one in known if one.sample.runtime == name], error, 1 / len(names))
    ]


def _weighted(residuals: Sequence[Residual], error: str, weight: float) -> Weighted:
    return [(1 / (1 + getattr(one, error)), weight / len(residuals)) for one in residuals]


def _numbers(what: str, ratios: Weighted) -> dict[str, float]:
    low, high = ends(ratios, NARROWEST[what])
    found = {f"{what}_low": low, f"{what}_high": high}
    return found | {"memory_middle": float(f"{quantile(ratios, 0.5):.3g}")} if what == "memory" else found


def ends(ratios: Weighted, narrowest: float) -> tuple[float, float]:
    """(low, high) factors of a prediction from what was measured over it, a share TAIL beyond each."""
    low, high = quantile(ratios, TAIL), quantile(ratios, 1 - TAIL)
    return float(f"{min(low, 1 - narrowest):.3g}"), float(f"{max(high, 1 + narrowest):.3g}")


def quantile(ratios: Weighted, share: float) -> float:
    """The ratio below which this share of the weight lies, half of its own counted; straight lines in between."""
    import numpy as np

    values, weights = np.array(sorted(ratios), dtype=float).T
    below = np.cumsum(weights) - weights / 2
    return float(np.interp(share * weights.sum(), below, values))


def _spread(residuals: Sequence[Residual]) -> float:
    import numpy as np

    errors = [getattr(one, error) for one in residuals for error in ERRORS.values()]
    return float(f"{np.median([abs(error) for error in errors if error is not None]):.3g}")
