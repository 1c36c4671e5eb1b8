"""How good the probabilities of fitting are: Brier score, reliability by decile, and both errors of every threshold.

A run that worked did fit; one that ran out of memory did not, and so did not one whose failure is certain by the
measurements beside it. Not here: the probability itself (ask/question.py), or the calibrations without a source
(report.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from planner.ask.fits import FITS_FROM
from planner.calibrate.asked import RowQuestion
from planner.calibrate.predict import Replayed, replay
from planner.calibrate.rows import Unread
from planner.calibrate.score import outcome_of
from planner.spec.calibration import Calibration

FITTED = {"ran": True, "out of memory": False, "failed (oom by extrapolation)": False}
"""Outcomes that say for sure whether a run fitted."""
DECILES = 10
THRESHOLDS = (0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)


class Decile(msgspec.Struct, frozen=True, kw_only=True):
    """Predictions between two tenths of probability: their mean and the share of these runs that fitted."""

    low: float
    n: int
    predicted: float
    fitted: float


class Threshold(msgspec.Struct, frozen=True, kw_only=True):
    """What calling a layout fitting from a probability on gets wrong: the share of the runs that fitted called not to,
    and of those that did not called to. A share of no run at all is None."""

    probability: float
    fitted_called_not: float | None
    not_fitted_called: float | None


class End(msgspec.Struct, frozen=True, kw_only=True):
    """A run with a known end: the probability of the device holding what is needed when memory is short (`needed`), and
    all that the allocator would take (`room`), whether the run was called fitting, whether it fitted, and the source or
    model that its prediction never saw (`left`)."""

    needed: float
    room: float
    fits: bool
    fitted: bool
    left: str | None = None


class Probabilities(msgspec.Struct, frozen=True, kw_only=True):
    """All runs with a known end: `brier` is the mean square of their probability (of what is needed) - end (1 or 0),
    `constant` that of the best answer that is the same for all of them. `thresholds` are those of this probability,
    `rooms` those of the other one, `fits` the two errors of what is called fitting, and `chosen` those of the threshold
    on `room` that the other sources, or models, choose each time (`lowest_safe`)."""

    n: int
    fitted: int
    brier: float
    constant: float
    deciles: tuple[Decile, ...]
    thresholds: tuple[Threshold, ...]
    rooms: tuple[Threshold, ...]
    fits: Threshold
    chosen: Threshold


def source_of(one: RowQuestion) -> str:
    """Who measured a row."""
    return one.row.source.repo_or_paper


def model_of(one: RowQuestion) -> str | None:
    """The model of a row with a question."""
    return None if one.case is None else one.case.model.name


def ends(replayed: Iterable[Replayed], of: Callable[[RowQuestion], str | None] = source_of) -> list[End]:
    """Every run with a known end; `of` says what was left out of its prediction."""
    found = []
    for one in replayed:
        end, said = FITTED.get(outcome_of(one) or ""), one.predicted
        known = said.fits_probability is not None and said.needed_probability is not None and said.fits is not None
        if one.skipped is None and end is not None and known:
            probabilities = {"needed": said.needed_probability, "room": said.fits_probability}
            found.append(
                msgspec.convert(probabilities | {"fits": said.fits, "fitted": end, "left": of(one.asked)}, End)
            )
    return found


def lowest_safe(found: Sequence[End]) -> float:
    """The lowest threshold on `room` from which on no run that did not fit is called fitting, else the highest."""
    worst = max((one.room for one in found if not one.fitted), default=0.0)
    return next((at for at in THRESHOLDS if at > worst), THRESHOLDS[-1])


def left_out(
    rows: Iterable[RowQuestion | Unread],
    without: Mapping[str, Calibration],
    of: Callable[[RowQuestion], str | None] = source_of,
) -> list[Replayed]:
    """Every row as the calibration predicts it that never saw its source, or its model; rows of one that gave none of
    the measurements are left away."""
    found: list[Replayed] = []
    grouped: dict[str, list[RowQuestion]] = {}
    for one in rows:
        if isinstance(one, RowQuestion) and (left := of(one)) is not None and left in without:
            grouped.setdefault(left, []).append(one)
    for left, them in grouped.items():
        found += replay(them, without[left])
    return found


def scored(found: Sequence[End]) -> Probabilities:
    """Every score of at least one run."""
    fitted = sum(one.fitted for one in found)
    share = fitted / len(found)
    tenths: dict[int, list[tuple[float, bool]]] = {}
    for one in found:
        tenths.setdefault(min(int(one.needed * DECILES), DECILES - 1), []).append((one.needed, one.fitted))
    safe = {left: lowest_safe([one for one in found if one.left != left]) for left in {one.left for one in found}}
    deciles = [
        Decile(
            low=tenth / DECILES,
            n=len(them),
            predicted=sum(probability for probability, _ in them) / len(them),
            fitted=sum(end for _, end in them) / len(them),
        )
        for tenth, them in sorted(tenths.items())
    ]
    return Probabilities(
        n=len(found),
        fitted=fitted,
        brier=sum((one.needed - one.fitted) ** 2 for one in found) / len(found),
        constant=share * (1 - share),
        deciles=tuple(deciles),
        thresholds=tuple(_errors(at, [(one.needed >= at, one.fitted) for one in found]) for at in THRESHOLDS),
        rooms=tuple(_errors(at, [(one.room >= at, one.fitted) for one in found]) for at in THRESHOLDS),
        fits=_errors(FITS_FROM, [(one.fits, one.fitted) for one in found]),
        chosen=_errors(max(safe.values()), [(one.room >= safe[one.left], one.fitted) for one in found]),
    )


def _errors(at: float, called: Sequence[tuple[bool, bool]]) -> Threshold:
    there = [yes for yes, end in called if end]
    others = [yes for yes, end in called if not end]
    return Threshold(
        probability=at,
        fitted_called_not=there.count(False) / len(there) if there else None,
        not_fitted_called=others.count(True) / len(others) if others else None,
    )
