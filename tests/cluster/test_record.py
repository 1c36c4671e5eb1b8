"""The records of the layouts and of the combinations that were run (docs/accuracy/*.json) against those that there are.

Not here: the runs that it is made of (make layouts), or the pages made of it (tests/test_docs.py).
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from cases import CASES, KeepCombination
from combinations import REFUSED, RUN, TRACED, predicted_anew

from scripts.pages.combinations import read_combinations
from scripts.pages.layouts import read_record

ACCURACY = Path(__file__).parents[2] / "docs" / "accuracy"
RECORD, COMBINATIONS = ACCURACY / "layouts.json", ACCURACY / "combinations.json"


def test_the_record_has_a_row_of_every_case_and_no_other() -> None:
    assert [row.name for row in read_record(RECORD).rows] == list(CASES), "make layouts writes it"


def test_every_claim_was_recorded_of_every_case() -> None:
    for row in read_record(RECORD).rows:
        assert None not in (row.loss, row.grad_norm, row.weights, row.payload_exact, row.peak_error_percent), row.name


def test_the_record_of_combinations_has_every_one_that_is_traced_or_run_and_no_other() -> None:
    record = read_combinations(COMBINATIONS)

    assert [row.name for row in record.rows if row.by == "trace"] == list(TRACED), "make combinations writes it"
    assert [row.name for row in record.rows if row.by == "run"] == list(RUN), "make combinations writes it"
    assert record.refused == Counter(REFUSED.values())


def test_the_record_of_combinations_has_the_predictions_of_today(keep_combination: KeepCombination) -> None:
    stale = [
        f"{row.by} {row.name}: {row.predicted_bytes:,.0f} recorded, {now.predicted_bytes:,.0f} now"
        for row in read_combinations(COMBINATIONS).rows
        if (now := predicted_anew(row)).predicted_bytes != pytest.approx(row.predicted_bytes, rel=1e-6)
    ]

    assert not stale, "make combinations measures anew; make predictions only predicts anew"
