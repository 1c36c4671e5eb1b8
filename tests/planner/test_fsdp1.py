"""The first FSDP: its root, its flat gradients, and who is ever offered it. Rows of real runs are in tests/truth."""

from __future__ import annotations

import msgspec
import pytest

from planner.ask import options
from planner.ask.question import usual_runtime
from planner.basics.errors import PlannerError
from planner.decide.answers import Constraints
from planner.decide.recommendation import recommend
from planner.decide.space import spaces
from planner.decide.strategies import answer
from planner.engines import engine_of
from planner.figures.allocator import bytes_beside
from planner.figures.host import host_terms
from planner.figures.memory import memory_breakdown
from planner.inventory import Moment
from planner.parallelism.case import Case
from planner.spec import Layout, Lora, TrainingJob, presets
from planner.spec.job import Method, Precision

MODEL = presets.model("llama-2-7b")
TABLE = 2 * 32000 * 4096
"""Elements of the embedding, and of the head."""
BLOCK = 4 * 4096**2 + 3 * 4096 * 11008 + 2 * 4096
"""Elements of a layer."""
RANK = 8
ADAPTERS = 2 * 2 * RANK * 4096
"""Elements of A and B on queries and values of a layer."""
SHARDED = Layout(engine="fsdp1", zero_stage=3, dp_shard=2, recompute="full", micro_batch_size=1)


def case(
    layout: Layout, *, lora: bool = False, own_units: bool = False, precision: Precision = "pure-bf16", seq: int = 512
) -> Case:
    """Llama 2 7B, full training or adapters on queries and values, in 16 bits unless told."""
    adapters = Lora(rank=RANK, upcast_adapters=False) if lora else None
    job = TrainingJob(method="lora" if lora else "full", lora=adapters, precision=precision, seq_len=seq)
    runtime = msgspec.structs.replace(usual_runtime("fsdp1"), adapter_units=own_units)
    return Case(MODEL, job, layout, presets.cluster("dgx-h100"), runtime)


def phases(layout: Layout, *, lora: bool, own_units: bool = False) -> dict[str, dict[str, float]]:
    """Terms at the fullest moment of each phase, everything in 16 bits."""
    found = memory_breakdown(case(layout, lora=lora, own_units=own_units))
    return {phase.phase: phase.terms for phase in found.phases}


def changed(**fields: object) -> Layout:
    """The sharded layout with other fields."""
    return msgspec.structs.replace(SHARDED, **fields)


def test_the_root_stays_gathered_and_backward_has_two_layers_beside_it() -> None:
    found = phases(SHARDED, lora=False)

    assert found["forward"]["gathered"] == pytest.approx(2 * (TABLE + BLOCK), rel=1e-4)
    assert found["backward"]["gathered"] == pytest.approx(2 * (TABLE + 2 * BLOCK), rel=1e-4)


@pytest.mark.parametrize(("own_units", "elements"), [(False, BLOCK + ADAPTERS), (True, ADAPTERS)])
def test_one_trained_weight_makes_a_gradient_of_the_whole_flat_parameter(own_units: bool, elements: int) -> None:
    """And accumulation keeps 32 of them, unless adapters are units of their own."""
    waiting = phases(msgspec.structs.replace(SHARDED, grad_accum=2), lora=True, own_units=own_units)["forward.next"]

    assert waiting["grads"] == pytest.approx(2 * 32 * elements, rel=1e-4)


@pytest.mark.parametrize("runtime", ["pytorch-fsdp1", "peft-fsdp1", "fsdp-qlora"])
@pytest.mark.parametrize("accum", [1, 2])
@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_frozen_weights_have_no_gradients_where_peft_wraps_adapters_apart(
    runtime: str, accum: int, method: Method
) -> None:
    """Transformers' Trainer does so for every model with adapters: torch refuses flat parameters of both kinds."""
    job = TrainingJob(method=method, lora=Lora(rank=RANK), seq_len=512)
    asked = Case(MODEL, job, changed(grad_accum=accum), presets.cluster("dgx-h100"), presets.runtime(runtime))

    grads = max(phase.terms["grads"] for phase in memory_breakdown(asked).phases)

    assert 0 < grads <= 4 * 32 * ADAPTERS


def test_without_adapters_it_is_the_same_whether_they_would_have_units_of_their_own() -> None:
    calls = [engine_of("fsdp1").collectives(case(SHARDED, own_units=own_units)) for own_units in (False, True)]

    assert calls[0] == calls[1]


