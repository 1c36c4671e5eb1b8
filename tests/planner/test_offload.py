"""Offload and second copies: the papers' tables, hand figures for each engine, conservation, rules, scalar = column."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from planner.ask.question import Question, case_of
from planner.basics.errors import PlannerError
from planner.engines import engine_of
from planner.figures.comm import comm_volume, traffic
from planner.figures.host import host_terms, offload_traffic, transfer_seconds, update_seconds
from planner.figures.memory import host_bytes, in_flight, memory_breakdown, moments_of, peak_bytes
from planner.figures.steptime import step_time
from planner.parallelism.case import Case
from planner.parallelism.offload import STEP_SHARE
from planner.parallelism.rule import check
from planner.parallelism.zero import state_bytes
from planner.spec import Layout, Link, Optimizer, TrainingJob, presets
from planner.spec.calibration import calibration

P = 6_738_415_616
"""Llama 2 7B."""
STATES = {"offload_optimizer": True, "offload_params": True}


def case(gpus: int = 8, model: str = "7b", cluster: str = "dgx-h100", optimizer: str = "adamw", **layout) -> Case:
    job = TrainingJob(optimizer=Optimizer(name=optimizer))
    return case_of(Question(presets.model(model), presets.cluster(cluster, gpus), job, calibration()), Layout(**layout))


def zero(stage: int, shards: int = 8, **layout) -> Case:
    return case(shards, engine="deepspeed", dp_shard=shards, zero_stage=stage, **layout)


def fsdp(**layout) -> Case:
    return case(engine="fsdp2", dp_shard=8, zero_stage=3, **layout)


def terms(one: Case, phase: str = "forward") -> dict[str, float]:
    return next(found.terms for found in memory_breakdown(one).phases if found.phase == phase)


def test_zero_offload_keeps_2_bytes_of_weights_on_the_device_and_14_on_the_hosts():
    """Ren et al. 2021, table 1, last row: 16M becomes 2M (8x less), and 14M are on hosts."""
    each = state_bytes("bf16", Optimizer(), separate_master=True)

    assert (each.weight, each.grad + each.optimizer) == (2, 14)


def test_deepspeed_stage_2_keeps_weights_on_the_device_and_18_bytes_an_element_on_hosts():
    one = zero(2, offload_optimizer=True)
    device, host = terms(one), memory_breakdown(one).host
    largest = 32000 * 4096

    assert device["params"] == pytest.approx(2 * P, rel=1e-6)
    assert device["optimizer"] == device["grads"] == 0
    assert host["optimizer"] == pytest.approx(12 * P / 8, rel=1e-6)
    assert host["grads"] == pytest.approx(4 * P / 8, rel=1e-6)
    assert host["buckets"] == pytest.approx(2 * P / 8 + 2 * largest, rel=1e-6)


def test_without_accumulation_stage_2_moves_fp32_gradients_out_and_16_bit_weights_in():
    backward, step = offload_traffic(zero(2, offload_optimizer=True))

    assert (backward.phase, step.phase) == ("backward", "optimizer")
    assert backward.to_host_bytes == pytest.approx(4 * P / 8, rel=1e-6)
    assert backward.to_device_bytes == 0
    assert step.to_device_bytes == pytest.approx(2 * P / 8, rel=1e-6)
    assert not step.overlappable


def test_accumulated_gradients_of_stage_2_wait_on_the_host_those_of_stage_1_on_the_device():
    assert terms(zero(2, offload_optimizer=True, grad_accum=4), "forward.next")["grads"] == 0
    assert terms(zero(1, offload_optimizer=True, grad_accum=4), "forward.next")["grads"] == 2 * P


def test_stage_3_with_weights_offloaded_leaves_only_what_is_gathered_and_buckets():
    device = terms(zero(3, **STATES))
    forward = next(one for one in offload_traffic(zero(3, grad_accum=2, **STATES)) if one.phase == "forward")

    assert device["params"] == device["optimizer"] == device["grads"] == 0
    assert device["gathered"] > 0
    assert memory_breakdown(zero(3, **STATES)).host["params"] == pytest.approx(2 * P / 8, rel=1e-6)
    assert forward.to_device_bytes == pytest.approx(2 * 2 * P / 8, rel=1e-6)


def test_fsdp2_offload_moves_16_fp32_bytes_an_element_to_the_host_and_fetches_shards_for_every_gather():
    one = fsdp(grad_accum=3, sync_each_micro_batch=True, **STATES)
    host = memory_breakdown(one).host
    tail = 4 * (32000 * 4096 + 4096)
    forward, backward = offload_traffic(one)

    assert host["params"] == host["grads"] == pytest.approx(4 * P / 8)
    assert host["optimizer"] == pytest.approx(8 * P / 8)
    assert forward.to_device_bytes == pytest.approx(3 * 4 * P / 8)
    assert backward.to_device_bytes == pytest.approx(3 * (4 * P - tail) / 8)
    assert backward.to_host_bytes == pytest.approx(3 * 4 * P / 8)
    assert terms(one, "optimizer") == dict.fromkeys(terms(one, "optimizer"), 0.0)


def test_fsdp2_without_reduction_each_micro_batch_still_holds_whole_gradients_on_the_device():
    assert terms(fsdp(grad_accum=2, **STATES), "forward.next")["grads"] == pytest.approx(2 * P, rel=1e-6)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_offloaded_activations_and_those_left_are_all_there_were(recompute: str):
    """At the loss every layer but the last has gone: device and host together hold what the device held alone."""
    alone, spared = fsdp(recompute=recompute), fsdp(recompute=recompute, offload_activations=True)

    def at_the_loss(one: Case) -> float:
        held = [moment for _, _, moment in moments_of(one) if moment is not None and moment.unit == "loss"]
        return max(float(sum(size.at(1, 2048) for size in moment.live)) for moment in held)

    away = float(host_terms(spared)["activations"])
    assert away > 0
    assert at_the_loss(spared) + away == pytest.approx(at_the_loss(alone))


def test_under_full_recompute_31_of_32_layer_inputs_leave_and_come_back_each_micro_batch():
    layer_input = 2 * 2048 * 4096
    forward, backward = offload_traffic(fsdp(recompute="full", offload_activations=True, grad_accum=4))

    assert forward.to_host_bytes == backward.to_device_bytes == 4 * 31 * layer_input
    assert memory_breakdown(fsdp(recompute="full", offload_activations=True)).host == {"activations": 31 * layer_input}


def test_activations_on_the_device_do_not_grow_with_the_layers():
    def activations(layers: int) -> float:
        one = fsdp(offload_activations=True)
        deeper = Case(msgspec.structs.replace(one.model, layers=layers), one.job, one.layout, one.cluster, one.runtime)
        return terms(deeper, "backward")["activations"]

    assert activations(64) == pytest.approx(activations(16))


def test_a_nodes_host_memory_is_checked_and_unknown_memory_is_said_to_be_unknown():
    def fits(memory: float | None) -> bool | None:
        one = zero(2, offload_optimizer=True)
        cluster = msgspec.structs.replace(one.cluster, host_memory_bytes=memory)
        return memory_breakdown(Case(one.model, one.job, one.layout, cluster, one.runtime)).host_fits

    needed = memory_breakdown(zero(2, offload_optimizer=True)).host_node_bytes
    assert needed == pytest.approx(8 * memory_breakdown(zero(2, offload_optimizer=True)).host_bytes)
    assert (fits(None), fits(needed), fits(needed - 1)) == (None, True, False)
    assert memory_breakdown(zero(2)).host_fits is True


def test_times_follow_from_the_hosts_facts_and_are_unknown_without_them():
    one = zero(2, offload_optimizer=True)
    step = offload_traffic(one)[-1]
    cluster = msgspec.structs.replace(
        one.cluster,
        host_link=Link(name="slot", bytes_per_s_per_direction=25e9, latency_s=0.0),
        host_memory_bytes_per_s=400e9,
    )
    known = Case(one.model, one.job, one.layout, cluster, one.runtime)
    bare = msgspec.structs.replace(cluster, host_link=None, host_memory_bytes_per_s=None)
    unknown = Case(one.model, one.job, one.layout, bare, one.runtime)

    assert transfer_seconds(known, step) == pytest.approx(2 * P / 8 / 25e9, rel=1e-6)
    # master and moments read and written, gradient read, 16-bit copy written: 30 bytes, eight ranks on one memory
    assert update_seconds(known) == pytest.approx(30 * P / 8 / (STEP_SHARE * 400e9 / 8), rel=1e-6)
    assert transfer_seconds(unknown, step) is None
    assert update_seconds(unknown) is None


@pytest.mark.parametrize(
    ("model", "gpu", "gpus", "seconds", "tolerance"),
    [
        ("qwen2.5-3b", "a100-sxm-40gb", 2, 2.38, 0.15),  # deepspeedai/DeepSpeed pull request 7474, cores bound
        ("qwen2.5-3b", "a100-sxm-40gb", 2, 3.08, 0.31),  # the same, not bound
        ("llama-2-7b", "a100-sxm-80gb", 4, 7.0, 0.4),  # DeepSpeed's blog on ZenFlow: from 0.5 s to "over 7"
    ],
)
def test_steps_with_the_optimizer_on_the_host_that_others_published(
    model: str, gpu: str, gpus: int, seconds: float, tolerance: float
):
    """On none of which the share of the host's rate was taken; sequences are not stated, and cost a tenth at most."""
    layout = {
        "engine": "deepspeed",
        "dp_shard": gpus,
        "zero_stage": 2,
        "micro_batch_size": 1,
        "offload_optimizer": True,
    }
    one = case(gpus, model=model, cluster=gpu, recompute="full", **layout)
    there = msgspec.structs.replace(one.cluster, nodes=1, gpus_per_node=gpus)

    time = step_time(msgspec.structs.replace(one, cluster=there), calibration())

    assert time.step_s == pytest.approx(seconds, rel=tolerance)
    assert time.optimizer_s > time.compute_s


