"""Scores of probabilities by hand: four runs, their Brier score, their tenths and both errors of a threshold."""

from __future__ import annotations

import msgspec
import pytest

from planner.calibrate.asked import Asked
from planner.calibrate.predict import Figures, Replayed
from planner.calibrate.probability import ends, left_out, model_of, scored
from planner.calibrate.rows import Measured, Row, Source
from planner.parallelism.case import Case
from planner.spec import Layout, TrainingJob, presets
from planner.spec.calibration import calibration
from scripts.pages.fitted import fits_section

RUNS = [(0.95, True, True), (0.95, False, True), (0.45, False, True), (0.15, True, False)]
"""(probability, what the headroom rule says, end)."""


def replayed(probability: float | None, *, fits: bool = True, oom: bool = False) -> Replayed:
    row = Row(id="a", source=Source(repo_or_paper="b"), measured=Measured(oom=oom), file="c")
    return Replayed(Asked(row=row), Figures(fits_probability=probability, fits=fits))


def test_the_score_of_four_runs() -> None:
    found = scored(RUNS)

    assert (found.n, found.fitted) == (4, 3)
    assert found.brier == pytest.approx((0.05**2 + 0.05**2 + 0.55**2 + 0.15**2) / 4)
    assert found.constant == pytest.approx(0.75 * 0.25)
    assert [(one.low, one.n, one.fitted) for one in found.deciles] == [(0.1, 1, 0), (0.4, 1, 1), (0.9, 2, 1)]
    assert found.deciles[2].predicted == pytest.approx(0.95)


def test_both_errors_of_a_threshold_and_of_the_headroom_rule() -> None:
    found = scored(RUNS)
    at = {one.probability: (one.fitted_called_not, one.not_fitted_called) for one in found.thresholds}

    assert at[0.1] == (0, 1)  # all are called fitting
    assert at[0.2] == (0, 0)
    assert at[0.5] == (pytest.approx(1 / 3), 0)
    assert (found.headroom.fitted_called_not, found.headroom.not_fitted_called) == (pytest.approx(2 / 3), 1)


def test_a_threshold_is_met_by_what_is_as_probable_and_a_certain_run_is_in_the_last_tenth() -> None:
    found = scored([(0.5, True, True), (1.0, True, True)])
    assert next(one for one in found.thresholds if one.probability == 0.5).fitted_called_not == 0
    assert found.deciles[-1].low == 0.9
    assert found.headroom.not_fitted_called is None
    assert "n/a" in fits_section({"Source": found})


def test_only_runs_with_a_known_end_and_a_prediction_count() -> None:
    assert ends([replayed(0.9), replayed(0.8, fits=False, oom=True), replayed(None)]) == [
        (0.9, True, True),
        (0.8, False, False),
    ]


def test_both_judgements_stand_one_below_the_other_with_their_own_figures() -> None:
    page = fits_section({"Source": scored(RUNS), "Model": scored(RUNS[:2])})
    source, model = page.split("### Source left out")[1].split("### Model left out")

    assert "Of 4 runs 3 fitted. Brier score 0.0825" in source and "Of 2 runs 2 fitted. Brier score 0.0025" in model


def test_rows_are_left_out_by_model_where_they_have_a_question() -> None:
    asked = replayed(0.9).asked
    case = Case(
        presets.model("llama-3-8b"), TrainingJob(), Layout(engine="single"), presets.cluster("dgx-h100", 1),
        presets.runtime("accelerate-single"),
    )  # fmt: skip
    known = msgspec.structs.replace(asked, case=case)

    assert [model_of(one) for one in (asked, known)] == [None, "llama-3-8b"]
    assert [one.row.id for one in left_out([asked, known], {"llama-3-8b": calibration()}, model_of)] == ["a"]


def test_a_row_of_a_source_that_gave_no_measurement_is_left_away() -> None:
    assert left_out([replayed(0.9).asked], {"another": calibration()}) == []
    assert [one.asked.row.id for one in left_out([replayed(0.9).asked], {"b": calibration()})] == ["a"]
