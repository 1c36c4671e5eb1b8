"""The planner's figures against the same real runs: bytes of every collective, and memory term by term.

Not here: that the runs train the right thing (test_equivalence.py) or time (reported, never tested).
"""

from __future__ import annotations

import msgspec
import pytest
from agents import Finished
from cases import EACH, SplitRun

from executor.report import Line, MemoryReport, TrafficReport, join_memory, join_traffic
from executor.rundir import read_measured, read_run_plan
from planner.plan import Collective, PhaseMemory, Plan
from planner.record import Measured

LARGEST_MEMORY_ERROR_PERCENT = 5.0
LEAST_ACTIVATION_SHARE = 0.3
SMALL_SHARE = 0.02


def facts(run: Finished) -> tuple[Plan, tuple[Measured, ...]]:
    return read_run_plan(run.folder), tuple(read_measured(run.folder))


@pytest.mark.parametrize("name", EACH)
def test_payload_of_every_collective_of_a_steady_step_is_predicted_to_the_byte(name: str, split_run: SplitRun) -> None:
    plan, measured = facts(split_run(name))

    for one in measured:
        report: TrafficReport = join_traffic(plan, (one,))
        assert report.lines
        for line in (*report.lines, *report.counts):
            assert line.predicted == line.measured, f"rank {one.rank} {line.name}"
        assert all(call.payload_bytes / call.count < 1024 for call in one.control)


@pytest.mark.parametrize("name", EACH)
def test_memory_peak_and_every_term_of_2_percent_are_within_5_percent(name: str, split_run: SplitRun) -> None:
    plan, measured = facts(split_run(name))

    report: MemoryReport = join_memory(plan.prediction.memory, measured)
    phase = next(one for one in _heaviest(measured, report).memory if one.phase == report.measured_phase)

    share = (phase.terms["activations"] + phase.terms["logits"]) / phase.total
    assert share >= LEAST_ACTIVATION_SHARE, "the case says nothing of activations"
    assert report.predicted_phase == report.measured_phase
    terms = [line for line in report.lines if line.name.startswith(f"{report.measured_phase}/")]
    shown = [
        f"{line.name} {line.error_percent:+.2f} %" for line in (report.peak, *terms) if line.error_percent is not None
    ]
    print(f"\n{name}: activations {share:.0%} of the peak; " + ", ".join(shown))
    for line in (report.peak, *_large(terms, phase)):
        assert line.error_percent is not None, line.name
        assert abs(line.error_percent) <= LARGEST_MEMORY_ERROR_PERCENT, line.name


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
