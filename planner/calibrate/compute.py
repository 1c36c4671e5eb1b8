"""What compute and overlap of one runtime on one device really reach: a coordinate search over a few coefficients.

Every point of the search is a real prediction of the step (planner/figures/steptime.py), remembered, so that leaving
measurements out costs little. Not here: link curves (links.py), or which samples belong together (fit.py).
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from planner.calibrate.allocator import LEAST, badness
from planner.calibrate.samples import Sample
from planner.figures.passes import kernels_of
from planner.figures.steptime import scalar
from planner.spec.calibration import Calibration, ComputeEntry, OverlapEntry

ROUNDS = 6
WORTH = 0.02
"""A coefficient moves away from its default only if the error falls by this share: most cannot be told apart."""
COUNTED = 48
"""Samples of one model that a search looks at: more of the same cost time and add nothing."""


class Speeds(NamedTuple):
    """The coefficients that are searched; the rest stay those of the calibration underneath.

    `pace` and `attention_pace` where kernels like the device's were measured; elsewhere pace is 0 and
    `matmul_share` is searched.
    `attention_share` goes with that, at the ratio they have underneath: rows of whole steps cannot tell the two apart.
    """

    matmul_share: float
    attention_share: float
    operation_s: float
    hidden_share: float
    pace: float = 0.0
    attention_pace: float = 1.0


LEAST_PACE = 0.95
"""Kernels of a step take no less than alone, but for the error of the model that times them alone: 5 % in the median
(docs/decisions/0048)."""

GRID: dict[str, tuple[float, ...]] = {
    "pace": tuple(round(LEAST_PACE + 0.025 * step, 3) for step in range(43)),
    "attention_pace": tuple(round(1 + 0.1 * step, 3) for step in range(16)),
    "matmul_share": tuple(round(0.1 + 0.025 * step, 3) for step in range(37)),
    "hidden_share": (0.0, 0.25, 0.5, 0.75, 0.9, 1.0),
    "operation_s": (0.0, 2.5e-6, 5e-6, 7e-6, 1e-5, 1.4e-5, 2e-5, 2.8e-5, 4e-5, 8e-5, 1.6e-4),
}
"""In the order they are searched."""
MEASURED, OLDER = "te", ("attention_pace",)
"""The kernels preset whose attention is the one that was measured (Transformer Engine's, also of a step:
presets/kernel_times), so that what older software has beside it is not searched."""
BY_SHARES, BY_KERNELS = ("matmul_share", "attention_share"), ("pace", "attention_pace")
"""Coefficients of products and attention, of which a device's calibration has the ones or the others."""


class ComputeFit(msgspec.Struct, frozen=True, kw_only=True):
    """The speeds found (None: too few measurements, the defaults stay), of how many samples, with what median error.

    `waited`: of runs whose hosts waited for each operation, so that `operation_s` has the waiting in it.
    """

    speeds: Speeds | None = None
    n: int = 0
    spread: float = 0.0
    waited: bool = False


class Timer:
    """Step times under trial coefficients, each computed once. `base` gives everything that is not searched."""

    def __init__(self, base: Calibration) -> None:
        self.base = base
        self._trials: dict[Speeds, Calibration] = {}
        self._seconds: dict[tuple[str, Speeds], float | None] = {}

    def seconds(self, sample: Sample, speeds: Speeds) -> float | None:
        """The predicted step of a sample."""
        key = sample.id, speeds
        if key not in self._seconds:
            self._seconds[key] = scalar(sample.conditions.step_time(sample.case, self._trial(speeds)).step_s)
        return self._seconds[key]

    def _trial(self, speeds: Speeds) -> Calibration:
        if speeds not in self._trials:
            compute, overlap = entries(speeds, source="trial")
            self._trials[speeds] = Calibration(
                name="trial", based_on=self.base.name, base=self.base, compute=(compute,), overlap=(overlap,)
            )
        return self._trials[speeds]


