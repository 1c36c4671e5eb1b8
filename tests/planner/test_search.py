"""The search: exactly what brute force over single layouts returns, bounds that no layout goes below, every layout
accounted for."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from spaces import brute_force, layouts_of, things

from planner.ask.question import Pins, Question, case_of, limit_bytes
from planner.decide import blocks, search, walker
from planner.decide.blocks import Block, as_column, blocks_of
from planner.decide.bounds import memory_bound
from planner.decide.candidates import Candidate, LayoutFigures, least_seconds, seconds_per_sequence
from planner.decide.search import rank
from planner.decide.space import proposed
from planner.decide.star import starred
from planner.decide.strategies import answer
from planner.engines import engine_of
from planner.figures.memory import memory_breakdown
from planner.parallelism.rule import Rule, check
from planner.parallelism.technique_rules import STRAY
from planner.spec import Layout, TrainingJob, presets
from planner.spec.calibration import calibration
from planner.spec.engines import ENGINES
from planner.spec.layout import strategy_name

LAUNCHED = ("single", "ddp", "fsdp2", "deepspeed")


def asked(model: str = "7b", gpus: int = 32, batch: int | None = None, **pins: object) -> Question:
    cluster = presets.cluster("dgx-h100", gpus)
    return Question(presets.model(model), cluster, TrainingJob(global_batch_size=batch), calibration(), Pins(**pins))


def figures(candidates: Sequence[Candidate]) -> list[tuple[float, float]]:
    return [(one.seconds_per_sequence, one.device_bytes) for one in candidates]


def unbeaten(truth: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The Pareto front of points that ascend in time."""
    front: list[tuple[float, float]] = []
    for seconds, size in truth:
        if seconds > walker.FRONT_SPAN * truth[0][0]:
            break
        if not front or size < front[-1][1]:
            front.append((seconds, size))
    return front


# -- brute force ---------------------------------------------------------------------------------------------------

SMALL = {
    "every strategy of data parallelism, any batch": (asked(gpus=32), LAUNCHED),
    "a batch to be made": (asked(gpus=16, batch=96), LAUNCHED),
    "one GPU": (asked("llama-3.2-1b", gpus=1), LAUNCHED),
    "tensor and context groups on 4 GPUs": (asked("llama-3.2-1b", gpus=4, batch=4), ENGINES),
    "pipelines on 8 GPUs": (asked("7b", gpus=8, batch=8, pp=4), ENGINES),
    "tensor groups on 8 GPUs": (asked("llama-3-8b", gpus=8, batch=8, tp=4), ENGINES),
    "activations in host memory": (
        asked(gpus=8, batch=128, recompute="none", others=(("offload_activations", True),)),
        LAUNCHED,
    ),
    "experts on 8 GPUs": (asked("deepseek-v2-lite", gpus=8, batch=8, ep=4, cp=1), ENGINES),
}


WAYS = {"one by one": 10**9, "columns": 0}
"""`few` of a search, by how it looks at a space."""


@cache
def truth_of(name: str) -> list[Candidate]:
    return brute_force(*SMALL[name])


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", SMALL)
def test_the_search_returns_what_brute_force_returns(name: str, way: str):
    (question, engines), truth = SMALL[name], truth_of(name)
    one_batch = question.job.global_batch_size is not None
    star = starred(truth, question.job.seq_len, one_batch=one_batch)
    assert star is not None

    for k in (1, 5):
        found = rank(question, k, engines=engines, few=WAYS[way])
        assert figures(found.best) == [pytest.approx(one, rel=1e-12) for one in figures(things(truth)[:k])]
        assert found.star is not None and found.star.layout == star.layout
    fastest = rank(question, engines=engines, few=WAYS[way], tie=0).star
    assert fastest is not None and fastest.seconds_per_sequence == pytest.approx(truth[0].seconds_per_sequence)


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp", "zero1", "zero3"])
@pytest.mark.parametrize("name", ["every strategy of data parallelism, any batch", "activations in host memory"])
def test_estimate_shows_each_strategy_as_fast_as_brute_force_finds_it(name: str, strategy: str):
    """The space of one strategy is a part of the whole."""
    question = msgspec.structs.replace(SMALL[name][0], strategy=strategy)
    truth = brute_force(question, LAUNCHED)
    assert truth

    (shown,) = answer(question).estimates

    star = starred(truth, question.job.seq_len, one_batch=question.job.global_batch_size is not None)
    assert star is not None and shown.case.layout == star.layout and shown.name == strategy


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SMALL)[:4])
def test_the_front_is_what_no_layout_beats(name: str):
    question, engines = SMALL[name]
    truth = unbeaten(figures(truth_of(name)))

    found = rank(question, 1, engines=engines, front=10**6)

    assert sorted(set(figures(found.front))) == [pytest.approx(one, rel=1e-12) for one in truth]
    assert figures(rank(question, 1, engines=engines, front=2).front)[:2] == figures(found.front)[:2]