def test_what_cpu_processes_offload_stays_in_their_one_memory():
    """The code runs as on GPUs: DeepSpeed's buffers come on top, FSDP2's copies are the tensors themselves."""

    def on_cpu(**layout) -> Case:
        return case(4, cluster="localhost", model="tiny", dp_shard=4, **layout)

    zero2 = on_cpu(engine="deepspeed", zero_stage=2, offload_optimizer=True, grad_accum=2)
    gpus = case(4, model="tiny", dp_shard=4, engine="deepspeed", zero_stage=2, offload_optimizer=True, grad_accum=2)
    device, host = terms(gpus), memory_breakdown(gpus).host
    fsdp2 = {"engine": "fsdp2", "zero_stage": 3, "grad_accum": 2}

    assert {term: terms(zero2)[term] - device[term] for term in host} == pytest.approx(host)
    assert terms(on_cpu(**fsdp2, **STATES), "backward.next") == terms(on_cpu(**fsdp2), "backward.next")
    for one in (zero2, on_cpu(**fsdp2, **STATES)):
        check(one, [rule for rule in engine_of(one.layout.engine).rules if rule.field != "seq_len"])
        assert memory_breakdown(one).host == {}
        assert not offload_traffic(one)


def test_hpz_holds_a_second_copy_of_2p_over_its_group_and_lets_it_go_for_the_step():
    plain, copied = zero(3, 32), zero(3, 32, zero_secondary_shard=8)

    assert terms(copied)["params"] - terms(plain)["params"] == pytest.approx(2 * P / 8, rel=1e-6)
    assert terms(copied, "backward")["params"] == terms(copied)["params"]
    assert terms(copied, "optimizer") == terms(plain, "optimizer")


