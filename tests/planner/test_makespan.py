"""A pipeline step's seconds: the played schedule against a plain relaxation, known bubbles, and the bound below it.

Not here: the orders themselves (test_schedules.py).
"""

from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.basics.errors import PlannerError
from planner.parallelism.makespan import lower_bound_s, makespan_s, played
from planner.parallelism.pipeline import (
    SCHEDULES,
    ZERO_BUBBLE,
    actions,
    backward_sends,
    boundary_bytes,
    forward_sends,
    layers_beside_ends,
    micro_batches_match_megatron,
    micro_batches_match_torch,
    rank_of,
    stage_layers,
    stage_of,
    stages_fit,
    virtual_stages_divide,
    virtual_stages_match,
)

CHUNKS = {"interleaved": 2, "zb-v": 2}
SECONDS = st.floats(0.01, 3.0) | st.just(1.0)


def by_relaxation(
    schedule: str, forward: list[float], backward: list[float], m: int, v: int, p2p: float, share: float
) -> float:
    """End times pushed up until every action starts after its rank's previous one and after what it needs."""
    p, places = len(forward) // v, len(forward)
    orders = [
        [(one.kind, one.micro_batch, stage_of(schedule, p, rank, one.chunk)) for one in order]
        for rank, order in enumerate(actions(schedule, p, m, v))
    ]
    grad = "I" if any(kind == "I" for kind, _, _ in orders[0]) else "B"
    ends = {one: 0.0 for order in orders for one in order}
    changed = True
    while changed:
        changed = False
        for rank, order in enumerate(orders):
            now = 0.0
            for kind, batch, stage in order:
                needs = []
                if kind == "F" and stage > 0:
                    needs.append(("F", batch, stage - 1))
                elif kind == grad:
                    needs.append((grad, batch, stage + 1) if stage < places - 1 else ("F", batch, stage))
                elif kind == "W":
                    needs.append(("I", batch, stage))
                start = now
                for need in needs:
                    start = max(start, ends[need] + (p2p if rank_of(schedule, p, need[2]) != rank else 0.0))
                part = {"F": 0.0, "B": 1.0, "I": 1 - share, "W": share}[kind]
                now = start + (forward[stage] if kind == "F" else part * backward[stage])
                if now > ends[kind, batch, stage]:
                    ends[kind, batch, stage], changed = now, True
    return max(ends.values())


@st.composite
def shapes(draw: st.DrawFn) -> tuple[str, int, int, int]:
    """Schedule, p, m, v that some engine runs."""
    schedule = draw(st.sampled_from(SCHEDULES))
    p = draw(st.integers(1, 6))
    v = {"interleaved": draw(st.integers(2, 3)), "zb-v": 2}.get(schedule, 1)
    m = draw(st.integers(1, 3)) * p if schedule == "interleaved" else draw(st.integers(1, 14))
    return schedule, p, m, v


@settings(deadline=None, max_examples=80)
@given(shapes(), st.data())
def test_the_makespan_is_the_longest_path_through_the_schedule(shape, data):
    schedule, p, m, v = shape
    forward = data.draw(st.lists(SECONDS, min_size=p * v, max_size=p * v))
    backward = data.draw(st.lists(SECONDS, min_size=p * v, max_size=p * v))
    p2p, share = data.draw(st.sampled_from((0.0, 0.1, 2.0))), data.draw(st.sampled_from((0.5, 0.3)))

    played = makespan_s(schedule, forward, backward, m, v, p2p, share)

    assert played == pytest.approx(by_relaxation(schedule, forward, backward, m, v, p2p, share))