@pytest.mark.slow
def test_a_deadline_leaves_what_keeps_it():
    question = asked(gpus=32)
    truth = figures(things(brute_force(question, LAUNCHED)))
    between = (truth[4][0] + truth[5][0]) / 2 if truth[4][0] < truth[5][0] else truth[5][0]

    found = rank(question, 1000, engines=LAUNCHED, slowest=between)

    assert figures(found.best) == [pytest.approx(one) for one in truth if one[0] <= between]
    assert found.rejected[walker.TOO_SLOW] > 0
    assert rank(question, 3, engines=LAUNCHED, slowest=truth[0][0] * 0.99).best == ()


def test_what_a_backend_refuses_is_not_ranked():
    question = asked(gpus=32)
    unsharded = Rule("no shards", "dp_shard", lambda case: case.layout.dp_shard == 1, lambda case: "", lambda case: "")

    found = rank(question, 3, engines=LAUNCHED, more_rules=lambda runtime: (unsharded,))

    assert found.best == () and found.rejected[f"{search.REFUSED}: no shards"] > 0
    assert rank(question, 3, engines=LAUNCHED, more_rules=lambda runtime: ()).best


DEAR = ("tensor and context groups on 4 GPUs", "experts on 8 GPUs", "pipelines on 8 GPUs")
"""A second each and more, of spaces that brute force looks at too."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in DEAR)) for name in SMALL])
def test_every_layout_is_accounted_for(name: str):
    question, engines = SMALL[name]
    layouts = list(layouts_of(question, engines))

    found = rank(question, 1, engines=engines)
    all_looked_at = rank(question, 10**6, engines=engines)

    assert found.considered == all_looked_at.considered == len(layouts)
    assert all_looked_at.pruned == 0
    assert len(truth_of(name)) + sum(all_looked_at.rejected.values()) == len(layouts)
    assert len(all_looked_at.best) == len(things(truth_of(name)))


# -- the space -----------------------------------------------------------------------------------------------------


def test_the_space_has_no_layout_twice():
    layouts = list(layouts_of(asked("llama-3.2-1b", gpus=4, batch=8)))
    assert len(layouts) == len(set(layouts))


def test_what_the_person_fixed_stays_fixed():
    question = asked(
        gpus=8, batch=8, micro_batch_size=2, recompute="full", reshard_after_forward=True, tp=2, sequence_parallel=False
    )
    layouts = list(layouts_of(question))

    assert layouts
    for layout in layouts:
        assert (layout.recompute, layout.tp, layout.micro_batch_size) == ("full", 2, 2)
        assert layout.reshard_after_forward and not layout.sequence_parallel
        assert layout.world_size == 8 and layout.global_batch_size == 8


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "hsdp", "zero1", "zero2", "zero3"])
def test_a_strategy_asked_for_alone_limits_the_space(strategy: str):

    question = msgspec.structs.replace(asked(gpus=8), strategy=strategy)

    assert {strategy_name(layout) for layout in layouts_of(question)} == {strategy}


@pytest.mark.slow
def test_every_layout_that_is_offered_keeps_every_rule_of_its_engine():
    question = asked(gpus=8, batch=16)
    found = rank(question, 30, engines=ENGINES)

    assert len(found.best) == 30
    for one in found.best:
        check(case_of(question, one.layout), engine_of(one.layout.engine).rules)


def test_when_nothing_fits_the_smallest_is_named():
    question = asked("70b", gpus=2)
    ranking = rank(question, engines=LAUNCHED)

    assert ranking.best == ()
    assert ranking.smallest is not None and ranking.smallest.micro_batch_size == 1
    others = [msgspec.structs.replace(ranking.smallest, recompute=name) for name in ("none", "attention", "full")]
    sizes = [memory_breakdown(case_of(question, layout)).device_bytes for layout in (ranking.smallest, *others)]
    assert sizes[0] == min(sizes)


def test_more_headroom_never_finds_a_faster_layout():
    tight = asked(batch=256)
    loose = msgspec.structs.replace(tight, headroom=0.4)

    best, careful = (rank(one, engines=LAUNCHED).best[0] for one in (tight, loose))

    assert careful.seconds_per_sequence >= best.seconds_per_sequence
    assert careful.device_bytes <= 0.6 * tight.cluster.gpu.memory_bytes


# -- bounds --------------------------------------------------------------------------------------------------------

MODELS = ("7b", "gpt2", "mixtral-8x7b", "deepseek-v2-lite", "deepseek-v3")


@cache
def legal_blocks(engine: str, model: str, batch: int | None) -> tuple[Question, list[Block]]:
    """Blocks of one engine's space on 32 GPUs, the rows that keep its rules."""
    question = asked(model, 32, batch)
    rules = [(rule.name, rule) for rule in engine_of(engine).rules]
    some = [blocks.legal(question, block, rules, Counter()) for block in blocks_of(question, (engine,))]
    return question, [block for block in some if block is not None]


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=8, deadline=None)
@given(st.data())
def test_no_layout_goes_below_its_bounds(engine: str, data: st.DataObject):
    question, some = legal_blocks(engine, data.draw(st.sampled_from(MODELS)), data.draw(st.sampled_from([None, 64])))
    if not some:
        return
    block = data.draw(st.sampled_from(some))
    rows = data.draw(st.lists(st.integers(0, block.size - 1), min_size=1, max_size=3, unique=True))
    columns = block.columns()
    memory = as_column(memory_bound(case_of(question, columns)), block.size)
    case = case_of(question, columns)
    seconds, serial = (as_column(one, block.size) for one in seconds_per_sequence(question, case))
    least = as_column(least_seconds(question, case), block.size)

    assert (least <= seconds).all() and (least <= serial).all() and (seconds <= serial * (1 + 1e-12)).all()
    for row in rows:
        layout: Layout = block.layout(row)
        exact = memory_breakdown(case_of(question, layout)).device_bytes
        assert memory[row] <= exact * (1 + 1e-12), layout
        exact_s, exact_serial = seconds_per_sequence(question, case_of(question, layout))
        assert seconds[row] <= exact_s * (1 + 1e-9) and serial[row] <= exact_serial * (1 + 1e-9), layout
        staged_s = LayoutFigures(question).least_seconds(layout, 0.0)  # a pipeline's last stage, which is cheaper
        assert staged_s <= exact_s * (1 + 1e-9) and staged_s <= exact_serial * (1 + 1e-9), layout


