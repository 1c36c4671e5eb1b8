"""Today's predictions beside the bytes that real runs measured (tests/recorded, written by make layouts), as
tests/cluster/test_prediction.py compares them while they run.

Not here: the runs.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import recorded
from cases import CASES
from recorded import Recorded
from stages import stages_of, wrong_collectives, wrong_memory

from planner.engines import ddp


@cache
def record(name: str) -> Recorded:
    return recorded.read(name)


def wrong(name: str) -> list[str]:
    plan, measured = record(name).facts()
    return wrong_collectives(plan, measured) + wrong_memory(stages_of(plan, measured))


@pytest.mark.parametrize("name", CASES)
def test_a_recorded_run_is_predicted_to_the_byte_on_the_wire_and_within_5_percent_in_memory(name: str) -> None:
    assert not wrong(name)


def test_each_case_has_a_record_of_the_plan_it_has_today_and_of_every_rank_and_no_other_run_is_there() -> None:
    assert {path.stem for path in recorded.FOLDER.glob("*.json")} == set(CASES), "make layouts writes them"
    for name, case in CASES.items():
        plan, measured = record(name).facts()
        assert recorded.bare(plan) == recorded.bare(case.plan), f"{name} was recorded of another plan: make layouts"
        assert [one.rank for one in measured] == list(range(plan.layout.world_size)), name


def test_what_is_read_back_is_what_was_written(tmp_path: Path) -> None:
    name = "pp2-tp2-dp2-zero1"
    plan, measured = record(name).facts()

    recorded.write(name, plan, measured, tmp_path)

    assert (tmp_path / f"{name}.json").read_bytes() == (recorded.FOLDER / f"{name}.json").read_bytes()


def test_a_first_bucket_of_ddp_of_twice_the_size_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "FIRST_BUCKET_BYTES", 2 * ddp.FIRST_BUCKET_BYTES)

    assert any(wrong(name) for name in CASES if name.startswith("ddp"))
