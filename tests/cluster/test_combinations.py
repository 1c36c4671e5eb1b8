"""The planned peak of every combination of engine, method, precision and recomputation beside a trace, and beside real
runs of what no trace starts and of the usual ones. `make long` looks at all, CI at a sample.

Not here: other models, batches and optimizers (test_draws.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from agents import run_warm
from cases import CASES, KeepCombination
from combinations import ALL, REFUSED, RUN, TRACED, UNTRACED, sample
from stages import furthest, size_of_error, stages_of, told

from executor.folder.rundir import read_measured, read_run_plan
from executor.measure.report import MemoryReport
from executor.measure.trace import compared
from executor.worker.trace.trace import trace
from scripts.pages.combinations import LARGEST_PEAK_ERROR_PERCENT


def traced(name: str) -> MemoryReport:
    """A combination's plan beside its trace."""
    plan = TRACED[name].trace_plan
    return compared(plan, trace(plan, 0)).memory


def run(name: str, folder: Path) -> tuple[int, MemoryReport]:
    """A combination's plan beside its real run: the stage that is furthest off, and its report."""
    finished = run_warm(RUN[name].run_plan, folder)
    assert set(finished.exit_codes) == {0}, finished.output[-3000:]
    plan, measured = read_run_plan(folder), tuple(read_measured(folder))
    return furthest(stages_of(plan, measured))


@pytest.mark.smoke
@pytest.mark.parametrize("name", sample(TRACED))
def test_the_peak_of_a_sample_of_traced_combinations_is_as_planned(name: str) -> None:
    report = traced(name)

    assert size_of_error(report.peak) <= LARGEST_PEAK_ERROR_PERCENT, told(report)


@pytest.mark.smoke
@pytest.mark.parametrize("name", sample(RUN))
def test_the_peak_of_a_sample_of_run_combinations_is_as_planned(name: str, tmp_path: Path) -> None:
    _, report = run(name, tmp_path)

    assert size_of_error(report.peak) <= LARGEST_PEAK_ERROR_PERCENT, told(report)


@pytest.mark.long
@pytest.mark.parametrize("name", TRACED)
def test_the_peak_of_every_combination_that_a_trace_starts_is_as_planned(
    name: str, keep_combination: KeepCombination
) -> None:
    report = traced(name)

    keep_combination("trace", TRACED[name], report, 0)
    assert size_of_error(report.peak) <= LARGEST_PEAK_ERROR_PERCENT, told(report)


@pytest.mark.long
@pytest.mark.parametrize("name", RUN)
def test_the_peak_of_every_combination_that_is_run_is_as_planned(
    name: str, tmp_path: Path, keep_combination: KeepCombination
) -> None:
    stage, report = run(name, tmp_path)

    keep_combination("run", RUN[name], report, stage)
    assert size_of_error(report.peak) <= LARGEST_PEAK_ERROR_PERCENT, told(report)


def test_every_combination_is_traced_run_or_refused_by_a_rule() -> None:
    named = {one.name for one in ALL}

    assert len(named) == len(ALL)
    assert {one.name for one in (*REFUSED, *UNTRACED)} | TRACED.keys() == named
    assert {one.name for one in UNTRACED} <= RUN.keys()
    assert {case.layout.engine for case in CASES.values()} <= {one.engine for one in (*RUN.values(), *TRACED.values())}
