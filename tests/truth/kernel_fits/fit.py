"""Fit the numbers of presets/kernel_times to tables of measured kernels, group by group.

Each number has a first guess and how far from it is usual; what a table does not tell stays near. Not here: the
minimiser (least_squares.py), or who is left out when errors are judged (scripts/kernels/judge.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import msgspec

from planner.calibrate.kernels.predict import RowGroup, Times, seconds_of
from planner.figures.kernels.products import Device, named
from planner.spec.kernel_times import AttentionTimes, CollectiveTimes, ExpertTimes, ProductTimes
from tests.truth.kernel_fits.least_squares import Column, fitted, held

PULL = 0.025
"""Weight of the first guesses: a number one usual width off costs as much as 2.5 % in each of a hundred rows."""


class Guess(NamedTuple):
    """A number before any measurement, and how far off is usual: of its logarithm, of a share's log-odds (`share`), or
    of itself (`plain`)."""

    value: float
    width: float
    scale: str = "log"


RATES = {
    "stepped": Guess(0.2, 1.5, "share"),
    "tile_s": Guess(0.5e-6, 1.0),
    "launch_s": Guess(2.5e-6, 0.5),
    "memory_share": Guess(0.85, 1.0, "share"),
    "flop_j": Guess(1e-12, 0.5),
    "byte_j": Guess(40e-12, 0.7),
    "settle_s": Guess(500e-6, 2.0),
}
TILES = RATES | {
    "share": Guess(0.85, 1.0, "share"),
    "share_16k": Guess(0.93, 1.0, "share"),
    "share_8k": Guess(0.8, 0.7, "share"),
    "share_4k": Guess(0.65, 0.7, "share"),
    "ramp": Guess(100.0, 0.7),
    "sharpness": Guess(2.5, 0.5),
}
PRODUCT = TILES | {"split_s": Guess(3e-6, 0.7)}
CAST = {"cast_share": Guess(0.5, 1.0, "share"), "launch_s": Guess(12e-6, 0.5), "ramp": Guess(300.0, 0.7)}
EXPERTS = TILES | {
    "share_2k": Guess(0.3, 1.0, "share"),
    "launch_s": Guess(20e-6, 0.7),
    "memory_share": Guess(0.8, 1.0, "share"),
    "routing_share": Guess(0.6, 1.0, "share"),
    "expert_s": Guess(0.05e-6, 1.0),
}
FIRST = {"share_first": Guess(0.2, 0.7, "share")}
ATTENTION = RATES | {
    "launch_s": Guess(10e-6, 0.7),
    "tile_s": Guess(1e-6, 1.0),
    "memory_share": Guess(0.7, 1.0, "share"),
    "share_64": Guess(0.4, 1.0, "share"),
    "share_128": Guess(0.55, 1.0, "share"),
    "share_192": Guess(0.5, 1.0, "share"),
    "share_256": Guess(0.5, 1.0, "share"),
    "ramp": Guess(100.0, 1.0),
}
COLLECTIVE = {
    "launch_s": Guess(8e-6, 0.5),
    "ll_s": Guess(1e-6, 0.7),
    "ll_share": Guess(0.12, 0.7),
    "ll128_s": Guess(2e-6, 0.7),
    "ll128_share": Guess(0.4, 0.5),
    "simple_s": Guess(4e-6, 0.7),
    "simple_share": Guess(0.75, 0.3),
    "pieces": Guess(0.5, 0.7),
    "width_growth": Guess(0.0, 0.3, "plain"),
    "step_growth": Guess(0.6, 0.5),
}
MADE: dict[str, type[Times]] = {"product": ProductTimes, "experts": ExpertTimes, "collective": CollectiveTimes}
LEAST_SHARE, MOST_SHARE = 0.1, 1.25
"""Between which a GPU's share of its peak is looked for."""
BUSY = 0.75
"""Of the peak, what a GPU is guessed to sustain at its power: the first guess of a FLOP's energy."""
EIGHT_BIT_ENERGY = 0.55


def guesses_of(group: RowGroup, device: Device) -> dict[str, Guess]:
    """The numbers of a group before its measurements."""
    if group.kind == "collective":
        return COLLECTIVE
    number_format = group.variant if group.kind in ("product", "experts") else "bf16"
    guesses = {"product": PRODUCT, "experts": EXPERTS}.get(group.kind, ATTENTION)
    if number_format == "fp8":
        guesses = guesses | CAST
    if group.kind == "experts" and device.times.first_tile is not None:
        guesses = guesses | FIRST
    peak = device.peak("bf16")
    assert peak is not None
    energy = device.power_w / (BUSY * peak) * (EIGHT_BIT_ENERGY if number_format == "fp8" else 1.0)
    return guesses | {"flop_j": guesses["flop_j"]._replace(value=energy)}


