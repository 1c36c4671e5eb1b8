"""How far a prediction may be trusted: factors between which nine left-out measurements of ten lie, by runtime.

Taken from residuals of calibrations that never saw the measurement (holdout.py). Not here: these calibrations.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from planner.calibrate.holdout import Residual
from planner.spec.calibration import BandEntry

LEAST = 10
"""Residuals below which a band would be an anecdote: the default stays."""
SEVERAL = 3
"""Runtimes with a band before those without one are told their median."""
LOW, HIGH = 0.05, 0.95
NARROWEST_MEMORY, NARROWEST_TIME = 0.02, 0.08
"""No band is narrower: live bytes are counted to 2 %, and equal machines differ by 5 to 10 % in step time (truth rows'
README, noise floor)."""


def bands(left_out: Sequence[Residual]) -> list[BandEntry]:
    """One entry for each runtime that has enough residuals, after one for all others on CUDA devices: the median of
    these, each runtime counting once however often it was measured. A spread is of memory and time together."""
    runtimes = sorted({one.sample.runtime for one in left_out if one.sample.device_kind != "cpu"})
    own = [_entry([one for one in left_out if one.sample.runtime == name], name) for name in runtimes]
    found = [one for one in own if one is not None]
    numbers: dict[str, float] = {}
    for what in ("memory", "time"):
        there = [one for one in found if getattr(one, f"{what}_low") is not None]
        if len(there) >= SEVERAL:
            for end in ("low", "middle", "high") if what == "memory" else ("low", "high"):
                numbers[f"{what}_{end}"] = round(statistics.median(getattr(one, f"{what}_{end}") for one in there), 3)
    if not numbers:
        return found
    source = f"the median of {len(found)} runtimes' bands"
    spread = statistics.median(one.spread or 0.0 for one in found)
    facts = {"gpu": "cuda", "n": sum(one.n for one in found), "spread": spread, "source": source}
    return [msgspec.convert(facts | numbers, BandEntry), *found]


def _entry(residuals: Sequence[Residual], runtime: str) -> BandEntry | None:
    memory = [one.memory_error for one in residuals if one.memory_error is not None]
    time = [one.time_error for one in residuals if one.time_error is not None]
    numbers: dict[str, float] = {}
    if len(memory) >= LEAST:
        numbers["memory_low"], numbers["memory_high"] = band(memory, NARROWEST_MEMORY)
        numbers["memory_middle"] = float(f"{statistics.median(1 / (1 + error) for error in memory):.3g}")
    if len(time) >= LEAST:
        numbers["time_low"], numbers["time_high"] = band(time, NARROWEST_TIME)
    if not numbers:
        return None
    source = "from 5 to 95 % of measured/predicted, each predicted without its model's measurements"
    spread = float(f"{statistics.median(abs(error) for error in (*memory, *time)):.3g}")
    facts = {"runtime": runtime, "n": max(len(memory), len(time)), "spread": spread, "source": source}
    return msgspec.convert(facts | numbers, BandEntry)


def band(errors: Sequence[float], narrowest: float) -> tuple[float, float]:
    """(low, high) factors of a prediction from errors predicted/measured - 1."""
    import numpy as np

    ratios = 1 / (1 + np.asarray(errors, dtype=float))
    low, high = np.quantile(ratios, (LOW, HIGH))
    return float(f"{min(low, 1 - narrowest):.3g}"), float(f"{max(high, 1 + narrowest):.3g}")
