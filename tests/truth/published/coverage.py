"""How many left-out measurements the bands hold, by kind of software: nine in ten is what they promise.

A band that judges a measurement was made without its source, or without its model. Not here: the bands
(planner/calibrate/bands.py), or the table (scripts/pages/fitted.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean as mean

import msgspec

from planner.calibrate.bands import ERRORS, bands
from planner.calibrate.holdout import Residual
from planner.calibrate.report import LeftOut
from planner.calibrate.samples import Sample
from planner.spec.calibration import Bands, Calibration

SPLITS, FINE_TUNES, SHARDS = "tensors or layers are split", "fine-tuning", "states are sharded only"


class Coverage(msgspec.Struct, frozen=True, kw_only=True):
    """Measurements of one kind (`what` memory or time) of one kind of software: the share that lies in a band made
    without the measurement's model (`left_model`), or without its source (`left_source`), and of the latter the mean
    over runtimes (`each_runtime`), of which one has most of the measurements."""

    what: str
    software: str
    n: int
    runtimes: int
    left_model: float
    left_source: float
    each_runtime: float


def without(found: LeftOut, of: Callable[[Sample], str]) -> dict[str, Calibration]:
    """By source or model (`of` a measurement) the calibration that all others give, with bands of their residuals."""
    return {left: _without(found, of, left) for left in {of(one) for one in found.samples}}


def _without(found: LeftOut, of: Callable[[Sample], str], left: str) -> Calibration:
    made = found.fitted([one for one in found.samples if of(one) != left])
    inside, outside = ([one for one in some if of(one.sample) != left] for some in (found.by_model, found.by_source))
    return msgspec.structs.replace(made, bands=tuple(bands(inside, outside)))


def coverage(
    by_model: Sequence[Residual],
    by_source: Sequence[Residual],
    made: Calibration,
    without: Mapping[str, Calibration],
) -> tuple[Coverage, ...]:
    """Of every kind of software with measurements, and of all. `made` has everything but bands, `without` is by source
    the calibration that never saw it, bands included."""
    kinds = _kinds(by_model)
    models = {one.sample.model for one in by_model}
    apart = {
        model: msgspec.structs.replace(made, bands=tuple(bands(_not(by_model, model), _not(by_source, model))))
        for model in models
    }
    found = []
    for what, error in ERRORS.items():
        in_model = _held(by_model, what, error, lambda one: apart[one.sample.model])
        in_source = _held(by_source, what, error, lambda one: without[one.sample.source])
        runtimes = {one.sample.id: one.sample.runtime for one in by_model}
        for kind in (*sorted(set(kinds.values())), "all"):
            ids = [one for one in in_model if kind in ("all", kinds[runtimes[one]])]
            if ids:
                of_runtimes: dict[str, list[bool]] = {}
                for one in ids:
                    of_runtimes.setdefault(runtimes[one], []).append(in_source[one])
                found.append(
                    Coverage(
                        what=what,
                        software=kind,
                        n=len(ids),
                        runtimes=len(of_runtimes),
                        left_model=mean(in_model[one] for one in ids),
                        left_source=mean(in_source[one] for one in ids),
                        each_runtime=mean(mean(held) for held in of_runtimes.values()),
                    )
                )
    return tuple(found)


def _kinds(residuals: Sequence[Residual]) -> dict[str, str]:
    """Each runtime's kind of software, by what its measurements did."""
    found: dict[str, str] = {}
    for name in {one.sample.runtime for one in residuals}:
        cases = [one.sample.case for one in residuals if one.sample.runtime == name]
        if any(case.layout.tp * case.layout.pp > 1 for case in cases):
            found[name] = SPLITS
        elif any(case.job.method != "full" for case in cases):
            found[name] = FINE_TUNES
        else:
            found[name] = SHARDS
    return found


def _not(residuals: Sequence[Residual], model: str) -> list[Residual]:
    return [one for one in residuals if one.sample.model != model]


def _held(
    residuals: Sequence[Residual], what: str, error: str, judge: Callable[[Residual], Calibration]
) -> dict[str, bool]:
    """Whether each measurement lies in the band that its judge has for it."""
    found = {}
    for one in residuals:
        off = getattr(one, error)
        if off is None or one.sample.device_kind == "cpu":
            continue
        known: Bands = judge(one).of(one.sample.runtime, one.sample.gpu, one.sample.device_kind).bands
        low, high = getattr(known, f"{what}_low"), getattr(known, f"{what}_high")
        found[one.sample.id] = low <= 1 / (1 + off) <= high
    return found
