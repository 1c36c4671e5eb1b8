"""Chats in padded rows, split over ranks and micro-batches that count different numbers of answers' tokens.

Not here: packed chats, which are one of cases.CASES, or what a row is (tests/executor/test_finetune.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from agents import Finished, make_plan, run_warm
from cases import CASES, FULL, SEQUENCES
from chats import chat_file
from msgspec.structs import replace
from test_equivalence import LARGEST_METRIC_ERROR, LARGEST_WEIGHT_ERROR, deviations

from executor.folder.rundir import read_measured, read_run_plan
from executor.measure.report import build, join_memory, join_traffic
from planner.spec import Layout

JOB = replace(FULL, recipe=replace(FULL.recipe, data=chat_file(), validation_data=chat_file(), eval_every=10))


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """FSDP2 over four ranks, two micro-batches each, with the meter."""
    plan = make_plan(CASES["fsdp2-accum2"].layout, JOB, nodes=2, per_node=2)
    return run_warm(plan, tmp_path_factory.mktemp("padded-chats"), "--save-weights")


def test_chats_train_what_one_process_trains_on_the_same_answers(split: Finished, tmp_path: Path) -> None:
    plan = make_plan(Layout(engine="single", micro_batch_size=SEQUENCES), JOB, nodes=1, per_node=1)
    one = run_warm(plan, tmp_path, "--no-meter", "--save-weights")

    loss, norm, weights = deviations(one, split)
    print(f"\npadded chats: loss {loss:.1e}, gradient norm {norm:.1e}, weights {weights:.1e}")
    assert max(loss, norm) <= LARGEST_METRIC_ERROR
    assert weights <= LARGEST_WEIGHT_ERROR
    targets, tokens = (one.column(name) for name in ("target_tokens", "tokens"))
    assert len(set(targets)) > 10 and (3 * targets < 2 * tokens).all()
    assert (split.column("target_tokens") == targets).all()
    seen, expected = (run.json("result.json")["validation"] for run in (split, one))
    assert [(each["step"], each["tokens"]) for each in seen] == [(each["step"], each["tokens"]) for each in expected]
    assert [each["loss"] for each in seen] == pytest.approx([each["loss"] for each in expected], rel=1e-5)
    assert seen[1]["loss"] < seen[0]["loss"] - 0.3


def test_shorter_rows_send_as_many_bytes_and_hold_no_more_memory_than_predicted(split: Finished) -> None:
    plan, measured = read_run_plan(split.folder), tuple(read_measured(split.folder))

    for one in measured:
        report = join_traffic(plan, (one,))
        assert report.lines
        assert all(line.predicted == line.measured for line in (*report.lines, *report.counts))
        assert all(call.payload_bytes / call.count < 1024 for call in one.control)
    peak = join_memory(plan.prediction.memory, measured).peak
    assert 0 < (peak.measured or 0) <= (peak.predicted or 0) * 1.001


def test_memory_is_predicted_for_the_rows_that_the_measured_step_had(split: Finished) -> None:
    measured = tuple(read_measured(split.folder))
    assert {len(one.rows) for one in measured} == {2}  # two micro-batches a step

    built = build(split.folder)
    error = built.memory.peak.error_percent
    print(f"\npadded chats: rows of {[one.rows for one in measured]} tokens, peak {error:+.2f} %")
    assert max(one.rows[0] for one in measured) < JOB.seq_len
    assert error is not None and abs(error) < 0.5
    assert any("as the measured step had them" in note for note in built.notes)