def speeds_of(known: Calibration, sample: Sample) -> Speeds:
    """The searched coefficients as a calibration has them for a sample."""
    found = known.of(sample.runtime, sample.gpu, sample.device_kind)
    compute = found.compute
    overlap = found.overlap
    return Speeds(
        compute.matmul_share,
        compute.attention_share,
        compute.operation_s,
        overlap.hidden_share,
        compute.pace if kernels_of(sample.case, compute) else 0.0,
        compute.attention_pace,
    )


def entries(speeds: Speeds, **about: object) -> tuple[ComputeEntry, OverlapEntry]:
    """Speeds as a calibration writes them."""
    numbers = speeds._asdict()
    for unused in BY_SHARES if speeds.pace else BY_KERNELS:
        del numbers[unused]
    beside = {"hidden_share": numbers.pop("hidden_share")}
    return msgspec.convert(about | numbers, ComputeEntry), msgspec.convert(about | beside, OverlapEntry)


def fit_compute(samples: Sequence[Sample], timer: Timer) -> ComputeFit:
    """Of the samples of one runtime on one device."""
    timed = [one for one in samples if one.step_s is not None]
    if len(timed) < LEAST:
        return ComputeFit()
    counted = _counted(timed)
    best = speeds_of(timer.base, counted[0])
    least = _badness(counted, timer, best)
    measured = counted[0].case.runtime.kernels == MEASURED
    waited = any(one.conditions.blocking for one in counted)
    if waited and best.pace:
        # The host's time is added to the device's, so that one coefficient makes up for the other: both at once.
        pairs = [best._replace(pace=pace, operation_s=each) for pace in GRID["pace"] for each in GRID["operation_s"]]
        found, place = min((_badness(counted, timer, trial), place) for place, trial in enumerate(pairs))
        if found < least * (1 - WORTH):
            best, least = pairs[place], found
    for _ in range(ROUNDS):
        before = best
        unused = (*(BY_SHARES if best.pace else BY_KERNELS), *(OLDER if measured else ()))
        for name, values in GRID.items():
            if name in unused:
                continue
            trials = [_moved(best, name, value) for value in values]
            found, place = min((_badness(counted, timer, trial), place) for place, trial in enumerate(trials))
            if found < least * (1 - WORTH):
                best, least = trials[place], found
        if best == before:
            break
    return ComputeFit(speeds=best, n=len(timed), spread=spread(counted, timer, best), waited=waited)


def _moved(speeds: Speeds, name: str, value: float) -> Speeds:
    moved = speeds._replace(**{name: value})
    if name == "matmul_share":
        moved = moved._replace(attention_share=min(1.0, speeds.attention_share * value / speeds.matmul_share))
    return moved


def errors(samples: Sequence[Sample], timer: Timer, speeds: Speeds) -> list[float]:
    """predicted/measured - 1 of each sample that has a prediction."""
    pairs = [(timer.seconds(one, speeds), one.step_s) for one in samples]
    return [predicted / measured - 1 for predicted, measured in pairs if predicted is not None and measured]


def spread(samples: Sequence[Sample], timer: Timer, speeds: Speeds) -> float:
    """The median of |predicted/measured - 1|."""
    return statistics.median(map(abs, errors(samples, timer, speeds)))


def _badness(samples: Sequence[Sample], timer: Timer, speeds: Speeds) -> float:
    """By the logarithm of the ratio, so that half and twice the time are equally wrong."""
    return badness([math.log1p(error) for error in errors(samples, timer, speeds)])


def _counted(samples: Sequence[Sample]) -> list[Sample]:
    """At most COUNTED of each model, the same ones every time: spread over ids by their hash."""
    chosen: list[Sample] = []
    by_model: dict[str, list[Sample]] = {}
    for one in samples:
        by_model.setdefault(one.model, []).append(one)
    for members in by_model.values():
        ordered = sorted(members, key=lambda one: hashlib.sha256(one.id.encode()).digest())
        chosen += ordered[:COUNTED]
    return chosen
