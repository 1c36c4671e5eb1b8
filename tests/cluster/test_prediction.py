"""The planner's figures against the same real runs: bytes of every collective, and memory term by term.

Not here: that the runs train the right thing (test_equivalence.py) or time (reported, never tested).
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import pytest
from agents import Finished
from cases import CASES, EACH, Figures, SplitRun

from executor.report import Line, MemoryReport, TrafficReport, join_memory, join_traffic, prediction_of
from executor.rundir import read_measured, read_run_plan
from planner.groups import coordinates
from planner.plan import Collective, PhaseMemory, Plan
from planner.record import Measured
from planner.truth.layouts import read_record

RECORD = Path(__file__).parents[2] / "docs" / "accuracy" / "layouts.json"
LARGEST_MEMORY_ERROR_PERCENT = 5.0
LEAST_ACTIVATION_SHARE = 0.3
SMALL_SHARE = 0.02


def facts(run: Finished) -> tuple[Plan, tuple[Measured, ...]]:
    return read_run_plan(run.folder), tuple(read_measured(run.folder))


@pytest.mark.parametrize("name", EACH)
def test_payload_of_every_collective_of_a_steady_step_is_predicted_to_the_byte(
    name: str, split_run: SplitRun, figures: Figures
) -> None:
    plan, measured = facts(split_run(name))

    reports: dict[int, TrafficReport] = {one.rank: join_traffic(plan, (one,)) for one in measured}
    wrong = [
        f"rank {rank} {line.name}: planned {line.predicted}, measured {line.measured}"
        for rank, report in reports.items()
        for line in (*report.lines, *report.counts)
        if line.predicted != line.measured
    ]
    figures(name, payload_exact=not wrong)
    assert not wrong
    assert all(report.lines for report in reports.values())
    assert all(call.payload_bytes / call.count < 1024 for one in measured for call in one.control)


@pytest.mark.parametrize("name", EACH)
def test_memory_peak_and_every_term_of_2_percent_are_within_5_percent(
    name: str, split_run: SplitRun, figures: Figures
) -> None:
    plan, measured = facts(split_run(name))

    for stage in range(plan.layout.pp):
        ranks = tuple(one for one in measured if coordinates(plan.layout, one.rank)["pp"] == stage)
        _check_memory(f"{name} stage {stage}", plan, ranks)


def _check_memory(name: str, plan: Plan, measured: tuple[Measured, ...]) -> None:
    report: MemoryReport = join_memory(prediction_of(plan, measured[0]).memory, measured)
    phase = next(one for one in _heaviest(measured, report).memory if one.phase == report.measured_phase)

    share = (phase.terms["activations"] + phase.terms["logits"]) / phase.total
    terms = _large([line for line in report.lines if line.name.startswith(f"{report.measured_phase}/")], phase)
    worst = max(terms, key=lambda line: math.inf if line.error_percent is None else abs(line.error_percent))
    figures(
        name,
        activation_share=share,
        peak_bytes=phase.total,
        peak_error_percent=report.peak.error_percent,
        worst_term=worst.name,
        worst_term_error_percent=worst.error_percent,
    )
    assert share >= LEAST_ACTIVATION_SHARE, "the case says nothing of activations"
    assert report.predicted_phase == report.measured_phase
    for line in (report.peak, *terms):
        assert line.error_percent is not None, line.name
        assert abs(line.error_percent) <= LARGEST_MEMORY_ERROR_PERCENT, line.name


def test_the_record_has_a_row_of_every_case_and_no_other() -> None:
    assert [row.name for row in read_record(RECORD).rows] == list(CASES), "make layouts writes it"


def test_a_doubled_term_and_a_missing_collective_are_seen(split_run: SplitRun) -> None:
    plan, measured = facts(split_run("fsdp2-accum1"))
    wrong = tuple(
        PhaseMemory(phase=one.phase, terms=one.terms | {"activations": 2 * one.terms["activations"]})
        for one in plan.prediction.memory
    )
    fewer: tuple[Collective, ...] = plan.prediction.collectives[1:]

    memory = join_memory(wrong, measured)
    traffic = join_traffic(
        msgspec.structs.replace(plan, prediction=msgspec.structs.replace(plan.prediction, collectives=fewer)), measured
    )

    assert abs(memory.peak.error_percent or 0) > LARGEST_MEMORY_ERROR_PERCENT
    assert any(line.predicted is None for line in traffic.lines)


def _heaviest(measured: tuple[Measured, ...], report: MemoryReport) -> Measured:
    return next(one for one in measured if one.rank == report.rank)


def _large(lines: list[Line], phase: PhaseMemory) -> list[Line]:
    return [line for line in lines if max(line.predicted or 0, line.measured or 0) >= SMALL_SHARE * phase.total]
