"""The record of the layouts that were run (docs/accuracy/layouts.json) against the cases that there are.

Not here: the runs that it is made of (make layouts), or the pages made of it (tests/test_docs.py).
"""

from __future__ import annotations

from pathlib import Path

from cases import CASES

from planner.truth.layouts import read_record

RECORD = Path(__file__).parents[2] / "docs" / "accuracy" / "layouts.json"


def test_the_record_has_a_row_of_every_case_and_no_other() -> None:
    assert [row.name for row in read_record(RECORD).rows] == list(CASES), "make layouts writes it"


def test_every_claim_was_recorded_of_every_case() -> None:
    for row in read_record(RECORD).rows:
        assert None not in (row.loss, row.grad_norm, row.weights, row.payload_exact, row.peak_error_percent), row.name
