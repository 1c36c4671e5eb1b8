"""The planned peak of every launched family at its own defaults, packed and padded, beside real runs: 60 draws by seed
for `make long SEED=7`, six of them in CI.

Not here: draws over what else is launched, of one family (test_draws.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from combinations import model_of, on_gpus, refusal
from drawn_runs import COUNT, SEED, check_peak
from family_draws import KINDS, SIZES, Kind, family_draws, refused

from planner.spec.formats import FORMATS

DRAWS = family_draws(SEED, COUNT)
SAMPLE = ("gpt2-packed", "gpt2-padded", "opt-packed", "falcon-packed", "gemma2-packed", "bloom-padded")
"""What CI looks at, of each the first draw: dropout of attention and of branches, and attention that is written out."""


@pytest.mark.parametrize("kind", SAMPLE)
def test_the_peak_of_a_sample_of_families_at_their_own_defaults_is_as_planned(kind: str, tmp_path: Path) -> None:
    name = next(name for name in DRAWS if name.endswith(kind))
    check_peak(name, DRAWS[name], tmp_path, "test_family_draws")


@pytest.mark.long
@pytest.mark.parametrize("name", DRAWS)
def test_the_peak_of_a_family_at_its_own_defaults_is_as_planned(name: str, tmp_path: Path) -> None:
    check_peak(name, DRAWS[name], tmp_path, "test_family_draws")


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
