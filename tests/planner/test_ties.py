"""Ties: the simplest of the layouts that the predictions do not tell apart is recommended."""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec
import pytest

from planner.ask import options
from planner.decide.answers import Constraints
from planner.decide.candidates import Candidate
from planner.decide.recommendation import as_json_object, recommend
from planner.decide.search import rank
from planner.decide.space import proposed
from planner.decide.star import TIE, near_best, parts_of, simpler, starred
from planner.parallelism.technique_rules import STRAY
from planner.spec import Layout
from planner.studies.objectives import Reached
from planner.views.ranking import ranking_text
from planner.views.verdict import star_text

GRID = [("1b", "1"), ("1b", "8"), ("7b", "8"), ("llama-3-8b", "16"), ("mixtral-8x7b", "16")]


def found(layout: Layout, seconds: float, size: float = 1.0, serial: float | None = None) -> Candidate:
    return Candidate(layout, seconds, size, seconds if serial is None else serial)


DDP, FSDP = Layout(engine="ddp", dp_replicate=8), Layout(engine="fsdp2", dp_shard=8, zero_stage=3)
STAGES = Layout(engine="deepspeed-pipeline", pp=8, grad_accum=64)


@pytest.mark.parametrize(
    ("some", "one_batch", "star"),
    [
        ([], True, None),
        ([found(FSDP, 1.0)], True, FSDP),
        ([found(FSDP, 1.0), found(DDP, 1.05)], True, DDP),  # near, and simpler
        ([found(FSDP, 1.0), found(DDP, 1.051)], True, FSDP),  # not near
        ([found(FSDP, 1.0, serial=1.5), found(DDP, 1.04, serial=1.1)], True, DDP),
        ([found(FSDP, 1.0, serial=1.1), found(DDP, 1.04, serial=1.2)], True, FSDP),  # near as predicted alone
        ([found(FSDP, 1.0, serial=1.2), found(DDP, 1.06, serial=1.06)], True, FSDP),  # what is not near sets no limit
        ([found(FSDP, 1.0, 5.0), found(msgspec.structs.replace(FSDP, micro_batch_size=2), 1.01, 4.0)], True,
         msgspec.structs.replace(FSDP, micro_batch_size=2)),  # of equals the one that needs less memory
        ([found(STAGES, 1.0, serial=1.0), found(DDP, 1.04, serial=1.2)], False, DDP),  # it accumulates more
        ([found(STAGES, 1.0, serial=1.0), found(DDP, 1.04, serial=1.2)], True, STAGES),
    ],
)  # fmt: skip
def test_the_star_is_the_simplest_of_those_near_the_best_in_both(
    some: list[Candidate], one_batch: bool, star: Layout | None
) -> None:
    chosen = starred(some, 2048, one_batch=one_batch)

    assert (None if chosen is None else chosen.layout) == star


def test_the_width_of_near_is_asked_for() -> None:
    some = [found(FSDP, 1.0), found(DDP, 1.04)]

    assert starred(some, 2048, 0.03, one_batch=True) == some[0] and starred(some, 2048, 0.04, one_batch=True) == some[1]


@pytest.mark.parametrize(("model", "gpus"), GRID)
def test_one_by_one_and_in_columns_the_star_and_the_best_are_the_same(model: str, gpus: str) -> None:
    question = options.question({"model": model, "gpus": gpus, "seq_len": "2048"})
    engines = proposed(question)

    one, other = (rank(question, 3, engines=engines, own_rules=(STRAY,), few=few) for few in (0, 10**9))

    assert one.star is not None and one.star == other.star and one.best == other.best
    assert near_best([one.best[0], one.star], TIE, one_batch=False)[-1] == one.star


def test_a_tie_is_told_with_the_fastest_and_by_how_much():
    question = options.question({"model": "7b", "gpus": "64"})
    found = recommend(question, 3, Constraints(any_runtime=True))
    fastest = recommend(question, 3, Constraints(any_runtime=True, tie=0))

    assert found.fastest is not None and found.fastest.case.layout == fastest.estimates[0].case.layout
    assert 0 < found.slower <= TIE and fastest.fastest is None and fastest.slower == 0
    assert found.estimates[1].case.layout == found.fastest.case.layout
    assert as_json_object(found)["tie"]["fastest"] == found.fastest.case.layout
    assert found.fastest.name in star_text(found)[0]
    assert star_text(found)[0] in " ".join(ranking_text(Reached("fastest", found)).split())
    assert "cannot tell apart" not in ranking_text(Reached("fastest", fastest))


@pytest.mark.parametrize(
    ("plain", "complex_"),
    [
        (Layout(engine="ddp", dp_replicate=8), Layout(engine="fsdp2", dp_shard=8, zero_stage=3)),
        (Layout(engine="deepspeed", dp_shard=8, zero_stage=1), Layout(engine="fsdp2", dp_shard=8, zero_stage=3)),
        (Layout(engine="fsdp2", dp_shard=8, zero_stage=3), Layout(engine="deepspeed", dp_shard=8, zero_stage=3)),
        (Layout(engine="megatron", tp=2, dp_shard=4), Layout(engine="megatron", pp=2, dp_shard=4)),
        (Layout(engine="megatron", tp=2, dp_shard=4), Layout(engine="megatron", tp=4, dp_shard=2)),
        (Layout(engine="megatron", tp=8, dp_shard=8), Layout(engine="ddp", dp_replicate=64, grad_accum=1024)),
    ],
)
def test_one_layout_is_simpler_than_the_other_and_never_both(plain, complex_):
    one, other = parts_of(plain, 2048), parts_of(complex_, 2048)

    assert simpler(one, other) and not simpler(other, one) and not simpler(one, one)


def test_equals_are_ranked_alike_in_every_process():
    """ZeRO-1 and ZeRO-2 on one GPU are equal in all the star looks at; a set's order differs between processes."""
    line = "recommend --top 5 --any-runtime --model llama-2-7b --gpus 1 --method full --recompute none --json"
    answers = {
        subprocess.run(
            [sys.executable, "-m", "planner", *line.split(), "--calibration", "uncalibrated"],
            env=os.environ | {"PYTHONHASHSEED": seed}, capture_output=True, check=True,
        ).stdout
        for seed in ("0", "1", "2")
    }  # fmt: skip

    assert len(answers) == 1
