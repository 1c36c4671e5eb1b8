"""The planned peak of draws by seed over all that is launched, beside real runs. `make long SEED=7` draws others.

Not here: the combinations that are run one and all (test_combinations.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from agents import run_warm
from combinations import on_gpus, refusal
from draws import draws
from stages import furthest, size_of_error, stages_of, told

from executor.folder.rundir import read_measured, read_run_plan

SEED, COUNT = int(os.environ.get("SEED", "9")), 60
LARGEST_PEAK_ERROR_PERCENT = 1.0
DRAWS = draws(SEED, COUNT)


@pytest.mark.long
@pytest.mark.parametrize("name", DRAWS)
def test_the_peak_of_a_draw_is_as_planned(name: str, tmp_path: Path) -> None:
    drawn = DRAWS[name]
    again = f"{drawn.text}\nagain: SEED={SEED} .venv/bin/pytest -m long tests/cluster/test_draws.py -k {name}"

    finished = run_warm(drawn.plan, tmp_path)

    assert set(finished.exit_codes) == {0}, f"{again}\n{finished.output[-3000:]}"
    plan, measured = read_run_plan(tmp_path), tuple(read_measured(tmp_path))
    _, report = furthest(stages_of(plan, measured))
    print(f"{name}: {told(report)}; {drawn.text}")
    assert size_of_error(report.peak) <= LARGEST_PEAK_ERROR_PERCENT, f"{told(report)}\n{again}"


def test_draws_are_launched_and_the_same_for_a_seed() -> None:
    assert draws(SEED, 20) == dict(list(DRAWS.items())[:20])
    assert draws(SEED + 1, 20).values() != draws(SEED, 20).values()
    assert all(refusal(on_gpus(*drawn)) is None for drawn in DRAWS.values())
