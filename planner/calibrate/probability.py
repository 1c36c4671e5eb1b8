"""How good the probabilities of fitting are: Brier score, reliability by decile, and both errors of every threshold.

A run that worked did fit; one that ran out of memory did not, and so did not one whose failure is certain by the
measurements beside it. Not here: the probability itself (ask/question.py), or the calibrations without a source
(report.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from planner.calibrate.asked import Asked
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


class Probabilities(msgspec.Struct, frozen=True, kw_only=True):
    """All runs with a known end: `brier` is the mean square of probability - end (1 or 0), `constant` that of the best
    answer that is the same for all of them. `headroom` are the two errors of the rule that keeps a share free."""

    n: int
    fitted: int
    brier: float
    constant: float
    deciles: tuple[Decile, ...]
    thresholds: tuple[Threshold, ...]
    headroom: Threshold


def ends(replayed: Iterable[Replayed]) -> list[tuple[float, bool, bool]]:
    """(probability, whether the headroom rule called it fitting, whether it fitted) of every run with a known end."""
    found = []
    for one in replayed:
        end = FITTED.get(outcome_of(one) or "")
        probability, fits = one.predicted.fits_probability, one.predicted.fits
        if one.skipped is None and end is not None and probability is not None and fits is not None:
            found.append((probability, fits, end))
    return found


def source_of(one: Asked) -> str:
    """Who measured a row."""
    return one.row.source.repo_or_paper


def model_of(one: Asked) -> str | None:
    """The model of a row with a question."""
    return None if one.case is None else one.case.model.name


def left_out(
    rows: Iterable[Asked | Unread],
    without: Mapping[str, Calibration],
    of: Callable[[Asked], str | None] = source_of,
) -> list[Replayed]:
    """Every row as the calibration predicts it that never saw its source, or its model; rows of one that gave none of
    the measurements are left away."""
    found: list[Replayed] = []
    grouped: dict[str, list[Asked]] = {}
    for one in rows:
        if isinstance(one, Asked) and (left := of(one)) is not None and left in without:
            grouped.setdefault(left, []).append(one)
    for left, them in grouped.items():
        found += replay(them, without[left])
    return found


def scored(found: Sequence[tuple[float, bool, bool]]) -> Probabilities:
    """Every score of at least one run."""
    fitted = sum(end for *_, end in found)
    share = fitted / len(found)
    tenths: dict[int, list[tuple[float, bool]]] = {}
    for probability, _, end in found:
        tenths.setdefault(min(int(probability * DECILES), DECILES - 1), []).append((probability, end))
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
        brier=sum((probability - end) ** 2 for probability, _, end in found) / len(found),
        constant=share * (1 - share),
        deciles=tuple(deciles),
        thresholds=tuple(_errors(at, [(p >= at, end) for p, _, end in found]) for at in THRESHOLDS),
        headroom=_errors(0.0, [(fits, end) for _, fits, end in found]),
    )


def _errors(at: float, called: Sequence[tuple[bool, bool]]) -> Threshold:
    there = [yes for yes, end in called if end]
    others = [yes for yes, end in called if not end]
    return Threshold(
        probability=at,
        fitted_called_not=there.count(False) / len(there) if there else None,
        not_fitted_called=others.count(True) / len(others) if others else None,
    )
