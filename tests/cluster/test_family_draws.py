"""The planned peak of every launched family at its own defaults, packed and padded, beside real runs: 60 draws by seed
for `make long SEED=7`, six of them in CI.

Not here: draws over what else is launched, of one family (test_draws.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from agents import run_warm
from combinations import on_gpus, refusal
from family_draws import KINDS, SIZES, family_draws, refused
from stages import furthest, size_of_error, stages_of, told

from executor.folder.rundir import read_measured, read_run_plan
from planner.spec.formats import FORMATS

SEED, COUNT = int(os.environ.get("SEED", "9")), 60
LARGEST_PEAK_ERROR_PERCENT = 1.0
DRAWS = family_draws(SEED, COUNT)


@pytest.mark.long
@pytest.mark.parametrize("name", DRAWS)
def test_the_peak_of_a_family_at_its_own_defaults_is_as_planned(name: str, tmp_path: Path) -> None:
    drawn = DRAWS[name]
    again = f"{drawn.text}\nagain: SEED={SEED} .venv/bin/pytest -m long tests/cluster/test_family_draws.py -k {name}"

    finished = run_warm(drawn.plan, tmp_path)

    assert set(finished.exit_codes) == {0}, f"{again}\n{finished.output[-3000:]}"
    plan, measured = read_run_plan(tmp_path), tuple(read_measured(tmp_path))
    _, report = furthest(stages_of(plan, measured))
    print(f"{name}: {told(report)}; {drawn.text}")
    assert size_of_error(report.peak) <= LARGEST_PEAK_ERROR_PERCENT, f"{told(report)}\n{again}"
