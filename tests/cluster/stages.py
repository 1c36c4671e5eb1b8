"""Planned memory beside measured, a pipeline stage at a time, and planned collectives beside those of every rank: the
claims that runs (test_prediction.py) and records of runs (tests/planner/test_recorded.py) are compared by.

Not here: making the run.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from executor.measure.lines import FigureLine
from executor.measure.report import MemoryReport, join_memory, join_traffic, prediction_of
from planner.parallelism.case import coordinates
from planner.spec.plan import PhaseMemory, Plan
from planner.spec.record import RankMeasurements

SMALL_SHARE = 0.02
LARGEST_MEMORY_ERROR_PERCENT = 5.0
LEAST_ACTIVATION_SHARE = 0.3


class Stage(NamedTuple):
    """A pipeline stage's heaviest rank at its fullest moment; `terms` are those of 2 % or more."""

    report: MemoryReport
    phase: PhaseMemory
    terms: list[FigureLine]

    @property
    def activation_share(self) -> float:
        return (self.phase.terms["activations"] + self.phase.terms["logits"]) / self.phase.total


def stages_of(plan: Plan, measured: tuple[RankMeasurements, ...]) -> list[Stage]:
    """Every stage of the plan, in order."""
    return [_stage(plan, measured, stage) for stage in range(plan.layout.pp)]


def _stage(plan: Plan, measured: tuple[RankMeasurements, ...], stage: int) -> Stage:
    ranks = tuple(one for one in measured if coordinates(plan.layout, one.rank)["pp"] == stage)
    report = join_memory(prediction_of(plan, ranks[0]).memory, ranks)
    heaviest = next(one for one in ranks if one.rank == report.rank)
    phase = next(one for one in heaviest.memory if one.phase == report.measured_phase)
    terms = [line for line in report.lines if line.name.startswith(f"{report.measured_phase}/")]
    large = [line for line in terms if max(line.predicted or 0, line.measured or 0) >= SMALL_SHARE * phase.total]
    return Stage(report, phase, large)


def wrong_collectives(plan: Plan, measured: tuple[RankMeasurements, ...]) -> list[str]:
    """Collectives of a rank's steady step whose bytes or number of calls are not the planned ones."""
    reports = {one.rank: join_traffic(plan, (one,)) for one in measured}
    assert all(bool(report.lines) == (plan.layout.world_size > 1) for report in reports.values())
    assert all(call.payload_bytes / call.count < 1024 for one in measured for call in one.control)
    return [
        f"rank {rank} {line.name}: planned {line.predicted}, measured {line.measured}"
        for rank, report in reports.items()
        for line in (*report.lines, *report.counts)
        if line.predicted != line.measured
    ]


def wrong_memory(stages: list[Stage]) -> list[str]:
    """Where the peak or a term of 2 % of it is over 5 % off, the fullest phase is another, or there are too few
    activations to say anything of them."""
    wrong = []
    for place, stage in enumerate(stages):
        if stage.activation_share < LEAST_ACTIVATION_SHARE:
            wrong.append(f"stage {place}: activations are {stage.activation_share:.0%} of the peak")
        if stage.report.predicted_phase != stage.report.measured_phase:
            wrong.append(f"stage {place}: {stage.report.predicted_phase} is fullest, not {stage.report.measured_phase}")
        wrong += [
            f"stage {place}: {line}"
            for line in (stage.report.peak, *stage.terms)
            if size_of_error(line) > LARGEST_MEMORY_ERROR_PERCENT
        ]
    return wrong


def size_of_error(line: FigureLine) -> float:
    """Percent, without a sign; infinite where a side is missing."""
    return math.inf if line.error_percent is None else abs(line.error_percent)


def furthest(stages: list[Stage]) -> tuple[int, MemoryReport]:
    """The stage whose peak is furthest off, by its place."""
    place = max(range(len(stages)), key=lambda place: size_of_error(stages[place].report.peak))
    return place, stages[place].report


def largest_difference(report: MemoryReport) -> FigureLine:
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
