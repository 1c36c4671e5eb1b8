"""How far a prediction may be trusted: factors between which nine left-out measurements of ten lie, by runtime.

Taken from residuals of calibrations that never saw the measurement (holdout.py). Not here: these calibrations.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planner.calibrate.holdout import Residual
from planner.calibration import BandEntry

LEAST = 10
"""Residuals below which a band would be an anecdote: the default stays."""
LOW, HIGH = 0.05, 0.95
NARROWEST_MEMORY, NARROWEST_TIME = 0.02, 0.08
"""No band is narrower: live bytes are counted to 2 %, and equal machines differ by 5 to 10 % in step time (truth rows'
README, noise floor)."""


def bands(left_out: Sequence[Residual]) -> list[BandEntry]:
    """One entry for all CUDA devices, then one for each runtime that has enough residuals."""
    on_gpu = [one for one in left_out if one.sample.device_kind != "cpu"]
    runtimes = sorted({one.sample.runtime for one in left_out})
    found = [_entry(on_gpu, {"gpu": "cuda"})]
    found += [_entry([one for one in left_out if one.sample.runtime == name], {"runtime": name}) for name in runtimes]
    return [one for one in found if one is not None]


def _entry(residuals: Sequence[Residual], where: dict[str, str]) -> BandEntry | None:
    memory = [one.memory_error for one in residuals if one.memory_error is not None]
    time = [one.time_error for one in residuals if one.time_error is not None]
    numbers: dict[str, float] = {}
    if len(memory) >= LEAST:
        numbers["memory_low"], numbers["memory_high"] = band(memory, NARROWEST_MEMORY)
    if len(time) >= LEAST:
        numbers["time_low"], numbers["time_high"] = band(time, NARROWEST_TIME)
    if not numbers:
        return None
    source = "from 5 to 95 % of measured/predicted, each predicted without its model's measurements"
    facts = {"n": max(len(memory), len(time)), "source": source}
    return msgspec.convert(facts | numbers | where, BandEntry)


def band(errors: Sequence[float], narrowest: float) -> tuple[float, float]:
    """(low, high) factors of a prediction from errors predicted/measured - 1."""
    import numpy as np

    ratios = 1 / (1 + np.asarray(errors, dtype=float))
    low, high = np.quantile(ratios, (LOW, HIGH))
    return float(min(low, 1 - narrowest)), float(max(high, 1 + narrowest))


def covered(residuals: Sequence[Residual], known_low: float, known_high: float, what: str) -> float | None:
    """Share of measurements inside a band, `what` being memory_error or time_error; None without any."""
    errors: list[float] = [getattr(one, what) for one in residuals if getattr(one, what) is not None]
    if not errors:
        return None
    return sum(known_low <= 1 / (1 + error) <= known_high for error in errors) / len(errors)
