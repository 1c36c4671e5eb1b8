"""The tables of a replay, as plain cells: printed by views/replay.py, written as Markdown by scripts/pages/accuracy.py.

Not here: any statistic (score.py), or how a table is drawn.
"""

from __future__ import annotations

from typing import get_args

import msgspec

from planner.ask.fits import Verdict
from planner.calibrate.score import LargestScore, SpeedScore, Summary, WorstRow

NO = "–"
FITS = "What fits"
"""The title of the table of which README tells the sums (scripts/pages/fits.py)."""


class ScoreTable(msgspec.Struct, frozen=True):
    """One table: a title, head and rows of text; the first `left` columns are words."""

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: int


def tables(found: Summary) -> list[ScoreTable]:
    """Those that have rows, in the order people read them."""
    made = [
        _memory(found), _speed(found), _largest(found), _fit(found), _ranks(found), _worst_memory(found),
        _worst_speed(found), _assumptions(found), _skipped(found),
    ]  # fmt: skip
    return [table for table in made if table.rows]


def _memory(found: Summary) -> ScoreTable:
    rows = [
        (
            one.source, one.model or "all", one.kind, str(one.errors.n), share_text(one.errors.median),
            share_text(one.errors.p90), _signed(one.errors.bias),
        )
        for one in found.memory
    ]  # fmt: skip
    return ScoreTable("Peak memory", ("source", "model", "kind", "n", "median", "p90", "bias"), tuple(rows), 3)


def _speed(found: Summary) -> ScoreTable:
    rows = [
        (
            one.source, one.model or "all", one.what.replace("_", " "), str(one.factors.n), f"{one.factors.median:.2f}",
            f"{one.factors.p90:.2f}", f"{one.factors.bias:.2f}", f"{one.factors.scaled_median:.2f}",
            f"{one.factors.scaled_p90:.2f}",
        )
        for one in found.speed
    ]  # fmt: skip
    return ScoreTable(
        "Step time, and bandwidth of collectives",
        ("source", "model", "what", "n", "median", "p90", "bias", "scaled median", "scaled p90"),
        tuple(rows),
        3,
    )


def _largest(found: Summary) -> ScoreTable:
    rows = [
        (
            one.source, one.model or "all", one.what.replace("_", " "), str(one.factors.n), f"{one.factors.median:.2f}",
            f"{one.factors.p90:.2f}", f"{one.factors.bias:.2f}",
        )
        for one in found.largest
    ]  # fmt: skip
    return ScoreTable(
        "The largest that fits", ("source", "model", "what", "n", "median", "p90", "bias"), tuple(rows), 3
    )


def _fit(found: Summary) -> ScoreTable:
    rows = [
        (
            one.source, one.outcome, *(str(one.verdicts.get(word, 0)) for word in get_args(Verdict)), str(one.refused),
            str(one.not_predicted),
        )
        for one in found.fit
    ]  # fmt: skip
    return ScoreTable(FITS, ("source", "run", *get_args(Verdict), "refused", "not predicted"), tuple(rows), 2)


def _ranks(found: Summary) -> ScoreTable:
    rows = [
        (
            one.source, one.model, one.chosen or "nothing fits", str(one.gpus), str(one.layouts),
            NO if one.spearman is None else f"{one.spearman:.2f}",
            "failed" if one.regret is None and one.chosen else NO if one.regret is None else f"{one.regret:.0%}",
        )
        for one in found.ranks
    ]  # fmt: skip
    return ScoreTable(
        "Which layout is best",
        ("source", "model", "first choice", "GPUs", "layouts", "correlation", "regret"),
        tuple(rows),
        3,
    )


def _worst_memory(found: Summary) -> ScoreTable:
    rows = [
        (
            one.source, worst.id, worst.layout, worst.phase or NO, _terms(worst), f"{worst.predicted:.2f}",
            f"{worst.measured:.2f}", _signed(worst.error),
        )
        for one in found.memory
        for worst in one.worst
    ]  # fmt: skip
    return ScoreTable(
        "Largest errors of memory",
        ("source", "row", "layout", "phase", "terms, GiB", "predicted, GiB", "measured, GiB", "error"),
        tuple(rows),
        5,
    )


def _worst_speed(found: Summary) -> ScoreTable:
    scores: tuple[SpeedScore | LargestScore, ...] = (*found.speed, *found.largest)
    rows = [
        (one.source, worst.id, worst.layout, one.what.replace("_", " "), *_figures(worst))
        for one in scores
        for worst in one.worst
    ]
    return ScoreTable(
        "Largest errors of time, and of the largest that fits",
        ("source", "row", "layout", "what", "predicted", "measured", "error"),
        tuple(rows),
        4,
    )


def _assumptions(found: Summary) -> ScoreTable:
    rows = tuple((one.source, one.text, str(one.rows)) for one in found.assumptions)
    return ScoreTable("What was assumed", ("source", "assumption", "rows"), rows, 2)


def _skipped(found: Summary) -> ScoreTable:
    rows = tuple((one.source, one.text, str(one.rows)) for one in found.skipped)
    return ScoreTable("Rows without a prediction", ("source", "reason", "rows"), rows, 2)


def _terms(worst: WorstRow) -> str:
    shown = [f"{term} {size:.1f}" for term, size in worst.terms_gib.items() if size >= 0.05][:4]
    return ", ".join(shown) or NO


def _figures(worst: WorstRow) -> tuple[str, str, str]:
    return f"{worst.predicted:.4g}", f"{worst.measured:.4g}", _signed(worst.error)


def share_text(value: float) -> str:
    """An error in percent."""
    return f"{value:.1%}"


def _signed(value: float) -> str:
    return f"{value:+.1%}"
