"""One whole layout held against every constraint: its run's seconds, a deadline on both sides, a backend, its front.

Not here: searches among many (test_recommend.py).
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from planner.ask.options import question
from planner.basics.errors import PlannerError
from planner.decide.answers import FREE, Constraints
from planner.decide.recommendation import _launched, _whole, recommend, seen_of
from planner.decide.whynot import _parsed, why_not


def asked(**more: str) -> Any:
    return question({"model": "llama-3.2-1b", "gpus": "8", "micro_batch_size": "2", "dp_replicate": "8"} | more)


DDP = asked(strategy="ddp")


def test_sequences_are_tokens_over_their_length_rounded_up_and_seconds_of_each_the_deadline_over_them() -> None:
    length = DDP.job.seq_len
    for tokens, sequences in ((length, 1), (length + 1, 2), (10 * length, 10)):
        assert Constraints(tokens=tokens, samples=99).sequences(DDP) == sequences
    assert Constraints(samples=7).sequences(DDP) == 7 and FREE.sequences(DDP) is None
    assert Constraints(samples=8, deadline_s=4.0).slowest(DDP) == 0.5
    assert Constraints(samples=8).slowest(DDP) is Constraints(deadline_s=4.0).slowest(DDP) is None


def test_a_layout_is_whole_where_its_data_parallel_ranks_are_given() -> None:
    assert _whole(DDP) and _whole(asked(strategy="fsdp", dp_replicate="1", dp_shard="8"))
    assert not _whole(replace(DDP, pins=replace(DDP.pins, dp_replicate=None)))
    assert seen_of(1000, 1) == "999 of 1,000 layouts"


def test_the_layout_given_is_all_that_is_looked_at_and_its_own_front() -> None:
    found = recommend(DDP)
    (one,) = found.estimates
    assert (found.considered, found.evaluated, found.pruned, found.rejected, found.front) == (1, 1, 0, {}, ())
    assert found.best is one and one.case.layout.dp_replicate == 8 and found.run_s is None and not found.missed
    (point,) = recommend(DDP, front=3).front
    assert point.layout == one.case.layout and point.device_bytes == one.memory.device_bytes
    assert point.seconds_per_sequence == pytest.approx(float(one.time.step_s or 0) / 16)
    large = asked(strategy="ddp", model="llama-3-70b")
    found = recommend(large, front=3)
    assert found.best is None and found.front == () and found.recommended is None


def test_a_deadline_is_kept_by_a_run_that_takes_as_long() -> None:
    step_s = float(recommend(DDP).estimates[0].time.step_s or 0)
    run_s = step_s / 16 * 4000
    for factor, kept in ((1 + 1e-9, True), (1 - 1e-9, False)):
        found = recommend(DDP, constraints=Constraints(samples=4000, deadline_s=run_s * factor))
        assert found.run_s == pytest.approx(run_s) and found.missed is not kept and (found.best is not None) is kept
    assert recommend(DDP, constraints=Constraints(samples=4000)).run_s is None
    assert recommend(DDP, constraints=Constraints(deadline_s=1.0)).run_s is None


def test_a_backend_launches_the_layout_or_another_that_does_is_named() -> None:
    assert recommend(DDP, constraints=Constraints(backend="accelerate")).best is not None
    with pytest.raises(PlannerError, match=r"launches no such layout .runtime accelerate-ddp.* Use accelerate"):
        recommend(DDP, constraints=Constraints(backend="deepspeed"))
    planned = asked(strategy="ddp", precision="fp16")
    found = recommend(planned)
    assert (found.best is None) is not found.estimates[0].launchable
    assert recommend(planned, constraints=Constraints(any_runtime=True)).best is not None


def test_sizes_mean_the_engine_that_launches_them_and_a_named_one_is_not_asked() -> None:
    layout = _launched(asked(), FREE)
    assert layout is not None and (layout.engine, layout.dp_replicate) == ("ddp", 8)
    sharded = _launched(asked(dp_replicate="1", dp_shard="8"), FREE)
    assert sharded is not None and sharded.engine == "fsdp2"
    other = _launched(asked(dp_replicate="1", dp_shard="8"), Constraints(backend="deepspeed"))
    assert other is not None and other.engine == "deepspeed"
    assert _launched(DDP, FREE) is _launched(asked(), Constraints(any_runtime=True)) is None


def test_what_is_named_is_read_field_by_field_and_judged() -> None:
    assert _parsed("tp=2, dp-shard = 4,sequence_parallel=yes") == {"tp": 2, "dp_shard": 4, "sequence_parallel": True}
    for text, words in (("tp", "is not name=value"), ("tp=", "is not name=value"), ("=2", "is not a field"),
                        ("tq=2", "is not a field"), ("tp=2,tp=2", "is named twice")):  # fmt: skip
        with pytest.raises(PlannerError, match=words):
            _parsed(text)
    found = recommend(DDP)
    assert why_not(found, "micro_batch_size=4").kind == "fixed"
    assert why_not(found, "micro_batch_size=2").kind == "best"
    again = why_not(found, "recompute=full")
    assert again.kind == "slower" and again.layout == replace(found.estimates[0].case.layout, recompute="full")
    assert why_not(found, "engine=ddp,zero_stage=3").kind == "rule"
