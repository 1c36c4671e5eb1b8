"""The judgement: each measurement predicted by a calibration that never saw its model, or its source.

Not here: the fits (fit.py), or what is printed of the errors (report.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import msgspec

from planner.calibrate.allocator import predicted_bytes
from planner.calibrate.compute import Timer, speeds_of
from planner.calibrate.fit import timed
from planner.calibrate.samples import Sample
from planner.spec.calibration import Calibration

FOLDS = 5
"""Parts of a runtime's measurements where all are of one model: then parts are left out, by the hash of their ids."""

Fitter = Callable[[Sequence[Sample]], Calibration]
"""The calibration that samples give."""


class Residual(msgspec.Struct, frozen=True, eq=False):
    """A sample with its prediction: bytes of the kind that was measured, seconds of a step. None: nothing to compare
    with."""

    sample: Sample
    memory_bytes: float | None
    step_s: float | None

    @property
    def memory_error(self) -> float | None:
        """predicted/measured - 1."""
        measured = self.sample.memory_bytes
        return None if self.memory_bytes is None or measured is None else self.memory_bytes / measured - 1

    @property
    def time_error(self) -> float | None:
        """predicted/measured - 1."""
        measured = self.sample.step_s
        return None if self.step_s is None or measured is None else self.step_s / measured - 1


def residuals(samples: Sequence[Sample], known: Calibration, timer: Timer) -> list[Residual]:
    """Every sample as a calibration predicts it, in order."""
    return [_residual(one, known, timer) for one in samples]


def _residual(sample: Sample, known: Calibration, timer: Timer) -> Residual:
    allocator = known.of(sample.runtime, sample.gpu, sample.device_kind).allocator
    size = None if sample.memory_bytes is None else predicted_bytes(sample, allocator)
    seconds = None if sample.step_s is None else timer.seconds(sample, speeds_of(known, sample))
    return Residual(sample, size, seconds)


def left_out(samples: Sequence[Sample], value: Callable[[Sample], str], fitted: Fitter, timer: Timer) -> list[Residual]:
    """Every sample as a calibration predicts it that was fitted without any sample of the same `value`."""
    values = {one.id: value(one) for one in samples}
    found: list[Residual] = []
    for left in sorted(set(values.values())):
        inside = [one for one in samples if values[one.id] == left]
        found += residuals(inside, fitted([one for one in samples if values[one.id] != left]), timer)
    return found


def unseen(samples: Sequence[Sample], fitted: Fitter, timer: Timer) -> list[Residual]:
    """Every timed sample as a calibration predicts it that was fitted without any sample of its runtime or device."""
    found: list[Residual] = []
    for (runtime, gpu), inside in timed(samples):
        others = [one for one in samples if one.runtime != runtime and one.gpu != gpu]
        found += residuals(inside, fitted(others), timer)
    return found


def by_source(sample: Sample) -> str:
    """Who measured."""
    return sample.source


def by_gpu(sample: Sample) -> str:
    """The device."""
    return sample.gpu


def by_model(samples: Sequence[Sample]) -> Callable[[Sample], str]:
    """The model; of a runtime that was measured with one model only, a fifth of its measurements."""
    models: dict[str, set[str]] = {}
    for one in samples:
        models.setdefault(one.runtime, set()).add(one.model)

    def value(sample: Sample) -> str:
        return sample.model if len(models[sample.runtime]) > 1 else f"{sample.runtime} {_fold(sample.id)}"

    return value


def _fold(name: str) -> int:
    return hashlib.sha256(name.encode()).digest()[0] % FOLDS
