"""One enumeration of the space: what each engine's record allows of the product of all numbers and categories."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product
from typing import Any

import msgspec
import pytest
from spaces import layouts_of

from planner.ask.launchable import launches
from planner.ask.question import MICRO_BATCHES, Pins, Question, checked_runtime, usual_runtime
from planner.decide.blocks import blocks_of
from planner.decide.estimation import nearest_launchable
from planner.decide.space import ACCUMULATIONS
from planner.parallelism.case import Case
from planner.spec import Cluster, Layout, ModelSpec, TrainingJob, presets
from planner.spec.calibration import calibration
from planner.spec.engines import ENGINES, EngineFacts
from planner.spec.layout import STRATEGIES

SIZES = range(1, 13)
SEQ_LEN = 512


@cache
def model(name: str = "tiny-llama") -> ModelSpec:
    return presets.model(name)


def cluster(gpus: int) -> Cluster:
    return msgspec.structs.replace(presets.cluster("dgx-h100", 8), nodes=1, gpus_per_node=gpus)


def asked(gpus: int, batch: int | None = None, name: str = "tiny-llama", **fixed: Any) -> Question:
    job = TrainingJob(global_batch_size=batch, seq_len=SEQ_LEN)
    question = Question(model(name), cluster(gpus), job, calibration(), strategy=fixed.pop("strategy", None))
    return msgspec.structs.replace(question, pins=Pins(**fixed))


PINS: tuple[dict[str, Any], ...] = (
    {},
    {"tp": 2},
    {"pp": 2, "pp_schedule": "gpipe"},
    {"pp_schedule": "zb-v"},
    {"virtual_stages": 2},
    {"cp": 2, "cp_method": "ulysses"},
    {"cp_method": "ring"},
    {"dp_shard": 2},
    {"dp_replicate": 3},
    {"zero_stage": 1},
    {"recompute": "full"},
    {"recompute": "attention"},
    {"reshard_after_forward": False},
    {"sync_each_micro_batch": True},
    {"sync_each_micro_batch": False},
    {"sequence_parallel": True},
    {"sequence_parallel": False},
    {"micro_batch_size": 2},
    {"grad_accum": 2},
)


def numbers(question: Question) -> Iterator[dict[str, int]]:
    """All group sizes and batches whose products are the GPUs and the global batch, however they are split."""
    gpus, batch, pins = question.cluster.gpus, question.job.global_batch_size, question.pins
    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0]
    micros = MICRO_BATCHES if pins.micro_batch_size is None else (pins.micro_batch_size,)
    accums = ACCUMULATIONS if pins.grad_accum is None else (pins.grad_accum,)
    if batch is not None:
        micros = accums = tuple(range(1, batch + 1))
    for pp, replicate, shard, cp, tp in product(sizes, repeat=5):
        if pp * replicate * shard * cp * tp == gpus:
            for ep, micro, accum in product(sizes, micros, accums):
                if batch in (None, replicate * shard * micro * accum):
                    yield {
                        "pp": pp, "dp_replicate": replicate, "dp_shard": shard, "cp": cp, "tp": tp, "ep": ep,
                        "micro_batch_size": micro, "grad_accum": accum,
                    }  # fmt: skip


def copies_allowed(facts: EngineFacts, question: Question, row: dict[str, int]) -> bool:
    """Whether the data-parallel ranks are what the engine's record says, and a named strategy."""
    replicate, shard = row["dp_replicate"], row["dp_shard"]
    strategy = question.asked_strategy
    if strategy is not None and strategy.name in ("fsdp", "hsdp") and (replicate > 1) is not (strategy.name == "hsdp"):
        return False
    if facts.copies == "none":
        return replicate == shard == 1
    if facts.copies == "replicas":
        return replicate > 1 and shard == 1
    if facts.copies == "any":
        return shard > 1 or bool(facts.splits)
    pins = question.pins
    sharding_asked = (strategy, pins.runtime, pins.zero_stage) != (None, None, None) or question.cluster.gpus > 1
    return replicate == 1 and (shard > 1 or bool(facts.splits) or sharding_asked)


