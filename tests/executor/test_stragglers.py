"""Who is a straggler by the busy times of all ranks, and who is none. Real ranks are in tests/cluster."""

from __future__ import annotations

import random

import pytest
from test_rundir import make_plan

from executor.watch.stragglers import LEAST_STEPS, SLOW, StepTimes, Straggler, find, sentence
from planner.spec import Layout
from planner.spec.plan import Plan

HOSTS = ["a", "a", "b", "b"]
DDP = make_plan(Layout(engine="ddp", dp_replicate=4))
PIPELINE = make_plan(Layout(engine="deepspeed-pipeline", pp=2, dp_shard=2, zero_stage=1))


def looked_at(*busy: list[float], plan: Plan = DDP, **given: object) -> tuple[Straggler, ...]:
    """Of steps whose time is that of the slowest rank."""
    turns = [StepTimes(step, max(one), one) for step, one in enumerate(busy)]
    return find(plan, turns, HOSTS, **given)


def noisy(*factors: float, steps: int = 40) -> list[list[float]]:
    """Steps of 0.3 s that vary by a fifth, together and each rank for itself."""
    chance = random.Random(7)
    return [
        [0.3 * chance.uniform(0.8, 1.2) ** 0.5 * factor * chance.uniform(0.9, 1.1) for factor in factors]
        for _ in range(steps)
    ]


def test_even_ranks_with_chance_in_their_times_are_none():
    assert looked_at(*noisy(1, 1, 1, 1)) == ()
    assert looked_at(*noisy(1, 1, 1, 1.04)) == ()


def test_a_rank_that_is_slow_in_most_steps_is_named_with_what_it_costs():
    (found,) = looked_at(*noisy(1, 1, 1.5, 1))

    assert (found.rank, found.host, found.kind, found.of) == (2, "b", "slow", 39)
    assert found.lost_s == pytest.approx(0.15, rel=0.2) and found.steps >= 30
    said = sentence(found)
    assert said.startswith("rank 2 on b is slow in ") and " of 39 steps: busy for " in said


def test_slow_needs_the_steps_the_factor_and_a_cost():
    slow = [0.3, 0.3, 0.3, 0.3 * SLOW + 0.01]
    assert looked_at(*[slow] * LEAST_STEPS) == ()  # the first step is not looked at
    assert len(looked_at(*[slow] * (LEAST_STEPS + 1))) == 1
    assert looked_at(*[[0.3, 0.3, 0.3, 0.3 * SLOW - 0.01]] * 20) == ()
    assert looked_at(*[slow, [0.3] * 4] * 20) == ()  # every other step
    waits = [StepTimes(step, 9.0, slow) for step in range(20)]
    assert find(DDP, waits, HOSTS) == ()  # the step is spent elsewhere


def test_stages_of_a_pipeline_are_compared_with_themselves():
    even = [[0.5, 0.5, 0.2, 0.2]] * 20
    assert looked_at(*even, plan=PIPELINE) == ()
    assert [one.rank for one in looked_at(*[[0.5, 0.5, 0.2, 0.3]] * 20, plan=PIPELINE)] == [3]
    alone = make_plan(Layout(engine="deepspeed-pipeline", pp=4, zero_stage=1))
    assert looked_at(*[[0.5, 0.4, 0.3, 0.2]] * 20, plan=alone) == ()  # nobody does the same


def test_a_single_stall_is_told_with_its_step_and_one_of_all_ranks_is_none():
    steps = noisy(1, 1, 1, 1)
    steps[6][1] += 2.5
    steps[20] = [one + 5 for one in steps[20]]  # rows that are longer, or all ranks measured

    (found,) = looked_at(*steps)
    assert (found.rank, found.kind, found.at, found.steps) == (1, "stalled", (7,), 1)
    assert found.lost_s == pytest.approx(2.5, rel=0.1) and sentence(found).startswith(
        "rank 1 on a stalled once, at step 7:"
    )
    steps[9][1] += 4
    assert sentence(looked_at(*steps)[0]).startswith("rank 1 on a stalled 2 times, at steps 7, 10: busy for 4.")
    assert looked_at(*steps, firsts={0, 6, 9}) == ()  # where another start went on


def test_small_stalls_and_ranks_that_say_nothing_are_none():
    steps = noisy(1, 1, 1, 1)
    steps[6][1] += 0.9
    assert looked_at(*steps) == ()
    assert looked_at(*[[0.0, 0.0, 0.0, 9.0]] * 20) == ()
    assert looked_at(*[[0.3, 0.9]] * 20) == ()  # of another world
