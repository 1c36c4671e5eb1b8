"""Two real runs of one job that differ in a field of the layout: both end, train alike, and need what was planned.

Not here: which jobs are drawn (test_losses.py, test_attention.py, test_compile.py, test_experts.py).
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from agents import Finished, run_warm
from stages import furthest, size_of_error, stages_of, told, wrong_collectives

from executor.folder.rundir import read_measured, read_run_plan
from executor.measure.report import MemoryReport
from planner.spec.job import Precision
from planner.spec.plan import Plan

LARGEST_LOSS_ERROR = 1e-5  # relative, at any step, in fp32


def draws(names: Iterable[str], seed: int, count: int, first: int = 0) -> list[str]:
    """A sample of `count` names, drawn by the seed, after the `first` ones of the same draw."""
    mixed = list(names)
    return random.Random(seed).sample(mixed, len(mixed))[first : first + count]


def run(plan: Plan, folder: Path, environment: dict[str, str] | None = None) -> Finished:
    """A real run to its end."""
    finished = run_warm(plan, folder, environment=environment)
    assert set(finished.exit_codes) == {0}, finished.output[-3000:]
    return finished


def check_losses(one: Finished, other: Finished, precision: Precision) -> None:
    """In fp32 both have the same losses."""
    losses, others = one.column("loss"), other.column("loss")
    if precision == "fp32":
        assert float(np.max(np.abs(others - losses) / np.abs(losses))) <= LARGEST_LOSS_ERROR


def report_of(finished: Finished) -> MemoryReport:
    """Planned memory beside measured, of the stage that is furthest off."""
    return furthest(stages_of(read_run_plan(finished.folder), tuple(read_measured(finished.folder))))[1]


def check_needs(finished: Finished, most_percent: float) -> None:
    """The payload is planned to the byte, and the peak within `most_percent`."""
    assert not wrong_collectives(read_run_plan(finished.folder), tuple(read_measured(finished.folder)))
    report = report_of(finished)
    assert size_of_error(report.peak) <= most_percent, told(report)
