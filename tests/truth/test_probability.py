"""Scores of probabilities by hand: four runs, their Brier score, their tenths and both errors of a threshold."""

from __future__ import annotations

import msgspec
import pytest

from planner.calibrate.asked import RowQuestion
from planner.calibrate.predict import Figures, Replayed
from planner.calibrate.rows import Measured, Row, Source
from planner.parallelism.case import Case
from planner.spec import Layout, TrainingJob, presets
from planner.spec.calibration import calibration
from scripts.pages.fitted import fits_section
from tests.truth.published.probability import End, ends, left_out, lowest_safe, model_of, scored

RUNS = [
    End(needed=0.95, room=0.9, fits=True, fitted=True, left="a"),
    End(needed=0.95, room=0.3, fits=False, fitted=True, left="b"),
    End(needed=0.45, room=0.2, fits=False, fitted=True, left="b"),
    End(needed=0.15, room=0.85, fits=True, fitted=False, left="b"),
]


def replayed(probability: float | None, *, fits: bool = True, oom: bool = False) -> Replayed:
    row = Row(id="a", source=Source(repo_or_paper="b"), measured=Measured(oom=oom), file="c")
    return Replayed(RowQuestion(row=row), Figures(needed_probability=probability, fits_probability=0.7, fits=fits))


def test_the_score_of_four_runs() -> None:
    found = scored(RUNS)

    assert (found.n, found.fitted) == (4, 3)
    assert found.brier == pytest.approx((0.05**2 + 0.05**2 + 0.55**2 + 0.15**2) / 4)
    assert found.constant == pytest.approx(0.75 * 0.25)
    assert [(one.low, one.n, one.fitted) for one in found.deciles] == [(0.1, 1, 0), (0.4, 1, 1), (0.9, 2, 1)]
    assert found.deciles[2].predicted == pytest.approx(0.95)


def test_both_errors_of_a_threshold_and_of_what_is_called_fitting() -> None:
    found = scored(RUNS)
    at = {one.probability: (one.fitted_called_not, one.not_fitted_called) for one in found.thresholds}

    assert at[0.1] == (0, 1)  # all are called fitting
    assert at[0.2] == (0, 0)
    assert at[0.5] == (pytest.approx(1 / 3), 0)
    assert (found.fits.fitted_called_not, found.fits.not_fitted_called) == (pytest.approx(2 / 3), 1)
    at = {one.probability: (one.fitted_called_not, one.not_fitted_called) for one in found.rooms}
    assert (at[0.2], at[0.8], at[0.9]) == ((0, 1), (pytest.approx(2 / 3), 1), (pytest.approx(2 / 3), 0))


def test_a_threshold_that_others_chose_is_the_lowest_by_which_none_of_their_failures_fits() -> None:
    assert lowest_safe(RUNS) == 0.9  # above 0.85
    assert lowest_safe(RUNS[:1]) == 0.05  # no failure was seen
    assert lowest_safe([End(needed=1, room=1, fits=True, fitted=False)]) == 0.95  # none is safe
    found = scored(RUNS)  # b's runs are judged from 0.05 on, which all of a's leave free, a's from 0.9 on
    assert (found.chosen.fitted_called_not, found.chosen.not_fitted_called) == (0, 1)


def test_a_threshold_is_met_by_what_is_as_probable_and_a_certain_run_is_in_the_last_tenth() -> None:
    found = scored([End(needed=one, room=one, fits=True, fitted=True) for one in (0.5, 1.0)])
    assert next(one for one in found.thresholds if one.probability == 0.5).fitted_called_not == 0
    assert found.deciles[-1].low == 0.9
    assert found.fits.not_fitted_called is None
    assert "n/a" in fits_section({"Source": found})


def test_only_runs_with_a_known_end_and_a_prediction_count() -> None:
    assert ends([replayed(0.9), replayed(0.8, fits=False, oom=True), replayed(None)]) == [
        End(needed=0.9, room=0.7, fits=True, fitted=True, left="b"),
        End(needed=0.8, room=0.7, fits=False, fitted=False, left="b"),
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
