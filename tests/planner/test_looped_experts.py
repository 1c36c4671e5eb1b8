"""Claims about experts that run one after the other: no time, the reason for it, and the last place."""

from __future__ import annotations

import math

import pytest

from planner.ask.options import question
from planner.decide.answers import Constraints
from planner.decide.candidates import seconds_per_sequence
from planner.decide.recommendation import recommend
from planner.decide.strategies import answer
from planner.spec.engines import ENGINES, engines_with

LOOPED = engines_with(lambda facts: facts.loops_experts)
LAYOUT = {
    "deepspeed": {"zero_stage": "3", "dp_shard": "16"},
    "deepspeed-ulysses": {"zero_stage": "3", "dp_shard": "8", "cp": "2"},
    "fsdp1": {"dp_shard": "16"},
    "fsdp2": {"dp_shard": "16"},
    "torchtitan": {"dp_shard": "16"},
    "megatron": {"zero_stage": "1", "dp_shard": "16"},
}
ASKED = {
    "gpu": "a800-sxm-80gb", "gpus": "16", "seq_len": "8192", "micro_batch_size": "1", "recompute": "full",
    "method": "full",
}  # fmt: skip


@pytest.mark.parametrize("model", ["qwen3-30b-a3b", "mixtral-8x7b", "qwen3-8b"])
@pytest.mark.parametrize("engine", LAYOUT)
def test_a_loop_of_experts_has_no_time_and_says_why(engine: str, model: str) -> None:
    asked = question(ASKED | LAYOUT[engine] | {"model": model, "runtime": ENGINES[engine].runtime})

    (one,) = answer(asked).estimates

    looped = engine in LOOPED and one.case.model.moe is not None
    assert (one.time.step_s is None) == looped
    assert any("experts one after the other" in reason for reason in one.reasons) == looped
    assert math.isinf(seconds_per_sequence(asked, one.case)[0]) == looped


def test_no_layout_with_a_loop_of_experts_is_ranked_before_one_with_a_time() -> None:
    asked = question(ASKED | {"model": "qwen3-30b-a3b", "global_batch_size": "16"})

    found = recommend(asked, 5, Constraints(any_runtime=True)).estimates

    timed = [one.time.step_s is not None for one in found]
    assert timed == sorted(timed, reverse=True) and timed[0]
