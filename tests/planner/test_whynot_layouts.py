"""The layout that a part of one names: what else follows from it, worked out by hand on 8 GPUs.

Not here: what is said of it (test_recommend.py).
"""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from planner.ask.options import question
from planner.decide.whynot import _layout
from planner.spec import Layout

ASKED = question({"model": "llama-3.2-1b", "gpus": "8", "global_batch_size": "64"})
BASE = Layout(engine="fsdp2", dp_shard=8, zero_stage=3, micro_batch_size=2, grad_accum=4)


@pytest.mark.parametrize(
    ("named", "follows"),
    [
        ({}, {}),
        ({"recompute": "full"}, {"recompute": "full"}),
        ({"micro_batch_size": 4}, {"micro_batch_size": 4, "grad_accum": 2}),
        ({"grad_accum": 8}, {"grad_accum": 8, "micro_batch_size": 1}),
        ({"grad_accum": 8, "micro_batch_size": 2}, {"grad_accum": 8}),  # both are named: another batch
        ({"micro_batch_size": 16}, {"micro_batch_size": 16, "grad_accum": 4}),  # 128 sequences in one pass
        ({"tp": 2}, {"tp": 2, "dp_shard": 4, "grad_accum": 8}),
        ({"tp": 8}, {"tp": 8, "dp_shard": 1, "grad_accum": 32}),
        ({"tp": 16}, {"tp": 16, "dp_shard": 1, "grad_accum": 32}),  # more than there are: a rule says so
        ({"dp_replicate": 2}, {"dp_replicate": 2, "dp_shard": 4}),
        ({"dp_shard": 4}, {"dp_replicate": 2, "dp_shard": 4}),
        ({"dp_replicate": 4, "dp_shard": 4}, {"dp_replicate": 4, "dp_shard": 4, "grad_accum": 2}),
        ({"engine": "ddp"}, {"engine": "ddp", "zero_stage": 0, "dp_replicate": 8, "dp_shard": 1}),
        ({"engine": "deepspeed", "zero_stage": 1}, {"engine": "deepspeed", "zero_stage": 1}),
    ],
    ids=str,
)
def test_what_is_not_named_makes_up_the_gpus_and_the_batch(named: dict[str, Any], follows: dict[str, Any]) -> None:
    assert _layout(ASKED, BASE, named) == replace(BASE, **follows)


def test_without_a_batch_the_passes_stay() -> None:
    free = replace(ASKED, job=replace(ASKED.job, global_batch_size=None))

    assert _layout(free, BASE, {"tp": 2}) == replace(BASE, tp=2, dp_shard=4)


def test_copies_stay_as_they_are_where_they_divide_what_is_left() -> None:
    hybrid = replace(BASE, dp_replicate=2, dp_shard=4)

    assert _layout(ASKED, hybrid, {"tp": 2}) == replace(hybrid, tp=2, dp_shard=2, grad_accum=8)
    assert _layout(ASKED, hybrid, {"tp": 8}) == replace(hybrid, tp=8, dp_replicate=1, dp_shard=1, grad_accum=32)