def test_software_that_loads_frozen_weights_in_fp32_holds_them_twice_as_wide_but_in_4_bits() -> None:
    held = {
        (runtime, method): memory_breakdown(
            Case(
                MODEL,
                TrainingJob(method=method, lora=Lora(rank=RANK), seq_len=512),
                SHARDED,
                presets.cluster("dgx-h100"),
                presets.runtime(runtime),
            )
        ).phases[-1].terms["params"]
        for runtime in ("pytorch-fsdp1", "peft-fsdp1")
        for method in ("lora", "qlora")
    }  # fmt: skip

    assert held["peft-fsdp1", "lora"] - held["pytorch-fsdp1", "lora"] == pytest.approx(TABLE + 32 * BLOCK, rel=1e-3)
    assert held["peft-fsdp1", "qlora"] == held["pytorch-fsdp1", "qlora"]


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
    head = 32000 * 4096  # whole: it waits for the embedding's
    assert grads == pytest.approx(2 * (root + head + (flat_gradients + shard) * BLOCK), rel=1e-3)


def test_under_no_shard_nothing_is_gathered_and_gradients_stay_whole() -> None:
    found = phases(changed(zero_stage=0, dp_shard=1, dp_replicate=2), lora=False)

    whole = 2 * (TABLE + 32 * BLOCK)
    assert found["backward"]["params"] == pytest.approx(whole, rel=1e-4)
    assert found["backward"]["gathered"] == 0
    assert found["optimizer"]["grads"] == pytest.approx(whole, rel=1e-4)
    assert found["load"]["temporaries"] == pytest.approx(2 * TABLE, rel=1e-4)  # the root's flat copy


def test_under_no_shard_wide_weights_are_cast_unit_by_unit() -> None:
    found = memory_breakdown(case(changed(zero_stage=0, dp_shard=1, dp_replicate=2), precision="bf16"))

    forward = next(one.terms for one in found.phases if one.phase == "forward")
    assert forward["params"] == pytest.approx(4 * (TABLE + 32 * BLOCK), rel=1e-4)
    assert forward["gathered"] == pytest.approx(2 * (TABLE + BLOCK), rel=1e-4)


def test_under_shard_grad_op_layers_stay_gathered_until_their_backward() -> None:
    found = phases(changed(reshard_after_forward=False), lora=False)
    held = engine_of("fsdp1").holder(case(changed(reshard_after_forward=False)))

    assert found["forward"]["gathered"] == pytest.approx(2 * (TABLE + 32 * BLOCK), rel=1e-4)
    middle = held(Moment("backward", "layer", 15, (), 0, 0), False)["gathered"]
    assert middle == pytest.approx(2 * (TABLE + 16 * BLOCK), rel=1e-4)


def test_under_shard_grad_op_no_sync_keeps_every_layer_gathered() -> None:
    held = engine_of("fsdp1").holder(case(changed(reshard_after_forward=False, grad_accum=2)))

    first = held(Moment("backward", "layer", 0, (), 0, 0), False)["gathered"]
    assert first == pytest.approx(2 * (TABLE + 32 * BLOCK), rel=1e-4)


def test_hybrid_shards_hold_what_shards_hold_and_reduce_once_more() -> None:
    hybrid = case(changed(dp_replicate=2))
    reduced = [call for call in engine_of("fsdp1").collectives(hybrid) if call.op == "all_reduce"]

    assert memory_breakdown(hybrid).phases == memory_breakdown(case(SHARDED)).phases
    assert sum(call.payload_bytes for call in reduced) == pytest.approx(2 * (TABLE + 32 * BLOCK) / 2, rel=1e-3)


def sent(
    layout: Layout, *, lora: bool = False, own_units: bool = False
) -> dict[tuple[str, str, str], tuple[int, float]]:
    """(calls, elements) of a step by operation, unit and phase, everything in 16 bits."""
    calls = engine_of("fsdp1").collectives(case(layout, lora=lora, own_units=own_units))
    return {(one.op, one.unit, one.phase): (one.count, round(one.payload_bytes / 2)) for one in calls}


NORM = 4096
"""Elements of the last norm, which the root joins with embedding and head."""


def test_the_root_is_one_flat_parameter_that_is_gathered_once() -> None:
    assert sent(changed(grad_accum=3)) == {
        ("all_gather", "root", "forward"): (3, 3 * (TABLE + NORM)),
        ("reduce_scatter", "root", "backward"): (1, TABLE + NORM),
        ("all_gather", "layer", "forward"): (3 * 32, 3 * 32 * BLOCK),
        ("all_gather", "layer", "backward"): (3 * 32, 3 * 32 * BLOCK),
        ("reduce_scatter", "layer", "backward"): (32, 32 * BLOCK),
    }


@pytest.mark.parametrize(("own_units", "units", "reduced"), [(False, 1, BLOCK + ADAPTERS), (True, 4, ADAPTERS)])
def test_frozen_elements_of_a_flat_parameter_are_reduced_too(own_units: bool, units: int, reduced: int) -> None:
    """But where A and B on queries and values are four flat parameters of their own; a frozen root has no gradient."""
    found = sent(SHARDED, lora=True, own_units=own_units)

    assert found["reduce_scatter", "layer", "backward"] == (32 * units, 32 * reduced)
    assert ("reduce_scatter", "root", "backward") not in found
    assert found["all_gather", "layer", "forward"] == (32 * (5 if own_units else 1), 32 * (BLOCK + ADAPTERS))