def made(group: RowGroup, values: Mapping[str, float]) -> Times:
    """Numbers as what formulas take."""
    kind: type[Times] = MADE.get(group.kind, AttentionTimes)
    said: dict[str, Any] = {"op": group.variant, "format": group.variant, "source": "", **values}
    return kind(**{name: value for name, value in said.items() if name in kind.__struct_fields__})


def fit(group: RowGroup, measured_s: Column, source: str = "") -> Times:
    """A group's numbers from its measurements, with how well they describe them."""
    import numpy as np

    device = named(group.gpu)
    assert device is not None, group.gpu
    guesses = guesses_of(group, device)
    names = tuple(guesses)
    first = np.array([_into(guess.value, guess.scale) for guess in guesses.values()])
    widths = [guess.width for guess in guesses.values()]
    logs, rows = np.log(measured_s), len(measured_s)

    def taken(values: Column) -> Times:
        numbers = (_back(value, guesses[name].scale) for name, value in zip(names, values.tolist(), strict=True))
        return made(group, dict(zip(names, numbers, strict=True)))

    def residuals(values: Column) -> Column:
        off = np.log(seconds_of(group, device, taken(values))) - logs
        return np.concatenate([off, held(values, first, widths, rows, PULL)])

    found = taken(fitted(residuals, first))
    errors = np.abs(seconds_of(group, device, found) / measured_s - 1)
    return msgspec.structs.replace(
        found,
        gpu=group.gpu,
        n=rows,
        spread=float(np.median(errors)),
        spread_p90=float(np.quantile(errors, 0.9)),
        source=source,
    )


def by_best(group: RowGroup, measured_s: Column, nearest: ProductTimes, source: str) -> ProductTimes | None:
    """The nearest GPU's numbers of products, with the share of the peak by which one product takes its measured time.

    Filling the loop over k takes as many seconds as there, not as many elements. None where no share does, or where
    power decides: a benchmark's bursts do not tell which clock holds in a step.
    """
    device, other = named(group.gpu), named(nearest.gpu)
    assert device is not None and other is not None and len(measured_s) == 1, group.gpu
    rates = [one.peak(group.variant) or 0.0 for one in (device, other)]
    ramp = nearest.ramp * rates[0] / device.multiprocessors / (rates[1] / other.multiprocessors)

    def with_share(share: float) -> ProductTimes:
        return msgspec.structs.replace(nearest, share=share, ramp=ramp)

    def off(share: float) -> float:
        return math.log(float(seconds_of(group, device, with_share(share))[0]) / measured_s[0])

    if not off(MOST_SHARE) <= 0 <= off(LEAST_SHARE):
        return None
    found = with_share(_as_measured(off, LEAST_SHARE, MOST_SHARE))
    if nearest.flop_j * found.share * rates[0] > device.power_w:
        return None
    said = f"{source}; all but share: {nearest.gpu}"
    return msgspec.structs.replace(found, gpu=group.gpu, n=1, spread=None, spread_p90=None, source=said)


def backward_share(group: RowGroup, measured_s: Column, forward: AttentionTimes) -> float:
    """The rate of attention's backward beside forward's: with it the median row is as measured."""
    import numpy as np

    device = named(group.gpu)
    assert device is not None, group.gpu

    def off(share: float) -> float:
        one = msgspec.structs.replace(forward, backward_share=share)
        return float(np.median(np.log(seconds_of(group, device, one) / measured_s)))

    return _as_measured(off, 0.1, 3.0)


def _as_measured(off: Callable[[float], float], low: float, high: float) -> float:
    """The share of a rate at which `off`, the logarithm of predicted over measured seconds, falls to zero."""
    for _ in range(40):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if off(middle) > 0 else (low, middle)
    return math.sqrt(low * high)


def _into(value: float, scale: str) -> float:
    if scale == "plain":
        return value
    return math.log(value / (1 - value)) if scale == "share" else math.log(value)


def _back(value: float, scale: str) -> float:
    if scale == "plain":
        return value
    if scale == "share":
        return 1 / (1 + math.exp(-min(max(value, -30.0), 12.0)))
    return math.exp(min(max(value, -60.0), 30.0))
