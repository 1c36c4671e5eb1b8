"""Claims about families that are written by hand: what their own code, imported, holds and computes, what a trace holds
of it, and the layout that is recommended, are the same.

Not here: families without a branch (test_imported.py).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import product
from random import Random

import pytest
from msgspec.structs import replace

from executor.measure import trace as traces
from executor.worker.imported import describe as describing
from executor.worker.imported.describe import config_of, describe
from executor.worker.imported.facts import spec_of
from executor.worker.trace.trace import trace
from planner.engines import engine_of
from planner.figures.work import unit_work
from planner.inventory import layer_runs, parameters, walk
from planner.parallelism.case import Case
from planner.spec import Layout, ModelSpec, TrainingJob, presets
from planner.spec.huggingface import config_dict
from planner.spec.job import Precision
from scripts.trace_pairs import planned
from tests.planner.families import SMALL, small, whole_model

BATCH, SEQ = 3, 4096
PRECISIONS: tuple[Precision, ...] = ("bf16", "pure-bf16")
VARIANTS = ("mixed", "pure")
EVERY = list(product(SMALL, PRECISIONS))
IN_CI = Random(31).sample(EVERY, 4)
TRACED = list(product(SMALL, PRECISIONS, ("none", "full")))
TRACED_IN_CI = Random(32).sample(TRACED, 2)


@lru_cache(maxsize=2)
def imported(name: str, by_hand: ModelSpec) -> ModelSpec:
    """The model, by its own code."""
    raw = config_dict(by_hand)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(describing, "VARIANTS", {one: describing.VARIANTS[one] for one in VARIANTS})
        return spec_of(name, raw, config_of(raw), describe(raw, ("cuda",)))


def case(model: ModelSpec, precision: Precision, recompute: str) -> Case:
    layout = Layout(engine="single", micro_batch_size=BATCH, recompute=recompute)
    cluster = replace(presets.cluster("dgx-h100"), nodes=1, gpus_per_node=1)
    job = TrainingJob(precision=precision, seq_len=SEQ)
    return Case(model, job, layout, cluster, presets.runtime("accelerate-single"))


def fullest(model: ModelSpec, precision: Precision, recompute: str) -> float:
    """Bytes of the fullest moment beside weights, their gradients and the optimizer's states."""
    compute = engine_of("single").compute(case(model, precision, recompute))
    moments = walk(model, compute, whole_model(model)).moments
    return max(sum(size.at(BATCH, SEQ) for size in moment.live) for moment in moments)


def flops(model: ModelSpec) -> list[float]:
    """FLOP of all layers: of products, of attention, and those that a mask hides, forward and backward."""
    work, runs = unit_work(case(model, "pure-bf16", "none")), layer_runs(model)
    loads = [(getattr(work[kind], way), count) for way in ("forward", "backward") for kind, count in runs if count]
    return [
        sum(float(getattr(load, part)) * count for load, count in loads)
        for part in ("product_flops", "attention_flops", "masked_flops")
    ]


@pytest.mark.parametrize(
    ("name", "precision"), [pytest.param(*one, marks=() if one in IN_CI else pytest.mark.long) for one in EVERY]
)
def test_a_family_by_hand_and_imported_holds_and_computes_the_same(name: str, precision: Precision) -> None:
    by_hand = small(name)
    model = imported(name, by_hand)

    assert parameters(model) == parameters(by_hand)
    for recompute in ("none", "full"):
        assert fullest(model, precision, recompute) == pytest.approx(fullest(by_hand, precision, recompute), rel=1e-6)
    assert flops(model) == pytest.approx(flops(by_hand), rel=1e-6)


@pytest.mark.parametrize(
    ("name", "precision", "recompute"),
    [pytest.param(*one, marks=() if one in TRACED_IN_CI else pytest.mark.long) for one in TRACED],
)
def test_peak_of_a_family_by_hand_is_that_of_a_trace(name: str, precision: Precision, recompute: str) -> None:
    layout = Layout(engine="single", micro_batch_size=BATCH, recompute=recompute)
    plan = planned(small(name), TrainingJob(precision=precision, seq_len=SEQ), layout)

    report = traces.compared(plan, trace(plan, 0))

    assert report.memory.peak.error_percent == pytest.approx(0, abs=0.5)