def test_what_no_sync_keeps_gathered_is_gathered_once_a_step() -> None:
    found = sent(changed(reshard_after_forward=False, grad_accum=3))

    assert found["all_gather", "layer", "forward"] == (32, 32 * BLOCK)
    assert found["all_gather", "root", "forward"] == (1, TABLE + NORM)
    assert ("all_gather", "layer", "backward") not in found


def test_no_shard_sends_gradients_alone() -> None:
    calls = engine_of("fsdp1").collectives(case(changed(zero_stage=0, dp_shard=1, dp_replicate=2)))

    assert {call.op for call in calls} == {"all_reduce"}
    assert sum(call.payload_bytes for call in calls) == pytest.approx(2 * (TABLE + 32 * BLOCK), rel=1e-4)


def test_offloaded_shards_are_on_the_host_and_reduced_gradients_on_both_until_backward_ends() -> None:
    offloaded = changed(offload_params=True, offload_optimizer=True)
    found = phases(offloaded, lora=False)
    held = engine_of("fsdp1").holder(case(offloaded))

    assert found["optimizer"] == dict.fromkeys(found["optimizer"], 0.0)
    assert found["backward"]["params"] == 0
    last = held(Moment("backward", "embed", -1, (), 0, 0), False)["grads"]
    head = 2 * 32000 * 4096  # whole: it waits for the embedding's
    assert last == pytest.approx(head + 2 * 32 * BLOCK / 2, rel=1e-3)
    assert host_terms(case(offloaded), 1.0)["params"] == pytest.approx(2 * (TABLE + 32 * BLOCK) / 2, rel=1e-3)


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"offload_params": True}, "FSDP offloads weights and optimizer together"),
        (
            {"dp_shard": 1, "dp_replicate": 2, "offload_params": True, "offload_optimizer": True},
            "FSDP1 offloads shards",
        ),
        (
            {"offload_params": True, "offload_optimizer": True, "grad_accum": 2, "sync_each_micro_batch": True},
            "FSDP1 adds up on the device",
        ),
    ],
)
def test_what_offload_cannot_do_is_refused(fields: dict[str, object], rule: str) -> None:
    asked = case(changed(**fields))

    assert rule in {one.name for one in engine_of("fsdp1").rules if not one.holds(asked)}


def test_frozen_elements_of_a_flat_parameter_have_gradient_shards_too() -> None:
    found = phases(changed(dp_shard=4), lora=True)

    assert found["optimizer"]["grads"] == pytest.approx(2 * 32 * (BLOCK + ADAPTERS) / 4, rel=1e-3)


def test_gathers_have_memory_of_their_own_beside_what_wrapping_took() -> None:
    """A layer more than backward uses; and while training is small, the root as it came and its flat copy."""
    small, large = case(SHARDED, lora=True, own_units=True), case(changed(micro_batch_size=64), lora=True)

    peak = memory_breakdown(small).peak.total
    loaded = 2 * (TABLE + 32 * BLOCK) / 2 + 2 * 2 * TABLE
    adapters = 32 * ADAPTERS
    shards, small_states = 2 * adapters / 2, 3 * 2 * adapters / 2
    gathers = 2 * (TABLE + 2 * BLOCK)
    assert peak + bytes_beside(small, peak) == pytest.approx(loaded + shards + small_states + gathers, rel=1e-3)
    assert bytes_beside(large, memory_breakdown(large).peak.total) == pytest.approx(2 * BLOCK, rel=1e-2)


def test_one_device_is_no_shard_and_what_leaves_no_size_is_refused_by_its_rule() -> None:
    """torch turns to NO_SHARD by itself where there is one rank (_init_core_state)."""
    asked = {"model": "llama-3.2-1b", "gpus": "1", "runtime": "pytorch-fsdp1"}

    (alone,) = answer(options.question(asked)).estimates

    assert (alone.case.layout.dp_replicate, alone.case.layout.dp_shard) == (1, 1)
    assert alone.memory.phases[0].terms["temporaries"] == pytest.approx(4 * 128256 * 2048, rel=1e-3)  # the root's copy
    with pytest.raises(PlannerError, match="does not split tp"):
        answer(options.question(asked | {"tp": "2"}))


def test_a_block_of_16_bit_logits_is_left_where_the_output_is_fp32() -> None:
    plain = case(SHARDED)
    kernels = msgspec.structs.replace(plain.runtime.parts, loss="shifted-fp32")
    shifted = msgspec.structs.replace(plain, runtime=msgspec.structs.replace(plain.runtime, parts=kernels))

    assert bytes_beside(shifted, 1e12) - bytes_beside(plain, 1e12) == 2 * 512 * 32000
