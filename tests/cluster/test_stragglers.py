"""Ranks that keep the others waiting are named by real runs over gloo, and even ranks are not.

Not here: the rule on made-up figures (tests/executor/test_stragglers.py).
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from agents import Finished, make_plan, run_warm
from cases import BASE, FULL, PIPELINE
from msgspec.structs import replace

from executor.measure import report
from planner.spec import Layout

STEPS, EACH_S, DRAG_S, PAUSE_S = 10, 0.2, 0.5, 2.0
LAYOUTS = {
    "ddp-2": replace(BASE["ddp"], dp_replicate=2),
    "ddp-4": BASE["ddp"],
    "fsdp2-4": BASE["fsdp2"],
    "zero2-4": BASE["zero2"],
    "zero3-4": BASE["zero3"],
    "tp2-fsdp2": BASE["tp2-fsdp2"],
    "pp2-dp2": replace(PIPELINE, pp=2, dp_shard=2, grad_accum=2),
}
EACH = [name if name == "ddp-4" else pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS]


def train(layout: Layout, folder: Path, **environment: str) -> Finished:
    job = replace(FULL, recipe=replace(FULL.recipe, steps=STEPS))
    plan = make_plan(layout, job, nodes=1, per_node=layout.world_size)
    done = run_warm(
        plan, folder, "--no-meter", environment={"EACH_S": str(EACH_S)} | environment, module="tests.cluster.hanging"
    )
    assert set(done.exit_codes) == {0}, done.output
    return done


@pytest.mark.parametrize("name", EACH)
def test_a_slow_rank_and_one_that_stalled_once_are_named(name, tmp_path):
    layout = LAYOUTS[name]
    slow, stalls = layout.world_size - 1, 0
    done = train(layout, tmp_path / "run", DRAG=f"{slow} {DRAG_S}", PAUSE=f"{stalls} 8 {PAUSE_S}")

    busy = [line["busy_s"] for line in done.metrics]
    medians = [statistics.median(column) for column in zip(*busy, strict=True)]
    assert min(medians) >= EACH_S and medians[slow] >= EACH_S + DRAG_S
    found = {(one.kind, one.rank): one for one in report.build(done.folder).stragglers}
    assert set(found) == {("slow", slow), ("stalled", stalls)}
    assert found["stalled", stalls].at == (8,) and found["stalled", stalls].lost_s >= 0.9 * PAUSE_S
    assert found["slow", slow].lost_s == pytest.approx(DRAG_S, rel=0.5)


@pytest.mark.long
def test_even_ranks_are_none(tmp_path):
    done = train(LAYOUTS["ddp-4"], tmp_path / "run")
    assert report.build(done.folder).stragglers == ()
