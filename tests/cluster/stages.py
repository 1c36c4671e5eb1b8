"""Planned memory beside measured, a pipeline stage at a time: what several tests compare.

Not here: what a test allows.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from executor.report import Line, MemoryReport, join_memory, prediction_of
from planner.groups import coordinates
from planner.plan import PhaseMemory, Plan
from planner.record import Measured

SMALL_SHARE = 0.02


class Stage(NamedTuple):
    """A pipeline stage's heaviest rank at its fullest moment; `terms` are those of 2 % or more."""

    report: MemoryReport
    phase: PhaseMemory
    terms: list[Line]

    @property
    def activation_share(self) -> float:
        return (self.phase.terms["activations"] + self.phase.terms["logits"]) / self.phase.total


def stages_of(plan: Plan, measured: tuple[Measured, ...]) -> list[Stage]:
    """Every stage of the plan, in order."""
    return [_stage(plan, measured, stage) for stage in range(plan.layout.pp)]


def _stage(plan: Plan, measured: tuple[Measured, ...], stage: int) -> Stage:
    ranks = tuple(one for one in measured if coordinates(plan.layout, one.rank)["pp"] == stage)
    report = join_memory(prediction_of(plan, ranks[0]).memory, ranks)
    heaviest = next(one for one in ranks if one.rank == report.rank)
    phase = next(one for one in heaviest.memory if one.phase == report.measured_phase)
    terms = [line for line in report.lines if line.name.startswith(f"{report.measured_phase}/")]
    large = [line for line in terms if max(line.predicted or 0, line.measured or 0) >= SMALL_SHARE * phase.total]
    return Stage(report, phase, large)


def size_of_error(line: Line) -> float:
    """Percent, without a sign; infinite where a side is missing."""
    return math.inf if line.error_percent is None else abs(line.error_percent)


def furthest(stages: list[Stage]) -> tuple[int, MemoryReport]:
    """The stage whose peak is furthest off, by its place."""
    place = max(range(len(stages)), key=lambda place: size_of_error(stages[place].report.peak))
    return place, stages[place].report


def largest_difference(report: MemoryReport) -> Line:
    """The term that differs by most bytes in the phase that was the fullest when measured."""
    terms = [line for line in (*report.lines, *report.small) if line.name.startswith(f"{report.measured_phase}/")]
    return max(terms, key=lambda line: abs((line.predicted or 0) - (line.measured or 0)))


def told(report: MemoryReport) -> str:
    """A sentence on the peak, its phases and the term that is off most, for the message of a failed test."""
    peak, term = report.peak, largest_difference(report)
    return (
        f"peak {peak.error_percent:+.2f} %: {peak.predicted:,.0f} planned in {report.predicted_phase}, "
        f"{peak.measured:,.0f} measured in {report.measured_phase}; "
        f"{term.name} {term.predicted or 0:,.0f} planned, {term.measured or 0:,.0f} measured"
    )
