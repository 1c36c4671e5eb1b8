"""The first FSDP: its root, its flat gradients, and who is ever offered it. Rows of real runs are in tests/truth."""

from __future__ import annotations

import msgspec
import pytest

from planner.ask import options
from planner.ask.question import usual_runtime
from planner.decide.recommendation import Constraints, recommend
from planner.decide.space import spaces
from planner.engines import engine_of
from planner.figures.memory import memory_breakdown
from planner.inventory import Moment
from planner.parallelism.case import Case
from planner.spec import Layout, Lora, TrainingJob, presets

MODEL = presets.model("llama-2-7b")
TABLE = 2 * 32000 * 4096
"""Elements of the embedding, and of the head."""
BLOCK = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
"""Elements of a layer."""
RANK = 8
ADAPTERS = 2 * 2 * RANK * 4096
"""Elements of A and B on queries and values of a layer."""
SHARDED = Layout(engine="fsdp1", zero_stage=3, dp_shard=2, recompute="full", micro_batch_size=1)


def phases(layout: Layout, *, lora: bool, own_units: bool = False) -> dict[str, dict[str, float]]:
    """Terms at the fullest moment of each phase, everything in 16 bits."""
    adapters = Lora(rank=RANK, upcast_adapters=False) if lora else None
    job = TrainingJob(method="lora" if lora else "full", lora=adapters, precision="pure-bf16", seq_len=512)
    runtime = msgspec.structs.replace(usual_runtime("fsdp1"), adapter_units=own_units)
    found = memory_breakdown(Case(MODEL, job, layout, presets.cluster("dgx-h100"), runtime))
    return {phase.phase: phase.terms for phase in found.phases}


def test_the_root_stays_gathered_and_backward_has_two_layers_beside_it() -> None:
    found = phases(SHARDED, lora=False)

    assert found["forward"]["gathered"] == pytest.approx(2 * (TABLE + BLOCK), rel=1e-4)
    assert found["backward"]["gathered"] == pytest.approx(2 * (TABLE + 2 * BLOCK), rel=1e-4)


@pytest.mark.parametrize(("own_units", "elements"), [(False, BLOCK + ADAPTERS), (True, ADAPTERS)])
def test_one_trained_weight_makes_a_gradient_of_the_whole_flat_parameter(own_units: bool, elements: int) -> None:
    """And accumulation keeps 32 of them, unless adapters are units of their own."""
    waiting = phases(msgspec.structs.replace(SHARDED, grad_accum=2), lora=True, own_units=own_units)["forward.next"]

    assert waiting["grads"] == pytest.approx(2 * 32 * elements, rel=1e-4)


def test_gradients_that_are_reduced_every_time_are_shards() -> None:
    layout = msgspec.structs.replace(SHARDED, grad_accum=2, sync_each_micro_batch=True)

    assert phases(layout, lora=False)["forward.next"]["grads"] == pytest.approx(TABLE + 32 * BLOCK, rel=1e-3)


def test_a_superseded_engine_is_predicted_where_it_is_named_and_proposed_to_nobody() -> None:
    asked = {"model": "7b", "gpus": "8"}

    assert "fsdp1" not in {facts.name for facts in spaces(options.question(asked))}
    assert [facts.name for facts in spaces(options.question(asked | {"runtime": "pytorch-fsdp1"}))] == ["fsdp1"]
    named = recommend(options.question(asked | {"runtime": "pytorch-fsdp1"}), 3, Constraints(any_runtime=True))
    assert 0 < named.considered < recommend(options.question(asked), 3, Constraints(any_runtime=True)).considered


@pytest.mark.parametrize(("later", "flat_gradients"), [(False, 1 + 1), (True, 32 - 1 + 1)])
def test_whole_gradients_of_earlier_micro_batches_become_shards_layer_by_layer(
    later: bool, flat_gradients: int
) -> None:
    """In the second layer of backward: of the first one's gradient a shard is left in the last micro-batch."""
    job = TrainingJob(precision="pure-bf16", seq_len=512)
    layout = msgspec.structs.replace(SHARDED, grad_accum=2)
    held = engine_of("fsdp1").holder(Case(MODEL, job, layout, presets.cluster("dgx-h100"), usual_runtime("fsdp1")))

    grads = held(Moment("backward", "layer", 30, (), 0, 0, begun=True), later)["grads"]

    root, shard = TABLE * later, 0.5 * later
    assert grads == pytest.approx(2 * (root + (flat_gradients + shard) * BLOCK), rel=1e-3)
