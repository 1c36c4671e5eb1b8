"""An engine's record says what its rules allow, and what is derived from records has every engine and family."""

from __future__ import annotations

from functools import cache
from itertools import product

import msgspec
import pytest

from planner.ask.options import question
from planner.ask.question import usual_runtime
from planner.decide.blocks import blocks_of
from planner.decide.capabilities import MODELS
from planner.engines import engine_of
from planner.parallelism.case import Case
from planner.spec import Layout, ModelSpec, TrainingJob, presets
from planner.spec.engines import ENGINES
from planner.spec.formats import FORMATS
from planner.spec.layout import CpMethod, PpSchedule

AXES = ("tp", "pp", "cp", "ep")
METHODS, SCHEDULES = CpMethod.__args__, PpSchedule.__args__
MIXTURE = "mixtral-8x7b"


@cache
def model(name: str) -> ModelSpec:
    return presets.model(name)


def is_legal(layout: Layout) -> bool:
    """Whether no rule of its engine is broken by a mixture of experts or by a dense model."""
    cluster = presets.cluster("dgx-h100", gpus=layout.world_size)
    return any(
        all(
            rule.holds(Case(model(name), TrainingJob(seq_len=1024), layout, cluster, usual_runtime(layout.engine)))
            for rule in engine_of(layout.engine).rules
        )
        for name in (MIXTURE, "llama-2-7b")
    )


@cache
def legal_layouts(engine: str) -> tuple[Layout, ...]:
    """Legal layouts with two ranks along some axes, in the engine's usual stage, every method and schedule alone."""
    facts, found = ENGINES[engine], []
    gpus = 1 if facts.copies == "none" else 16
    for tp, pp, cp, ep, reshard, split in product((1, 2), (1, 2), (1, 2), (1, 2), (True, False), (False, True)):
        ranks, rest = divmod(gpus, tp * pp * cp)
        if rest or (split and tp == 1) or (cp > 1 and pp > 1):
            continue
        replicas = ranks if facts.copies == "replicas" else 1
        sizes = {"tp": tp, "pp": pp, "cp": cp, "ep": ep, "dp_replicate": replicas, "dp_shard": ranks // replicas}
        switches = {"reshard_after_forward": reshard, "sequence_parallel": split, "grad_accum": 4 * pp}
        plain = Layout(engine=engine, zero_stage=facts.usual_stage, **sizes, **switches)
        for method, schedule in product(METHODS if cp > 1 else METHODS[:1], SCHEDULES if pp > 1 else ("1f1b",)):
            for chunks in (1, 2) if pp > 1 else (1,):
                changes = {"cp_method": method, "pp_schedule": schedule, "virtual_stages": chunks}
                layout = msgspec.structs.replace(plain, **changes)
                found += [layout] if is_legal(layout) else []
    return tuple(found)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_rules_of_an_engine_allow_what_its_record_splits_and_nothing_else(engine):
    facts, layouts = ENGINES[engine], legal_layouts(engine)

    assert {axis for axis in AXES if any(getattr(layout, axis) > 1 for layout in layouts)} == set(facts.splits)
    assert facts.sequence_parallel is any(layout.sequence_parallel for layout in layouts)
    assert {layout.pp_schedule for layout in layouts if layout.pp > 1} == {
        name for name, _ in (*facts.schedules, *facts.asked_schedules)
    }
    if "cp" in facts.splits:  # rules allow others that no search tries
        assert set(facts.cp_methods) <= {layout.cp_method for layout in layouts if layout.cp > 1}


@pytest.mark.parametrize("engine", [name for name, facts in ENGINES.items() if "ep" in facts.splits])
def test_a_search_spreads_experts_in_every_engine_whose_rules_allow_it(engine):
    asked = question({"model": MIXTURE, "cluster": "dgx-h100", "gpus": 16, "global_batch_size": 16, "method": "full"})

    assert any(block.column("ep").max() > 1 for block in blocks_of(asked, (engine,)) if block.size)


def test_the_capabilities_ask_a_model_of_every_family():
    assert set(MODELS) == set(FORMATS)
    assert {family: model(name).family for family, name in MODELS.items()} == {family: family for family in MODELS}


def test_every_engine_is_read_from_a_module_that_has_its_name_and_a_runtime_that_runs_it():
    for name, facts in ENGINES.items():
        runtime = presets.runtime(facts.runtime)
        assert (engine_of(name).name, runtime.engine, runtime.backend) == (name, name, facts.framework)
