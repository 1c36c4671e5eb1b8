"""Where a verdict on a run turns, on both sides of each border, in numbers of its own.

Not here: the words of it (test_stragglers.py, test_verdict.py).
"""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec.structs import replace
from test_rundir import make_plan

from executor.run.prepare import RunOptions, as_run
from executor.watch.stragglers import StepTimes, find, sentence
from planner.spec import Layout, Recipe, TrainingJob
from planner.spec.plan import PhaseMemory, Prediction

DDP = make_plan(Layout(engine="ddp", dp_replicate=4))


def stragglers(turns: list[StepTimes]) -> list[str]:
    return [one.kind for one in find(DDP, turns, ["a", "a", "b", "b"])]


def turns(last: list[float], usual: float = 1.0, step_s: float | None = None) -> list[StepTimes]:
    """Steps in which three ranks are busy for `usual`, the last one for what is given; the first is not looked at."""
    each = [usual, *last]
    return [StepTimes(step, step_s or max(usual, busy), [usual] * 3 + [busy]) for step, busy in enumerate(each)]


@pytest.mark.parametrize(
    ("busy", "found"),
    [
        ([1.16] * 8, ["slow"]),
        ([1.16] * 7, []),  # eight steps at least
        ([1.15] * 8, []),  # more than 15 %
        ([1.16] * 6 + [1.0] * 2, ["slow"]),
        ([1.16] * 5 + [1.0] * 3, []),  # three of four steps
    ],
)
def test_slow_is_over_15_percent_in_three_of_four_of_eight_steps(busy: list[float], found: list[str]) -> None:
    assert stragglers(turns(busy)) == found


@pytest.mark.parametrize(("step_s", "found"), [(3.9, ["slow"]), (4.1, [])])
def test_a_slow_rank_costs_a_twentieth_of_the_step(step_s: float, found: list[str]) -> None:
    assert stragglers(turns([1.2] * 8, step_s=step_s)) == found


@pytest.mark.parametrize(
    ("usual", "busy", "found"),
    [
        (1.0, 3.01, ["stalled"]),
        (1.0, 2.95, []),  # thrice its own median
        (0.4, 1.41, ["stalled"]),
        (0.4, 1.35, []),  # and a second longer
    ],
)
def test_a_stall_is_thrice_as_long_and_a_second_longer(usual: float, busy: float, found: list[str]) -> None:
    assert stragglers(turns([usual] * 7 + [busy], usual=usual)) == found


@pytest.mark.parametrize(("mine", "found"), [(3.2, ["stalled"]), (3.1, [])])
def test_a_stall_is_half_as_long_again_as_the_others_in_their_own_measure(mine: float, found: list[str]) -> None:
    steps = turns([1.0] * 8)
    assert stragglers([*steps, StepTimes(9, mine, [2.1, 2.1, 2.1, mine])]) == found


def test_stalls_in_over_a_quarter_of_the_steps_are_none_and_five_are_listed() -> None:
    six = find(DDP, turns([4.0] * 6 + [1.0] * 18), ["a", "a", "b", "b"])
    seven = stragglers(turns([4.0] * 7 + [1.0] * 17))

    assert seven == []
    (one,) = six
    assert (one.lost_s, one.busy_s, one.usual_s, one.steps, one.of) == (18.0, 4.0, 1.0, 6, 24)
    assert one.at == (2, 3, 4, 5, 6, 7)
    assert "stalled 6 times, at steps 2, 3, 4, 5, 6, ...: busy" in sentence(one)


# -- the plan as it is run -----------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("steps", "expected"), [(None, (100, 10)), (50, (50, 10)), (10, (10, 10)), (3, (3, 3)), (200, (200, 10))]
)
def test_fewer_steps_have_no_longer_warm_up(steps: int | None, expected: tuple[int, int], tmp_path: Path) -> None:
    plan = make_plan(Layout(engine="ddp", dp_replicate=2), job=TrainingJob(recipe=Recipe(steps=100, warmup_steps=10)))

    run = as_run(plan, RunOptions(run_dir=tmp_path, nodes=1, steps=steps), print)

    assert (run.job.recipe.steps, run.job.recipe.warmup_steps) == expected
    assert run.content_hash == run.sealed().content_hash


def test_on_other_nodes_predicted_times_are_left_out_and_bytes_stay(tmp_path: Path) -> None:
    said: list[str] = []
    known = Prediction(step_s=1.0, tokens_per_s=2.0, memory=(PhaseMemory(phase="load", terms={"params": 1.0}),))
    plan = replace(make_plan(Layout(engine="ddp", dp_replicate=2)), prediction=known)

    two = as_run(plan, RunOptions(run_dir=tmp_path, nodes=2), said.append)
    fake = as_run(plan, RunOptions(run_dir=tmp_path, nodes=2, fake_world=True), said.append)
    same = as_run(plan, RunOptions(run_dir=tmp_path, nodes=1), said.append)

    assert (two.cluster.nodes, two.cluster.gpus_per_node) == (2, 1)
    assert (two.prediction.step_s, two.prediction.tokens_per_s, two.prediction.memory) == (None, None, known.memory)
    assert fake.prediction == same.prediction == known
    assert fake.cluster == same.cluster == plan.cluster
    assert len(said) == 1 and "planned for 1 node(s), run on 2" in said[0]