def test_hpz_sends_two_thirds_across_nodes_as_zero_plus_plus_says():
    """Wang et al. 2023, table 1: forward M, backward 0 instead of M, gradients M."""

    def inter(one: Case) -> dict[tuple[str, str], float]:
        sent = traffic(one, engine_of("deepspeed").ideal(one))
        return {(call.op, call.phase): float(call.inter_bytes) for call in sent}

    plain, copied = inter(zero(3, 32)), inter(zero(3, 32, zero_secondary_shard=8))
    assert copied["all_gather", "backward"] == 0 < plain["all_gather", "backward"]
    assert sum(copied.values()) == pytest.approx(2 / 3 * sum(plain.values()))


def test_only_the_first_forward_of_a_step_gathers_over_all_ranks_under_hpz():
    calls = comm_volume(zero(3, 32, zero_secondary_shard=8, grad_accum=4)).engine
    gathers = {(one.group, one.phase): one for one in calls if one.op == "all_gather"}

    assert gathers["dp_secondary", "forward"].count == 3 * gathers["dp_shard", "forward"].count
    assert ("dp_shard", "backward") not in gathers
    assert gathers["dp_secondary", "backward"].link == "NVLink 4"


@pytest.mark.parametrize(
    ("one", "sentence"),
    [
        (case(engine="ddp", dp_replicate=8, offload_optimizer=True), "ddp engine keeps nothing in host memory"),
        (case(engine="nanotron", dp_replicate=8, offload_activations=True), "engine ddp, deepspeed, fsdp2 or single"),
        (case(engine="megatron", dp_replicate=8, offload_optimizer=True), "megatron engine keeps nothing"),
        (case(engine="nanotron", dp_replicate=8, zero_secondary_shard=4), "at stage 3"),
        (fsdp(offload_optimizer=True), "weights, gradients and optimizer together"),
        (fsdp(offload_params=True), "weights, gradients and optimizer together"),
        (zero(2, **STATES), "every rank computes with its own whole weights"),
        (zero(2, zero_secondary_shard=4), "DeepSpeed's, at stage 3"),
        (fsdp(zero_secondary_shard=4), "DeepSpeed's, at stage 3"),
        (zero(3, zero_secondary_shard=3), r"Try zero_secondary_shard=[24]"),
        (zero(3, zero_secondary_shard=4, **STATES), "second copy would be in host memory"),
        (case(optimizer="sgd", engine="deepspeed", dp_shard=8, zero_stage=2, offload_optimizer=True), "has no sgd"),
        (
            case(optimizer="adamw-8bit", engine="fsdp2", dp_shard=8, zero_stage=3, **STATES),
            "kernels for GPUs",
        ),
        (
            case(2, "tiny", "localhost", engine="fsdp2", dp_shard=2, zero_stage=3, offload_activations=True),
            "in host memory already",
        ),
    ],
)  # fmt: skip
def test_what_an_engine_does_not_offload_is_refused_with_a_way_out(one: Case, sentence: str):
    with pytest.raises(PlannerError, match=sentence):
        check(one, engine_of(one.layout.engine).rules)