def row_allowed(facts: EngineFacts, question: Question, row: dict[str, int]) -> bool:
    """Whether the engine splits what the row splits, no further than the model goes, as it was fixed."""
    spec, pins = question.model, question.pins
    most = {"tp": spec.heads, "pp": spec.layers, "cp": SEQ_LEN}
    experts = spec.moe.experts if spec.moe else 0
    fits_experts = row["dp_shard"] * row["cp"] * row["tp"] % row["ep"] == 0 and experts % row["ep"] == 0
    return (
        all(row[axis] == 1 or axis in facts.splits for axis in ("pp", "cp", "tp", "ep"))
        and all(row[axis] <= size for axis, size in most.items())
        and (row["ep"] == 1 or (bool(experts) and fits_experts))
        and all(getattr(pins, name) in (None, row[name]) for name in row)
        and (question.job.global_batch_size is not None or row["pp"] > 1 or row["grad_accum"] == (pins.grad_accum or 1))
        and copies_allowed(facts, question, row)
    )


def schedules_of(facts: EngineFacts, question: Question, piped: bool) -> set[tuple[str, int]]:
    """A schedule means something to a pipeline alone: without one it is the default's."""
    pins, usual = question.pins, ("1f1b", 1)
    found = {usual, *facts.schedules, *(one for one in facts.asked_schedules if one[0] == pins.pp_schedule)}
    left = {
        one for one in found if pins.pp_schedule in (None, one[0]) and pins.virtual_stages in (None, one[1])
    }  # fmt: skip
    return left if piped else left & {usual}


def categories(facts: EngineFacts, question: Question, row: dict[str, int]) -> Iterator[dict[str, Any]]:
    """All categories of a row of numbers: a category that means nothing to the row has one value."""
    pins, strategy = question.pins, question.asked_strategy
    flash = question.runtime(facts.name).parts.attention == "flash"
    stages = facts.zero_stages if strategy is None else (strategy.zero_stage,)
    recomputes = [one for one in facts.recompute if not (one == "attention" and flash and pins.recompute is None)]
    reshards = [
        one
        for one in facts.reshard
        if (len(facts.reshard) == 1 or pins.reshard_after_forward in (None, one))
        and (facts.pipeline_reshards or row["pp"] == 1 or not one)
    ]
    syncs: list[bool] = [one for one in facts.sync if not one or row["grad_accum"] > 1]
    if pins.sync_each_micro_batch is not None:
        syncs = [pins.sync_each_micro_batch]
    methods = facts.cp_methods if row["cp"] > 1 else facts.cp_methods[:1]
    parallels = [facts.sequence_parallel and row["tp"] > 1]
    if pins.sequence_parallel is not None:
        able = not pins.sequence_parallel or parallels[0]
        parallels = [pins.sequence_parallel] if able else []
    for stage, recompute, reshard, sync, (schedule, virtual), method, parallel in product(
        [one for one in stages if pins.zero_stage in (None, one)],
        [one for one in recomputes if pins.recompute in (None, one)],
        reshards,
        syncs,
        schedules_of(facts, question, row["pp"] > 1),
        [one for one in methods if pins.cp_method in (None, one)],
        parallels,
    ):
        yield {
            "zero_stage": stage, "recompute": recompute, "reshard_after_forward": reshard,
            "sync_each_micro_batch": sync, "pp_schedule": schedule, "virtual_stages": virtual, "cp_method": method,
            "sequence_parallel": parallel,
        }  # fmt: skip


def by_brute_force(question: Question, engine: str) -> list[Layout]:
    """The product of all numbers and categories, filtered by the engine's record."""
    facts = ENGINES[engine]
    asked_of = question.pins.runtime.engine if question.pins.runtime else question.asked_strategy
    if asked_of is not None and engine not in (asked_of, getattr(asked_of, "engine", None)):
        return []
    return [
        Layout(engine=engine, **row, **kinds)  # type: ignore[arg-type]  # an engine's name
        for row in numbers(question)
        if row_allowed(facts, question, row)
        for kinds in categories(facts, question, row)
    ]


