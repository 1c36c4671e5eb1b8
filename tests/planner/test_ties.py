"""Ties: the simplest of the layouts that the predictions do not tell apart is recommended."""

from __future__ import annotations

import pytest

from planner.ask import options
from planner.decide.answers import Constraints
from planner.decide.candidates import seconds_per_sequence
from planner.decide.recommendation import as_json_object, recommend
from planner.decide.search import rank
from planner.decide.space import proposed
from planner.decide.star import TIE, parts_of, simpler
from planner.parallelism.technique_rules import STRAY
from planner.spec import Layout
from planner.studies.objectives import Reached
from planner.views.ranking import ranking_text

EVERY = 10**6
GRID = [("1b", "1"), ("1b", "8"), ("7b", "8"), ("llama-3-8b", "16"), ("mixtral-8x7b", "16")]


@pytest.mark.parametrize(("model", "gpus"), GRID)
def test_no_layout_that_ties_is_simpler_than_the_recommended(model, gpus):
    question = options.question({"model": model, "gpus": gpus, "seq_len": "2048"})
    engines = proposed(question)
    few = rank(question, 1, engines=engines, own_rules=(STRAY,))
    every = rank(question, 400, engines=engines, own_rules=(STRAY,), tie=0)
    limit = few.best[0].seconds_per_sequence * (1 + TIE)
    tied = [one for one in every.best if one.seconds_per_sequence <= limit]

    assert few.best[0] == every.best[0]
    assert few.simplest is not None and few.simplest.seconds_per_sequence <= limit
    assert seconds_per_sequence(question, few.simplest.layout) == few.simplest.seconds_per_sequence
    chosen = parts_of(few.simplest.layout, 2048)
    assert not any(simpler(parts_of(one.layout, 2048), chosen) for one in tied)
    assert every.simplest is not None and every.simplest.seconds_per_sequence == every.best[0].seconds_per_sequence


def test_a_tie_is_told_with_the_fastest_and_by_how_much():
    question = options.question({"model": "7b", "gpus": "64"})
    found = recommend(question, 3, Constraints(any_runtime=True))
    fastest = recommend(question, 3, Constraints(any_runtime=True, tie=0))

    assert found.fastest is not None and found.fastest.case.layout == fastest.estimates[0].case.layout
    assert 0 < found.slower <= TIE and fastest.fastest is None and fastest.slower == 0
    assert found.estimates[1].case.layout == found.fastest.case.layout
    assert as_json_object(found)["tie"]["fastest"] == found.fastest.case.layout
    told = ranking_text(Reached("fastest", found))
    assert f"It ties with the fastest, {found.fastest.name}" in told and f"predicted {found.slower:.2%} faster" in told
    assert "ties with" not in ranking_text(Reached("fastest", fastest))


@pytest.mark.parametrize(
    ("plain", "complex_"),
    [
        (Layout(engine="ddp", dp_replicate=8), Layout(engine="fsdp2", dp_shard=8, zero_stage=3)),
        (Layout(engine="fsdp2", dp_shard=8, zero_stage=3), Layout(engine="deepspeed", dp_shard=8, zero_stage=1)),
        (Layout(engine="megatron", tp=2, dp_shard=4), Layout(engine="megatron", pp=2, dp_shard=4)),
        (Layout(engine="megatron", tp=2, dp_shard=4), Layout(engine="megatron", tp=4, dp_shard=2)),
        (Layout(engine="ddp", grad_accum=2), Layout(engine="ddp", grad_accum=64)),
        (Layout(engine="megatron", tp=8, dp_shard=8), Layout(engine="ddp", dp_replicate=64, grad_accum=1024)),
    ],
)
def test_one_layout_is_simpler_than_the_other_and_never_both(plain, complex_):
    one, other = parts_of(plain, 2048), parts_of(complex_, 2048)

    assert simpler(one, other) and not simpler(other, one) and not simpler(one, one)
