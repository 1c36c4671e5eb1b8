"""The real run of a draw, beside its plan: the peak of every rank is within 1 % of the planned one.

Not here: the draws (draws.py, family_draws.py).
"""

from __future__ import annotations

import os
from pathlib import Path

from agents import run_warm
from draws import Draw
from stages import furthest, size_of_error, stages_of, told

from executor.folder.rundir import read_measured, read_run_plan

SEED, COUNT = int(os.environ.get("SEED", "9")), 60
LARGEST_PEAK_ERROR_PERCENT = 1.0


def check_peak(name: str, drawn: Draw, folder: Path, module: str) -> None:
    """Run a draw in `folder`; what fails names the command that runs it again, by the test's `module`."""
    again = f"{drawn.text}\nagain: SEED={SEED} .venv/bin/pytest -m long tests/cluster/{module}.py -k {name}"

    finished = run_warm(drawn.plan, folder)

    assert set(finished.exit_codes) == {0}, f"{again}\n{finished.output[-3000:]}"
    plan, measured = read_run_plan(folder), tuple(read_measured(folder))
    _, report = furthest(stages_of(plan, measured))
    print(f"{name}: {told(report)}; {drawn.text}")
    assert size_of_error(report.peak) <= LARGEST_PEAK_ERROR_PERCENT, f"{told(report)}\n{again}"