@pytest.mark.parametrize(
    "layout",
    [
        {"engine": "deepspeed", "zero_stage": 2, "offload_optimizer": True},
        {"engine": "deepspeed", "zero_stage": 1, "offload_optimizer": True},
        {"engine": "deepspeed", "zero_stage": 3, **STATES},
        {"engine": "deepspeed", "zero_stage": 3, "zero_secondary_shard": 2},
        {"engine": "fsdp2", "zero_stage": 3, **STATES},
        {"engine": "fsdp2", "zero_stage": 3, "recompute": "full", "offload_activations": True},
    ],
)
def test_scalar_is_column(layout: dict[str, object]):
    rows = [(2, 1, 1), (4, 2, 3), (8, 1, 2), (8, 4, 1)]
    single = [
        case(shards, dp_shard=shards, micro_batch_size=batch, grad_accum=accum, **layout)
        for shards, batch, accum in rows
    ]
    shards, batch, accum = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
    first = single[-1]
    numbers = {"dp_shard": shards, "micro_batch_size": batch, "grad_accum": accum}
    column = Case(
        first.model, first.job, msgspec.structs.replace(first.layout, **numbers), first.cluster, first.runtime
    )

    assert np.allclose(host_bytes(column) + np.zeros(4), [host_bytes(one) for one in single])
    assert np.allclose(peak_bytes(column), [peak_bytes(one) for one in single])
    for place, transfer in enumerate(offload_traffic(column)):
        for part in ("to_host_bytes", "to_device_bytes"):
            expected = [getattr(offload_traffic(one)[place], part) for one in single]
            assert np.allclose(getattr(transfer, part) + np.zeros(4), expected), (transfer.phase, part)
    assert in_flight(first) == 1
