"""The planned peak of draws by seed over all that is launched, beside real runs. `make long SEED=7` draws others.

Not here: the combinations that are run one and all (test_combinations.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from combinations import on_gpus, refusal
from drawn_runs import COUNT, SEED, check_peak
from draws import draws

DRAWS = draws(SEED, COUNT)


@pytest.mark.long
@pytest.mark.parametrize("name", DRAWS)
def test_the_peak_of_a_draw_is_as_planned(name: str, tmp_path: Path) -> None:
    check_peak(name, DRAWS[name], tmp_path, "test_draws")


def test_draws_are_launched_and_the_same_for_a_seed() -> None:
    assert draws(SEED, 20) == dict(list(DRAWS.items())[:20])
    assert draws(SEED + 1, 20).values() != draws(SEED, 20).values()
    assert all(refusal(on_gpus(*drawn)) is None for drawn in DRAWS.values())
