"""Attention with scores in memory, over the product of engine, method, precision and recomputation: a run's losses are
those of fused attention, its payload is planned to the byte, and its peak within 1 %.

Sixteen are drawn in `make long`, three in CI. Not here: what attention takes in time, or traces, which see no tensor
that a kernel makes (tests/planner/test_attention.py).
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest
from agents import make_plan, run_warm
from combinations import MODEL, RUN, Combination, on_gpus, refusal
from msgspec.structs import replace
from stages import furthest, size_of_error, stages_of, told, wrong_collectives

from executor.folder.rundir import read_measured, read_run_plan
from planner.spec.engines import choosing_attention
from planner.spec.layout import AttentionName
from planner.spec.plan import Plan

LARGEST_PEAK_ERROR_PERCENT = 1.0
LARGEST_LOSS_ERROR = 1e-5  # relative, at any step, in fp32
SEED = 28
SEQ_LEN = 512
"""Scores of a layer are then most of what is live in its backward."""


def launched(one: Combination) -> bool:
    return refusal(on_gpus(MODEL, one.job, replace(one.layout, attention="eager"))) is None


ALL_RUN = {name: one for name, one in RUN.items() if launched(one)}


def draws(names: dict[str, Combination], count: int, first: int = 0) -> list[str]:
    """A sample of `count` names, drawn by the seed, after the `first` ones of the same draw."""
    dice = random.Random(SEED)
    mixed = dice.sample(list(names), len(names))
    return mixed[first : first + count]


def plan_with(one: Combination, attention: AttentionName) -> Plan:
    """A real run by CPU processes with this attention."""
    plan = one.run_plan
    layout, job = replace(plan.layout, attention=attention), replace(plan.job, seq_len=SEQ_LEN)
    return make_plan(layout, job, nodes=1, per_node=layout.world_size, model=plan.model)


def check_run(name: str, folder: Path) -> None:
    one = ALL_RUN[name]
    finished = {code: run_warm(plan_with(one, code), folder / code) for code in ("sdpa", "eager")}
    for each in finished.values():
        assert set(each.exit_codes) == {0}, each.output[-3000:]
    eager = finished["eager"]
    plan, measured = read_run_plan(eager.folder), tuple(read_measured(eager.folder))

    losses, others = finished["sdpa"].column("loss"), eager.column("loss")
    if one.precision == "fp32":
        assert float(np.max(np.abs(others - losses) / np.abs(losses))) <= LARGEST_LOSS_ERROR
    assert not wrong_collectives(plan, measured)
    _, report = furthest(stages_of(plan, measured))
    assert size_of_error(report.peak) <= LARGEST_PEAK_ERROR_PERCENT, told(report)


@pytest.mark.parametrize("name", draws(ALL_RUN, 3))
def test_a_run_trains_as_with_fused_attention_and_needs_what_was_planned(name: str, tmp_path: Path) -> None:
    check_run(name, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", draws(ALL_RUN, 16, 3))
def test_more_runs_train_as_with_fused_attention_and_need_what_was_planned(name: str, tmp_path: Path) -> None:
    check_run(name, tmp_path)


def test_every_engine_that_chooses_its_attention_is_run_with_eager() -> None:
    assert {one.engine for one in ALL_RUN.values()} == set(choosing_attention())
