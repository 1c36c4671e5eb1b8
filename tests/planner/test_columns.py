"""The law scalar = column: every formula, memory and time answer alike for one layout and for a hundred."""

from __future__ import annotations

import inspect
from collections import Counter
from functools import cache
from importlib import import_module
from typing import Any, get_args

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.ask.question import STRATEGIES, Question, Strategy, case_of
from planner.basics.formula import known_formulas
from planner.decide.blocks import Block, as_column, blocks_of
from planner.decide.bounds import memory_bound
from planner.figures.comm import Traffic, crosses, ranks_inside
from planner.figures.kernels.experts import expert_rows, routed
from planner.figures.kernels.products import named
from planner.figures.memory import memory_lines, peak_at, peak_bytes
from planner.figures.steptime import StepTime, step_time
from planner.parallelism.case import MESH_AXES, axis_groups, axis_stride, spans_nodes
from planner.parallelism.zero import StateBytes
from planner.spec import Layout, Link, Optimizer, Tier, TrainingJob, presets
from planner.spec.calibration import LinkCurve, calibration
from planner.spec.engines import ENGINES
from planner.spec.job import OptimizerName
from scripts.pages.formulas import page

page()  # imports every module of the planner, so that every formula is known
FORMULAS = list(known_formulas())

LINK = Link(name="link", bytes_per_s_per_direction=25e9, latency_s=5e-6)
LEVELS = (
    Tier(name="node", gpus=2, link=Link(name="fast", bytes_per_s_per_direction=450e9, latency_s=3e-6)),
    Tier(name="rack", gpus=4, link=LINK),
    Tier(name="cluster", gpus=8, link=Link(name="slow", bytes_per_s_per_direction=3e9, latency_s=9e-6)),
)
NUMBERS = {  # parameter -> range of whole numbers it may have
    "ranks": (1, 64), "inside": (1, 8), "stride": (1, 8),
    "domain": (1, 8), "shards": (1, 64), "stages": (1, 8),
    "micro_batches": (1, 8), "calls": (1, 900), "tokens": (1, 10**6), "seq_len": (1, 10**5), "element_bytes": (2, 4),
    "micro_batch_size": (1, 64), "grad_accum": (1, 64), "data_parallel": (1, 64), "accesses": (1, 20),
    "rank": (0, 7), "virtual_stages": (1, 4), "layers": (1, 100), "step_s": (1, 100), "efficiency": (1, 2),
    "sharpness": (1, 4), "splits": (1, 3),
}  # fmt: skip
FIXED: dict[str, Any] = {
    "schedule": "interleaved",
    "op": "all_reduce", "transport": "gloo", "states": StateBytes(2, 2, 4, 8), "stage": 2, "recompute": "full",
    "kernels": presets.runtime("accelerate-fsdp2").parts, "model": presets.model("tiny"),
    "levels": LEVELS, "double": True, "curves": [LinkCurve(share=0.5, half_bytes=1e4, latency_s=2e-6)] * len(LEVELS),
}  # fmt: skip


def traffic_of(rows: Any) -> Traffic:
    return Traffic(
        op="all_reduce",
        axis="dp_shard",
        unit="layer",
        phase="backward",
        count=rows,
        payload_bytes=rows * 64.0,
        overlappable=True,
        ranks=rows * 8,
        inside=(rows * 2, rows * 4),
        wire_bytes=rows * 9.0,
        leaving=(rows * 4.0, rows * 2.0),
        inter_bytes=rows * 4.0,
    )


H100 = named("h100-sxm-80gb")
KERNELS = {
    "Device": H100,
    "ProductTimes": H100.times.product("bf16"),
    "AttentionTimes": H100.times.attend(),
    "ExpertTimes": H100.times.expert("bf16"),
    "CollectiveTimes": H100.times.collective("all_reduce"),
    "MemoryTimes": H100.times.move("plain"),
    "Routed": routed(expert_rows(4096, 2, 8, 2)),
    "bool": False,
}
"""Arguments of kernels' formulas by their annotation."""
EXACT, POWERS = 0.0, 1e-12
"""Relative deviation of a column: powers of columns are NumPy's, those of numbers C's."""


