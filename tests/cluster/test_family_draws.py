"""The planned peak of every launched family at its own defaults, packed and padded, beside real runs: 60 draws by seed
for `make long SEED=7`, six of them in CI.

Not here: draws over what else is launched, of one family (test_draws.py).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from agents import run_warm
from combinations import model_of, on_gpus, refusal
from family_draws import KINDS, SIZES, Kind, family_draws, refused
from stages import furthest, size_of_error, stages_of, told

from executor.folder.rundir import read_measured, read_run_plan
from planner.spec.formats import FORMATS

SEED, COUNT = int(os.environ.get("SEED", "9")), 60
LARGEST_PEAK_ERROR_PERCENT = 1.0
DRAWS = family_draws(SEED, COUNT)
SAMPLE = ("gpt2-packed", "gpt2-padded", "opt-packed", "falcon-packed", "gemma2-packed", "bloom-padded")
"""What CI looks at, of each the first draw: dropout of attention and of branches, and attention that is written out."""


def as_planned(name: str, folder: Path) -> None:
    """The peak of every rank of a draw's real run is that of its plan."""
    drawn = DRAWS[name]
    again = f"{drawn.text}\nagain: SEED={SEED} .venv/bin/pytest -m long tests/cluster/test_family_draws.py -k {name}"

    finished = run_warm(drawn.plan, folder)

    assert set(finished.exit_codes) == {0}, f"{again}\n{finished.output[-3000:]}"
    plan, measured = read_run_plan(folder), tuple(read_measured(folder))
    _, report = furthest(stages_of(plan, measured))
    print(f"{name}: {told(report)}; {drawn.text}")
    assert size_of_error(report.peak) <= LARGEST_PEAK_ERROR_PERCENT, f"{told(report)}\n{again}"


@pytest.mark.parametrize("kind", SAMPLE)
def test_the_peak_of_a_sample_of_families_at_their_own_defaults_is_as_planned(kind: str, tmp_path: Path) -> None:
    as_planned(next(name for name in DRAWS if name.endswith(kind)), tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", DRAWS)
def test_the_peak_of_a_family_at_its_own_defaults_is_as_planned(name: str, tmp_path: Path) -> None:
    as_planned(name, tmp_path)


def test_every_launched_family_is_drawn_in_each_way_that_it_is_launched_in() -> None:
    drawn = {Kind(model_of(one.model).family, one.job.packing) for one in DRAWS.values()}

    assert drawn == set(KINDS)
    assert {kind.family for kind in KINDS} == set(SIZES)
    assert all(family.startswith("deepseek") for family in set(FORMATS) - set(SIZES))
    assert refused(Kind("bloom", "packed"))
    assert len(KINDS) == 2 * len(SIZES) - 1


def test_draws_of_families_are_launched_and_the_same_for_a_seed() -> None:
    assert family_draws(SEED, COUNT) == DRAWS
    assert family_draws(SEED + 1, 20).values() != family_draws(SEED, 20).values()
    assert all(refusal(on_gpus(*drawn)) is None for drawn in DRAWS.values())
