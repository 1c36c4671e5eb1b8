"""The tables of combinations that were measured: a deviation is shown as one, wherever it stands in the record."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.basics.errors import PlannerError
from scripts.pages.combinations import (
    CombinationRecord,
    CombinationRow,
    encode_combinations,
    read_combinations,
    section,
)


def row(predicted: float, precision: str = "bf16", by: str = "run") -> CombinationRow:
    return CombinationRow(
        by=by,  # type: ignore[arg-type]
        name=f"ddp-{precision}-full",
        kind="ddp",
        precision=precision,
        recompute="full",
        model="tiny-llama",
        processes=2,
        batch="2 x 128 tokens, 2 a step",
        predicted_bytes=predicted * 2**20,
        measured_bytes=100 * 2**20,
        predicted_phase="backward",
        measured_phase="forward",
        term="forward/gathered",
        term_predicted_bytes=2**20,
        term_measured_bytes=None,
        date="2026-11-22",
        versions={"torch": "2.13.0"},
    )


@pytest.mark.slow
def test_a_peak_beyond_half_a_percent_is_a_known_deviation_and_one_within_is_not() -> None:
    shown = section(CombinationRecord(rows=(row(95.0), row(100.4, "fp32"), row(100.6, "pure-bf16", by="trace"))))

    matrices, deviations = shown.split("### Known deviations")
    assert "| ddp | +0.40 | **-5.00** |" in matrices
    assert "1 of 2 are within 0.5 %; the worst is -5.00 %, `ddp-bf16-full`" in matrices
    assert "forward/gathered: 1.000 MiB for n/a" in deviations
    assert [line.split(" | ")[0] for line in deviations.splitlines() if "ddp" in line] == [
        "| ddp-bf16-full",
        "| ddp-pure-bf16-full",
    ]
    assert "None: every peak is within 0.5 %." in section(CombinationRecord(rows=(row(100.4),)))


def test_a_record_reads_as_it_was_written_and_anything_else_is_refused_with_the_way_to_make_it(tmp_path: Path) -> None:
    path = tmp_path / "combinations.json"
    path.write_bytes(encode_combinations({"tp: why": 3}, [row(95.0), row(100.4, "fp32")]))

    assert read_combinations(path) == CombinationRecord(refused={"tp: why": 3}, rows=(row(95.0), row(100.4, "fp32")))
    path.write_text('{"rows": [{}]}')
    with pytest.raises(PlannerError, match="make combinations"):
        read_combinations(path)