def arguments(function: Any, rows: int) -> dict[str, Any]:
    """Columns for the numbers of a formula, single values for its categories. Unknown parameters count as large."""
    draw = np.random.default_rng(rows)
    found: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if ".kernels." in function.__module__ and str(parameter.annotation) in KERNELS:
            found[name] = KERNELS[str(parameter.annotation)]
        elif name == "number_format":
            found[name] = "bf16"
        elif name == "one":
            found[name] = traffic_of(draw.integers(1, 9, size=rows).astype(float))
        elif name in FIXED and parameter.annotation != "Number":
            found[name] = FIXED[name]
        else:
            low, high = NUMBERS.get(name, (1, 10**12))
            found[name] = draw.integers(low, high, size=rows, endpoint=True).astype(float)
    return found


def row_of(value: Any, place: int) -> Any:
    if isinstance(value, np.ndarray):
        return float(value[place])
    if isinstance(value, Traffic):
        return Traffic(**{name: row_of(getattr(value, name), place) for name in Traffic.__struct_fields__})
    if isinstance(value, tuple):
        return tuple(row_of(one, place) for one in value)
    return value


@pytest.mark.parametrize("name", FORMULAS)
def test_a_formula_answers_alike_for_a_number_and_a_column(name: str):
    module, _, attribute = name.rpartition(".")
    function = getattr(import_module(module), attribute)
    given_ = arguments(function, 50)

    column = np.broadcast_to(function(**given_), 50)

    within = POWERS if ".kernels." in name else EXACT
    for place in range(50):
        alone = function(**{key: row_of(value, place) for key, value in given_.items()})
        assert column[place] == pytest.approx(alone, rel=within, abs=0)


def question(precision: str, optimizer: str = "adamw", method: str = "full", nodes: int = 4) -> Question:
    job = TrainingJob(precision=precision, optimizer=Optimizer(name=optimizer), method=method, seq_len=256)
    return Question(presets.model("tiny"), presets.cluster("dgx-h100", nodes=nodes), job, calibration())


@st.composite
def alike(draw: st.DrawFn) -> tuple[Layout, ...]:
    """Layouts of one strategy that share their categories, which are free."""
    strategy: Strategy = draw(st.sampled_from(STRATEGIES))
    template = Layout(
        engine=strategy.engine,
        zero_stage=strategy.zero_stage,
        recompute=draw(st.sampled_from(["none", "full"])),
        reshard_after_forward=draw(st.booleans()),
        sync_each_micro_batch=draw(st.booleans()) if strategy.engine == "fsdp2" else False,
        gradient_as_bucket_view=draw(st.booleans()),
    )
    one = st.builds(
        layout_for,
        st.just(strategy),
        st.just(template),
        st.integers(1, 5),
        st.integers(1, 4),
        st.integers(1, 9),
        st.integers(1, 5),
    )
    return tuple(draw(st.lists(one, min_size=2, max_size=6)))


def layout_for(
    strategy: Strategy, template: Layout, shard_power: int, replica_power: int, micro: int, accum: int
) -> Layout:
    shard, replicas = 2**shard_power, 2**replica_power if strategy.shards == "some ranks" else 1
    if strategy.shards == "nothing":
        shard, replicas = 1, shard
    return msgspec.structs.replace(
        template, dp_replicate=replicas, dp_shard=shard, micro_batch_size=micro, grad_accum=accum
    )


JOBS = (
    st.sampled_from(["fp32", "bf16", "fp16", "pure-bf16", "fp8"]),
    st.sampled_from(get_args(OptimizerName)),
    st.sampled_from(["full", "lora", "qlora"]),
)


def columns(layouts: tuple[Layout, ...]) -> Layout:
    """The layouts as one whose numbers are columns."""
    names = ("dp_replicate", "dp_shard", "micro_batch_size", "grad_accum")
    numbers: Any = {name: np.array([getattr(layout, name) for layout in layouts], dtype=float) for name in names}
    return msgspec.structs.replace(layouts[0], **numbers)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(alike(), *JOBS)
def test_peak_bytes_takes_columns_of_shards_and_batches(
    layouts: tuple[Layout, ...], precision: str, optimizer: str, method: str
):
    asked = question(precision, optimizer, method)
    several = layouts[0].grad_accum > 1
    some = tuple(layout for layout in layouts if (layout.grad_accum > 1) is several)

    column = np.broadcast_to(peak_bytes(case_of(asked, columns(some))), len(some))

    for place, layout in enumerate(some):
        assert column[place] == pytest.approx(peak_bytes(case_of(asked, layout)), rel=1e-12)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(alike(), *JOBS)
