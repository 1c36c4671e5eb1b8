"""The judgement: each measurement predicted by a calibration that never saw its model, or its source.

Not here: the fits (fit.py), or what is printed of the errors (report.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from planner.calibrate.allocator import predicted_bytes
from planner.calibrate.compute import Timer, speeds_of
from planner.calibrate.samples import Sample, distinct
from planner.calibration import Calibration

KEYS = ("model", "source")
"""What is left out, one value at a time."""

Fitted = Callable[[Sequence[Sample]], Calibration]
"""The calibration that samples give."""


class Residual(msgspec.Struct, frozen=True, eq=False):
    """A sample with its prediction: bytes of the kind that was measured, seconds of a step. None: nothing to compare."""

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


def left_out(samples: Sequence[Sample], key: str, fitted: Fitted, timer: Timer) -> list[Residual]:
    """Every sample as a calibration predicts it that was fitted without any other of its `key` (model, source)."""
    found: list[Residual] = []
    for value in distinct(samples, key):
        inside = [one for one in samples if str(getattr(one, key)) == value]
        others = [one for one in samples if str(getattr(one, key)) != value]
        found += residuals(inside, fitted(others), timer)
    return found
