"""Attention with scores in memory, over the product of engine, method, precision and recomputation: a run's losses are
those of fused attention, its payload is planned to the byte, and its peak within 1 %.

Sixteen are drawn in `make long`, three in CI. Not here: what attention takes in time, or traces, which see no tensor
that a kernel makes (tests/planner/test_attention.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from agents import make_plan
from combinations import MODEL, RUN, Combination, on_gpus, refusal
from msgspec.structs import replace
from pairs import check_losses, check_needs, draws, run

from planner.spec.engines import ENGINES, choosing
from planner.spec.layout import AttentionName
from planner.spec.plan import Plan

LARGEST_PEAK_ERROR_PERCENT = 1.0
SEED = 28
SEQ_LEN = 512
"""Scores of a layer are then most of what is live in its backward."""


def launched(one: Combination) -> bool:
    return refusal(on_gpus(MODEL, one.job, replace(one.layout, attention="eager"))) is None


ALL_RUN = {name: one for name, one in RUN.items() if launched(one)}


def plan_with(one: Combination, attention: AttentionName) -> Plan:
    """A real run by CPU processes with this attention."""
    plan = one.run_plan
    layout, job = replace(plan.layout, attention=attention), replace(plan.job, seq_len=SEQ_LEN)
    return make_plan(layout, job, nodes=1, per_node=layout.world_size, model=plan.model)


def check_run(name: str, folder: Path) -> None:
    one = ALL_RUN[name]
    fused, eager = (run(plan_with(one, code), folder / code) for code in ("sdpa", "eager"))
    check_losses(fused, eager, one.precision)
    check_needs(eager, LARGEST_PEAK_ERROR_PERCENT)


@pytest.mark.parametrize("name", draws(ALL_RUN, SEED, 3))
def test_a_run_trains_as_with_fused_attention_and_needs_what_was_planned(name: str, tmp_path: Path) -> None:
    check_run(name, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", draws(ALL_RUN, SEED, 16, 3))
def test_more_runs_train_as_with_fused_attention_and_need_what_was_planned(name: str, tmp_path: Path) -> None:
    check_run(name, tmp_path)


def test_every_engine_that_chooses_its_attention_is_run_with_eager() -> None:
    launched = {engine for engine in choosing("attention") if ENGINES[engine].framework is not None}
    assert {one.engine for one in ALL_RUN.values()} == launched
