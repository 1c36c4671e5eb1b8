"""Figures by hand where `make mutants` found that a wrong formula was not noticed (seed 2027).

Not here: the figures that other by-hand tests have.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import planner as library
from executor.worker.data import lengths
from planner.ask import options
from planner.basics.errors import PlannerError
from planner.calibrate.kernels.tables import _training
from planner.decide.answers import Answer
from planner.spec.lengths import _of_stream
from planner.studies.compare import MOST_PLANS, compare
from planner.studies.cost import CostRates, _with_failures


def asked(**given: Any) -> Answer:
    return library.estimate(**given)


def test_as_many_plans_are_compared_as_is_said_and_no_more() -> None:
    plan = library.plan_of(asked(model="tiny-llama", gpus=2).estimates[0])
    named = [(str(number), plan) for number in range(MOST_PLANS + 1)]
    assert len(compare(named[:-1]).sides) == MOST_PLANS
    with pytest.raises(PlannerError, match=f"at most {MOST_PLANS} are compared"):
        compare(named)


def test_a_product_s_share_of_the_peak_is_seconds_by_two_flop_an_element_of_the_sum() -> None:
    """2 x 300 x 500 x 700 FLOP at half of 100 TFLOP/s."""
    row = {"op": "matmul", "shape": "m=300, n=500, k=700", "share_of_peak": "0.5", "peak_tflops": "100"}
    assert _training(row)[2] == pytest.approx(2 * 300 * 500 * 700 / 50e12)


def test_a_text_without_a_tokenizer_is_its_bytes_and_two_marks(tmp_path: Path) -> None:
    """998 bytes and two marks are 1,000 tokens: 9 sequences of 111, each of which predicts one token more."""
    text = tmp_path / "text.txt"
    text.write_text("a" * 998)
    job = options.question({"model": "tiny-llama", "gpus": "2", "seq_len": "111"}).job
    assert job.recipe.own_tokenizer is None
    counted, _ = _of_stream(job, text, None)
    assert counted.recipe.rows == (998 + 2 - 1) // 111 == 9


def test_of_many_packed_examples_rows_are_all_tokens_of_the_sample_s_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Forty equal examples of which ten are read: forty times one's length over that of a row."""
    monkeypatch.setattr(lengths, "ALL", 20)
    monkeypatch.setattr(lengths, "LONGEST", 2)
    monkeypatch.setattr(lengths, "SAMPLED", 8)
    path = tmp_path / "chats.jsonl"
    path.write_text(40 * (json.dumps({"prompt": "What is it?", "response": "This is it."}) + "\n"))
    found = lengths.count(path, 64, None, "packed")
    assert found["read"] < found["examples"] == 40
    assert found["rows"] == -(-40 * found["mean"] // 64)


def test_a_run_of_no_known_length_has_its_reliability_all_the_same() -> None:
    """Checkpoints of 100 s, failures every 20,000 s: Daly's interval is near the root of 2 x 100 x 20,000."""
    question = asked(model="7b", gpus=8).question
    rates = CostRates(checkpoint_s=100.0, failures_per_gpu_hour=3600 / 20_000 / 8)
    trust, run_s = _with_failures(question, rates, None)
    assert run_s is None and trust.expected_failures is None
    assert trust.mtbf_s == pytest.approx(20_000)
    assert trust.checkpoint_interval_s == trust.best_checkpoint_interval_s == pytest.approx(2000, rel=0.1)


def test_failures_without_the_time_of_a_checkpoint_are_named_and_not_counted() -> None:
    question = asked(model="7b", gpus=8).question
    rates = CostRates(interval_s=600.0, failures_per_gpu_hour=3600 / 20_000 / 8)
    trust, run_s = _with_failures(question, rates, 5000.0)
    assert run_s == 5000.0
    assert (trust.mtbf_s, trust.checkpoint_interval_s) == (pytest.approx(20_000), 600.0)
    assert (trust.best_checkpoint_interval_s, trust.expected_failures) == (None, None)