def test_time_answers_alike_for_a_layout_and_a_column_of_layouts(
    layouts: tuple[Layout, ...], precision: str, optimizer: str, method: str
):
    asked = question(precision, optimizer, method)

    column = step_time(case_of(asked, columns(layouts)), asked.calibration)

    for place, layout in enumerate(layouts):
        one = step_time(case_of(asked, layout), asked.calibration)
        for name in known(one, column):
            value = np.broadcast_to(getattr(column, name), len(layouts))[place]
            assert value == pytest.approx(getattr(one, name), rel=1e-12), name


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(alike())
def test_memory_lines_are_the_peak_at_every_micro_batch(layouts: tuple[Layout, ...]):
    asked = question("bf16")
    for layout in layouts:
        lines = memory_lines(case_of(asked, layout))
        for micro in (1, 3, 64):
            other = msgspec.structs.replace(layout, micro_batch_size=micro)
            assert peak_at(lines, micro) == pytest.approx(peak_bytes(case_of(asked, other)), rel=1e-12)


def known(one: StepTime, columns: StepTime) -> list[str]:
    """What is known of a step: its ramp and slowest stage belong to a pipeline alone."""
    unknown = [name for name in one.__struct_fields__ if getattr(one, name) is None]
    assert unknown == [name for name in one.__struct_fields__ if getattr(columns, name) is None]
    return [name for name in one.__struct_fields__ if name not in unknown]


MODELS = ("7b", "gpt2", "mixtral-8x7b", "deepseek-v2-lite")


@cache
def unpiped_blocks(engine: str, model: str) -> tuple[Question, list[Block]]:
    """The parts of an engine's space that have no pipeline, whose stages columns take for equal."""
    cluster = presets.cluster("dgx-h100", 1 if engine == "single" else 32)
    asked = Question(presets.model(model), cluster, TrainingJob(), calibration())
    return asked, [block for block in blocks_of(asked, (engine,)) if (block.rows["pp"] == 1).all()]


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_bounds_answer_alike_for_a_layout_and_its_row_of_the_space(engine: str, data: st.DataObject):
    asked, some = unpiped_blocks(engine, data.draw(st.sampled_from(MODELS)))
    block = data.draw(st.sampled_from(some))
    row = data.draw(st.integers(0, block.size - 1))
    together, alone = case_of(asked, block.columns()), case_of(asked, block.layout(row))

    bound, single = as_column(memory_bound(together), block.size)[row], float(memory_bound(alone))
    assert bound <= single * (1 + 1e-12)
    assert engine == "transformers-tp" or bound == pytest.approx(single, rel=1e-12)  # it asks whether there are shards
    whole, one = step_time(together, asked.calibration), step_time(alone, asked.calibration)
    for name in known(one, whole):
        assert as_column(getattr(whole, name), block.size)[row] == pytest.approx(getattr(one, name), rel=1e-12), name


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4), st.integers(1, 80))
@settings(max_examples=200, deadline=None)
def test_the_closed_form_of_leaving_a_domain_equals_the_rank_map(replicas: int, shards: int, tp: int, domain: int):
    layout = Layout(engine="fsdp2", dp_replicate=replicas, dp_shard=shards, tp=tp)
    if domain >= layout.world_size:
        return
    for axis in ("dp_replicate", "dp_shard", "tp"):
        found = crosses(getattr(layout, axis), axis_stride(layout, axis), domain)
        assert found == spans_nodes(layout, axis, domain), axis


@pytest.mark.slow
@given(*[st.sampled_from([1, 2, 4, 8]) for _ in range(5)], st.sampled_from([2, 4, 8, 16, 32, 64]))
@settings(max_examples=200, deadline=None)
def test_ranks_inside_a_domain_are_counted_on_the_rank_map(
    pp: int, replicas: int, shards: int, cp: int, tp: int, domain: int
):
    """Powers of two, as people use: every group meets equally many ranks in each domain it reaches."""
    layout = Layout(engine="fsdp2", pp=pp, dp_replicate=replicas, dp_shard=shards, cp=cp, tp=tp)
    if domain >= layout.world_size:
        return
    for axis in MESH_AXES:
        inside = ranks_inside(getattr(layout, axis), axis_stride(layout, axis), domain)
        for group in axis_groups(layout, axis):
            assert set(Counter(rank // domain for rank in group).values()) == {inside}, axis