@settings(deadline=None, max_examples=40)
@given(shapes(), st.data())
def test_the_played_passes_end_with_the_makespan_and_wait_for_what_they_need(shape, data):
    schedule, p, m, v = shape
    forward = data.draw(st.lists(SECONDS, min_size=p * v, max_size=p * v))
    backward = data.draw(st.lists(SECONDS, min_size=p * v, max_size=p * v))
    p2p, share = data.draw(st.sampled_from((0.0, 0.1, 2.0))), data.draw(st.sampled_from((0.5, 0.3)))

    passes = played(schedule, forward, backward, m, v, p2p, share)

    assert max(one.end_s for one in passes) == makespan_s(schedule, forward, backward, m, v, p2p, share)
    for rank, order in enumerate(actions(schedule, p, m, v)):
        own = [one for one in passes if one.rank == rank]
        assert [(one.kind, one.micro_batch, one.chunk) for one in own] == list(order)
        assert all(one.end_s <= after.start_s for one, after in pairwise(own))
    ends = {(one.kind, one.micro_batch, one.stage): one for one in passes}
    for kind, micro_batch, stage in ends:
        source = ends.get((kind, micro_batch, {"F": stage - 1, "W": -1}.get(kind, stage + 1)))
        if source is not None:
            crosses = rank_of(schedule, p, source.stage) != rank_of(schedule, p, stage)
            one = ends[kind, micro_batch, stage]
            assert one.start_s >= source.end_s + p2p * crosses
            assert not crosses or one.needed_s == source.end_s + p2p


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(shapes(), st.data())
def test_the_lower_bound_is_never_above_the_makespan(shape, data):
    schedule, p, m, v = shape
    few = st.sampled_from(data.draw(st.lists(SECONDS, min_size=1, max_size=3)))  # equal stages stand beside others
    forward, backward = (data.draw(st.lists(few | SECONDS, min_size=p * v, max_size=p * v)) for _ in "fb")
    p2p, share = data.draw(st.sampled_from((0.0, 0.1, 2.0))), data.draw(st.sampled_from((0.5, 0.3, 0.8)))

    bound = lower_bound_s(schedule, forward, backward, m, v, p2p, share)

    assert bound <= makespan_s(schedule, forward, backward, m, v, p2p, share) * (1 + 1e-12)


