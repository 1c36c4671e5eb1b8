"""Claims about the dial: a turn keeps the GPUs and the held batch, its way back is the layout before, and a layout's
options ask for it again.

Not here: what a page does with it (tests/web/test_page.py).
"""

from __future__ import annotations

from random import Random
from typing import Any

import msgspec
import pytest

from planner.basics.errors import PlannerError
from planner.decide.answers import Estimate
from planner.decide.estimate_json import estimate_dict
from planner.spec import Layout
from planner.studies.dial import AXES, MICRO, TURNED, exact_options, turned
from planner.views.face import change_text
from planner.views.library import estimate

STARTS: tuple[dict[str, Any], ...] = (
    {"model": "70b", "gpus": 64, "runtime": "megatron-core", "tp": 4, "pp": 4, "dp_shard": 4, "zero_stage": 1,
     "micro_batch_size": 1, "grad_accum": 16},
    {"model": "mixtral-8x7b", "gpus": 32, "runtime": "megatron-core", "tp": 2, "pp": 2, "dp_shard": 8, "ep": 4,
     "zero_stage": 1, "micro_batch_size": 2, "grad_accum": 8},
    {"model": "8b", "gpus": 16, "runtime": "accelerate-fsdp2", "dp_shard": 16, "zero_stage": 3, "micro_batch_size": 2,
     "grad_accum": 2},
    {"model": "7b", "gpus": 24, "runtime": "torchtitan", "tp": 2, "dp_shard": 12, "zero_stage": 3,
     "micro_batch_size": 1, "grad_accum": 6},
)  # fmt: skip
TURNS = 20


def sizes(layout: Layout) -> dict[str, Any]:
    names = (*AXES, MICRO, "grad_accum", "virtual_stages")
    return {name: getattr(layout, name) for name in names}


def walked(seed: int, turns: int) -> list[tuple[Estimate, Estimate, dict[str, Any]]]:
    """Legal turns drawn by a seed, from a start on: the estimates before and after each, and the options after it."""
    draw = Random(seed)
    given = dict(draw.choice(STARTS))
    now, found = estimate(**given).estimates[0], []
    for _ in range(turns):
        try:
            layout = turned(now.case.layout, draw.choice(TURNED), up=draw.random() < 0.5)
            asked = exact_options({**given, **sizes(layout)}, now) | sizes(layout)
            after = estimate(**asked).estimates[0]
        except PlannerError as error:
            assert "\n" not in error.sentence
            continue
        found.append((now, after, asked))
        now, given = after, asked
    return found


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 13))])
def test_turns_keep_gpus_and_batch_and_say_what_two_estimates_differ_by(seed: int) -> None:
    turns = walked(seed, TURNS)
    assert turns

    for before, after, asked in turns:
        one, other = before.case.layout, after.case.layout
        assert other.world_size == one.world_size
        assert other.global_batch_size == one.global_batch_size
        told = change_text(before, after)
        assert told.partition(":")[0] == ", ".join(
            f"{name} {getattr(one, name)} to {getattr(other, name)}"
            for name in (*AXES, MICRO, "grad_accum")
            if getattr(one, name) != getattr(other, name)
        )
        again = estimate(**asked).estimates[0]
        assert msgspec.json.encode(estimate_dict(again)) == msgspec.json.encode(estimate_dict(after))


@pytest.mark.parametrize("name", ["tp", "pp", "cp"])
def test_a_turn_and_its_way_back_are_the_layout_before(name: str) -> None:
    layout = estimate(**STARTS[0]).estimates[0].case.layout

    there = turned(layout, name, up=True)

    assert getattr(there, name) == 2 * getattr(layout, name)
    assert (there.dp_shard, there.grad_accum) == (layout.dp_shard // 2, layout.grad_accum * 2)
    assert turned(there, name, up=False) == layout


def test_a_batch_that_is_let_go_changes_with_the_ranks() -> None:
    layout = estimate(**STARTS[0]).estimates[0].case.layout

    assert turned(layout, "tp", up=True, held=False).global_batch_size == layout.global_batch_size // 2
    assert turned(layout, MICRO, up=True, held=False).global_batch_size == layout.global_batch_size * 2


@pytest.mark.parametrize(
    ("given", "name", "up", "rule"),
    [
        (STARTS[2], "tp", False, "has no factor to move"),
        (STARTS[2], "dp_replicate", False, "has no factor to move"),
        (STARTS[3] | {"grad_accum": 1}, MICRO, True, "does not divide the 1 sequences"),
        (STARTS[3] | {"grad_accum": 1, "gpus": 8, "dp_shard": 4}, "tp", False, "does not divide the batch of 4"),
    ],
)
def test_a_turn_without_a_factor_is_refused(given: dict[str, Any], name: str, up: bool, rule: str) -> None:
    layout = estimate(**given).estimates[0].case.layout

    with pytest.raises(PlannerError, match=rule):
        turned(layout, name, up=up)