@pytest.mark.parametrize("engine", ["megatron", "torchtitan", "deepspeed-pipeline", "fsdp2"])
def test_the_cheap_bound_on_time_of_a_row_is_the_same_beside_any_others(engine: str) -> None:
    question, some = legal_blocks(engine, "deepseek-v2-lite", None)
    for block in some[::4]:
        least = as_column(least_seconds(question, case_of(question, block.columns())), block.size)
        for row in range(0, block.size, 1 + block.size // 3):
            alone = least_seconds(question, case_of(question, block.only([row]).columns()))
            assert float(as_column(alone, 1)[0]) == pytest.approx(least[row], rel=1e-12)


def test_bounds_asked_once_for_all_micro_batches_are_those_of_each_row() -> None:
    question, some = legal_blocks("torchtitan", "deepseek-v2-lite", None)
    shared = 0
    for block in some[::5]:
        few, place = block.splits()
        shared += block.size - few.size
        for row in range(0, block.size, 11):
            asked_of = msgspec.structs.replace(few.layout(int(place[row])), micro_batch_size=1)
            assert asked_of == msgspec.structs.replace(block.layout(row), micro_batch_size=1)
        case = case_of(question, block.columns())
        bound = as_column(memory_bound(case), block.size)
        kept = bound <= limit_bytes(question, case)
        bounded, _ = blocks.bounds(LayoutFigures(question), block, math.inf)
        assert bounded.memory.tolist() == bound[kept].tolist()
    assert shared


@pytest.mark.slow
def test_deepseek_v3_on_2048_gpus_is_settled_by_bounds_and_few_walks() -> None:
    """Of 4.6 million layouts 97 are walked; with stages of a pipeline taken as equal it was 12,000."""
    question = asked("deepseek-v3", 2048, None)

    found = rank(question, 3, engines=proposed(question), own_rules=(STRAY,))

    assert len(found.best) == 3 and found.considered > 4_000_000
    assert found.evaluated <= 100
    turned_away = sum(found.rejected.values())
    assert found.considered <= found.evaluated + found.pruned + turned_away <= found.considered + found.evaluated


def test_memorys_bound_of_a_stage_with_every_micro_batch_in_flight_counts_no_gradients_beside_them() -> None:
    question, some = legal_blocks("torchtitan", "7b", None)
    place = {"dp_replicate": 8, "dp_shard": 1, "cp": 2, "pp": 2, "tp": 1, "micro_batch_size": 1, "grad_accum": 2}
    met = 0
    for block in some:
        if block.template.recompute != "none" or block.template.reshard_after_forward:
            continue
        bound = as_column(memory_bound(case_of(question, block.columns())), block.size)
        for row, layout in enumerate(map(block.layout, range(block.size))):
            if all(getattr(layout, axis) == size for axis, size in place.items()):
                met += 1
                assert bound[row] <= memory_breakdown(case_of(question, layout)).device_bytes
    assert met