def compared(question: Question, engine: str) -> int:
    """Layouts of the enumeration, after it was compared with brute force and with the columns."""
    truth = by_brute_force(question, engine)
    found = list(layouts_of(question, (engine,)))
    assert len(found) == len(set(found)) and set(found) == set(truth)
    columns = [block.layout(row) for block in blocks_of(question, (engine,)) for row in range(block.size)]
    assert len(columns) == len(found) and set(columns) == set(found)
    return len(found)


@pytest.mark.parametrize("engine", ENGINES)
def test_the_space_is_the_whole_product_filtered_by_the_engines_record(engine: str) -> None:
    counts = [compared(asked(gpus, batch), engine) for gpus in SIZES for batch in (None, 12)]
    assert max(counts) > 0


@pytest.mark.parametrize("engine", ENGINES)
def test_whatever_is_fixed_the_space_is_the_filtered_product(engine: str) -> None:
    counts = [compared(asked(gpus, 12, **pins), engine) for pins in PINS for gpus in (1, 4, 6)]
    assert max(counts) > 0


@pytest.mark.parametrize("engine", [facts.name for facts in ENGINES.values() if "ep" in facts.splits])
def test_experts_are_split_over_every_group_that_their_number_allows(engine: str) -> None:
    name = "deepseek-v2-lite"
    assert compared(asked(4, 4, name), engine) and compared(asked(4, None, name, ep=2), engine)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=lambda strategy: strategy.name)
def test_a_named_strategy_is_the_part_of_the_space_of_its_name(strategy: Any) -> None:
    met = 0
    for gpus, batch, pins in product(SIZES, (None, 12), ({}, {"sync_each_micro_batch": True}, {"recompute": "full"})):
        question = asked(gpus, batch, strategy=strategy.name, **pins)
        some = list(layouts_of(question))
        assert len(some) == len(set(some)) and set(some) == set(by_brute_force(question, strategy.engine))
        met += len(some)
    assert met


def test_one_shard_is_looked_at_where_an_engine_that_shards_is_asked_for() -> None:
    assert not list(layouts_of(asked(1), ("deepspeed",)))
    assert list(layouts_of(asked(1, runtime=checked_runtime("deepspeed")), ("deepspeed",)))


def test_reductions_asked_for_after_each_micro_batch_are_in_every_layout_looked_at() -> None:
    """The search dropped them where a step has one micro-batch, and showed engines that have no such switch."""
    for batch in (None, 16):
        found = list(layouts_of(asked(8, batch, sync_each_micro_batch=True)))
        assert all(layout.sync_each_micro_batch for layout in found)
        assert {layout.engine for layout in found if layout.grad_accum == 1} >= {"ddp", "fsdp2"}


@pytest.mark.parametrize(
    ("name", "engine", "sizes"),
    [
        ("gemma-2-2b", "megatron", {"tp": 4, "pp": 3, "cp": 2, "ep": 2}),
        ("mixtral-8x7b", "torchtitan", {"tp": 2, "pp": 4, "cp": 8, "ep": 2}),
        ("llama-2-7b", "torchtitan", {"tp": 4, "pp": 4, "cp": 8, "ep": 2, "recompute": "attention"}),
    ],
)
def test_the_nearest_that_runs_is_found_however_many_axes_were_asked_for(
    name: str, engine: str, sizes: dict[str, Any]
) -> None:
    """Sizes that no engine has used up what is tried, and nothing was near."""
    layout = Layout(engine=engine, zero_stage=3, micro_batch_size=2, **sizes)
    job = TrainingJob(seq_len=SEQ_LEN, global_batch_size=4 * layout.world_size)
    machines = presets.cluster("dgx-h100", layout.world_size)
    found = nearest_launchable(Case(model(name), job, layout, machines, usual_runtime(engine)))
    assert found is not None and launches(found)
    assert all(getattr(found.layout, axis) <= max(sizes.get(axis, 1), 1) for axis in ("tp", "pp", "cp"))