@pytest.mark.parametrize(("schedule", "v"), [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_the_bound_is_near_where_layers_do_not_divide(schedule, v):
    """DeepSeek-V3's 61 layers, three of them light, on 4 to 16 ranks: a bound that took every stage as the shortest
    would be up to half of it."""
    for p in (4, 8, 16):
        layers = [0.4] * 3 + [1.0] * 58
        each, more = divmod(61, p * v)
        ends = [0]
        for place in range(p * v):
            ends.append(ends[-1] + each + (place < more))
        forward = [sum(layers[begin:end]) for begin, end in pairwise(ends)]
        forward[-1] += 0.8
        backward = [3 * one for one in forward]
        played = makespan_s(schedule, forward, backward, 4 * p, v, 0.01)
        assert 0.94 * played < lower_bound_s(schedule, forward, backward, 4 * p, v, 0.01) <= played * (1 + 1e-12)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("p", [1, 2, 4, 7])
def test_even_stages_idle_by_the_published_bubble_and_the_bound_is_exact(schedule, p):
    v, m = CHUNKS.get(schedule, 1), 3 * p
    step_s = makespan_s(schedule, [1 / v] * (p * v), [2 / v] * (p * v), m, v)

    # (p-1)/m: Huang et al. 2019; /v: Narayanan et al. 2021; thirds: Qi et al. 2023, with F = I = W.
    bubble = (p - 1) / m / v / (3 if schedule in ZERO_BUBBLE else 1)
    assert step_s == pytest.approx(3 * m * (1 + bubble))
    assert step_s == pytest.approx(lower_bound_s(schedule, [1 / v] * (p * v), [2 / v] * (p * v), m, v))


def test_the_bound_answers_alike_for_numbers_and_columns():
    draw = np.random.default_rng(0)
    rows = 20
    m, h = draw.integers(1, 40, rows), draw.random(rows)
    for schedule, p in product(SCHEDULES, range(1, 7)):
        v = CHUNKS.get(schedule, 1)
        kinds = draw.random((6, rows))
        forward, backward = ([kinds[k] for k in draw.integers(*three, p * v)] for three in ((0, 3), (3, 6)))
        column = lower_bound_s(schedule, forward, backward, m.astype(float), v, h)
        for at in range(rows):
            f, b = ([float(one[at]) for one in passes] for passes in (forward, backward))
            assert column[at] == pytest.approx(lower_bound_s(schedule, f, b, int(m[at]), v, float(h[at])), rel=1e-12)


def test_a_slow_send_costs_1f1b_every_micro_batch_but_gpipe_only_its_ramps():
    def extra(schedule: str) -> float:
        even = [1.0] * 4, [2.0] * 4, 32
        return makespan_s(schedule, *even, 1, 0.5) - makespan_s(schedule, *even)

    assert extra("gpipe") == pytest.approx(2 * 3 * 0.5)
    assert extra("1f1b") > 32 * 0.5 * 0.9


def test_moving_a_layer_off_the_stage_that_has_the_head_shortens_the_step():
    layers = stage_layers(32, 4), stage_layers(32, 4, (8, 9, 9, 6))
    head = 2.0

    even, moved = (
        makespan_s("1f1b", [*split[:3], split[3] + head], [2 * s for s in (*split[:3], split[3] + head)], 16)
        for split in layers
    )

    assert moved < even


def test_layers_are_dealt_evenly_and_the_first_stages_take_what_is_left():
    assert stage_layers(32, 4) == (8, 8, 8, 8)
    assert stage_layers(30, 4) == (8, 8, 7, 7)
    assert stage_layers(30, 4, (9, 8, 8, 5)) == (9, 8, 8, 5)


def test_embedding_and_head_may_count_as_a_layer_each() -> None:
    assert layers_beside_ends(126, 16) == (7, *[8] * 14, 7)  # Llama 3's 405B: 128 slots
    assert layers_beside_ends(70, 12) == (5, *[6] * 10, 5)  # BLOOM
    assert layers_beside_ends(61, 16) is None  # 63 slots do not divide
    assert layers_beside_ends(0, 2) is None  # no layer for the ends


@pytest.mark.parametrize(
    ("layers", "stages", "given_", "said"),
    [
        (32, 4, (8, 8, 8), "3 numbers for 4 stages. Try 8,8,8,8."),
        (32, 4, (8, 8, 8, 7), "they sum to 31, the model has 32 layers. Try 8,8,8,8."),
        (32, 4, (16, 16, 0, 0), "every stage needs a layer. Try 8,8,8,8."),
        (2, 4, None, "4 stages are more than the 2 layers. Use 2."),
        (2, 4, (1, 1, 1, 1), "they sum to 4, the model has 2 layers. Use pp=2 or less."),
    ],
)
def test_illegal_stages_are_refused_with_the_way_out(layers, stages, given_, said):
    with pytest.raises(PlannerError) as refused:
        stage_layers(layers, stages, given_)

    assert said in refused.value.sentence


def test_facts_of_the_rules_on_numbers_and_columns():
    v, m = np.array([1, 2, 3, 4, 8]), np.array([2, 4, 6, 8, 10])

    assert list(virtual_stages_divide(32, 4, v)) == [True, True, False, True, True]
    assert list(stages_fit(16, 4, v)) == [True, True, True, True, False]
    assert list(virtual_stages_match("zb-v", v)) == [False, True, False, False, False]
    assert list(virtual_stages_match("1f1b", v)) == [True, False, False, False, False]
    assert list(micro_batches_match_megatron("interleaved", 4, m)) == [False, True, False, True, False]
    assert list(micro_batches_match_torch("interleaved", 4, m)) == [True, True, True, True, True]
    assert not micro_batches_match_torch("interleaved", 4, 13)
    assert micro_batches_match_megatron("1f1b", 4, 2)
    assert not micro_batches_match_torch("1f1b", 4, 2)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_sends_are_counted_as_they_cross_ranks_in_the_schedule(schedule, p):
    v = CHUNKS.get(schedule, 1)
    homes = [rank_of(schedule, p, stage) for stage in range(p * v)]
    crossings = [(a, b) for a, b in pairwise(homes) if a != b]

    for rank in range(p):
        assert forward_sends(schedule, p, rank, v) == sum(a == rank for a, _ in crossings)
        assert backward_sends(schedule, p, rank, v) == sum(b == rank for _, b in crossings)


def test_a_boundary_carries_the_residual_stream_and_a_slice_of_it_with_sequence_parallelism():
    whole = boundary_bytes(1, 4096, 8192, 2, 1)

    assert whole == 64 * 2**20
    assert boundary_bytes(1, 4096, 8192, 2, 8) == whole / 8
