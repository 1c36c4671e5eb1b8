"""Claims about the layouts that would be tried first of nanotron's sweep, by a calibration without their model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from planner.calibrate.asked import RowQuestion
from planner.spec import Layout
from planner.spec.calibration import calibration
from tests.truth.published.ranking import Ranking, Tried, page, rankings
from tests.truth.published.reader import each

SWEEP = Path(__file__).parent / "ultrascale_playbook.jsonl"
SIZES = (8, 16, 32, 64, 128)


def tried(predicted_s: float, measured_s: float | None, fits: bool = True) -> Tried:
    layout = Layout(engine="nanotron", micro_batch_size=int(predicted_s * 10))
    return made(layout, predicted_s, measured_s, fits=fits)


def made(layout: Layout, predicted_s: float, measured_s: float | None, *, fits: bool = True, **more: Any) -> Tried:
    known = {"serial_s": predicted_s, "device_gib": 1.0, "verdict": "yes" if fits else "no"} | more
    return Tried(layout=layout, predicted_s=predicted_s, fits=fits, measured_s=measured_s,
                 failed=int(measured_s is None), runs=1, **known)  # fmt: skip


def test_a_ranking_counts_the_first_three_that_fit_in_the_order_of_prediction():
    one = Ranking(
        "m", 8, 2048, (tried(4, 1.0), tried(3, 2.0), tried(1, None), tried(2, 1.04), tried(0.5, 0.9, fits=False))
    )

    assert [each.predicted_s for each in one.order] == [1, 2, 3, 4]
    assert one.ratios == [None, pytest.approx(1.04 / 0.9), pytest.approx(2.0 / 0.9)]
    assert one.first_failed and not one.is_close
    assert "in 0 of 1 groups" in page([one]) and "failed in 1." in page([one])


def test_a_layout_about_as_fast_as_the_fastest_among_the_first_three_is_close():
    one = Ranking("m", 8, 2048, (tried(1, 2.0), tried(2, 1.05), tried(3, None), tried(4, 1.0)))

    assert one.is_close and not one.first_failed
    assert not msgspec.structs.replace(one, layouts=(*one.layouts, tried(5, 0.9))).is_close


def test_the_star_comes_first_and_then_the_fastest():
    plain, complex_ = Layout(engine="nanotron", dp_replicate=8), Layout(engine="nanotron", dp_replicate=4, tp=2)
    near, far = (made(plain, seconds, 1.0) for seconds in (1.04, 1.06))
    fastest = made(complex_, 1.0, 1.0)

    assert Ranking("m", 8, 2048, (fastest, near, far)).order == [near, fastest, far]
    assert Ranking("m", 8, 2048, (fastest, far)).order == [fastest, far]
    unsure = made(plain, 1.04, 1.0, verdict="likely")  # a `yes` comes before what only fits
    assert Ranking("m", 8, 2048, (fastest, unsure)).order == [fastest, unsure]


@pytest.mark.slow
def test_the_sweeps_fastest_is_among_the_first_three_in_nine_of_ten_groups_and_no_first_one_failed():
    rows = [one for one in each([SWEEP]) if isinstance(one, RowQuestion)]
    found = [one for one in rankings(rows, calibration("published").links) if one.gpus in SIZES]

    assert [(one.model, one.gpus) for one in found] == [
        (f"nanotron-llama-{size}", gpus) for size in ("1B", "3B") for gpus in SIZES
    ]
    assert sum(one.is_close for one in found) >= 9
    assert not any(one.first_failed for one in found)
