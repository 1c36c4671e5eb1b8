"""Muon beside AdamW, by hand: what DTensors send for it, and its states in DeepSpeed's flat partition.

tiny-llama: 4 layers of 128 hidden, 2 of 4 heads of 32 for keys and values, 352 wide, 512 words.
"""

from __future__ import annotations

import pytest

from planner.ask.question import usual_runtime
from planner.engines import deepspeed_common, engine_of
from planner.parallelism.case import Case
from planner.spec import Layout, Optimizer, TrainingJob, presets

QUERY, KEY, GATED, DOWN = 128 * 128, 64 * 128, 352 * 128, 128 * 352
MATRICES = 4 * (2 * QUERY + 2 * KEY + 2 * GATED + DOWN)
OTHERS = 2 * 512 * 128 + 9 * 128
"""Embedding, head and norms."""


def case(engine: str, **layout: int) -> Case:
    job = TrainingJob(precision="bf16", seq_len=128, optimizer=Optimizer(name="muon"))
    cluster = presets.cluster("dgx-h100")
    return Case(presets.model("tiny-llama"), job, Layout(engine=engine, **layout), cluster, usual_runtime(engine))


def test_a_tall_matrix_reduces_its_gram_matrix_twice_and_any_other_is_gathered_twice() -> None:
    """Five times a layer, in bf16; a matrix that is not tall gathers its Gram matrix too."""
    calls = engine_of("fsdp2").collectives(case("fsdp2", dp_shard=2, zero_stage=3))
    sent = {call.op: (call.count, call.payload_bytes) for call in calls if call.unit == "muon"}

    gathered = 2 * (2 * QUERY + 128**2) + 2 * (2 * KEY + 64**2) + (2 * DOWN + 128**2)
    assert sent == {
        "all_reduce": (4 * 5 * 2 * 2, 2 * 4 * 5 * 2 * (2 * 128**2)),
        "all_gather": (4 * 5 * 5 * 3, 2 * 4 * 5 * gathered),
    }


@pytest.mark.parametrize("shards", [2, 8])
def test_deepspeed_keeps_a_momentum_of_matrices_and_two_moments_of_the_rest(shards: int) -> None:
    """fp32 masters of all, the matrices' momentum in 16 bits as gradients wait, two fp32 moments of everything else."""
    asked = case("deepspeed", dp_shard=shards, zero_stage=2)
    elements = (MATRICES + OTHERS) / shards
    waiting = deepspeed_common.states(asked).grad

    assert deepspeed_common.left_to_adamw(asked) == pytest.approx(OTHERS / (MATRICES + OTHERS))
    assert deepspeed_common.optimizer_bytes(asked, elements) == pytest.approx(
        (4 * (MATRICES + OTHERS) + waiting * MATRICES + 8 * OTHERS) / shards
    )
