"""What engines keep in host memory under offload, and what they move over the host link.

DeepSpeed moves the optimizer's states, its gradients and its step to the host (ZeRO-Offload), at stage 3 the weights'
shards too if asked; FSDP2's CPUOffloadPolicy moves shards, gradients and optimizer together. Read in deepspeed 0.19.8
(runtime/zero/stage_1_and_2.py, stage3.py) and torch 2.13 (distributed/fsdp/_fully_shard); not measured. Not here:
activations (memory.py), what stays on the device (each engine's own file).
"""

from __future__ import annotations

import msgspec

from planner.arith import Number, where
from planner.case import Case
from planner.engines import deepspeed, fsdp2
from planner.engines.base import Held
from planner.engines.common import moments, optimizer_temporaries, trained_states
from planner.parallelism.offload import Transfer


def host_states(case: Case) -> Held:
    """Bytes of one rank in host memory by term; empty when no states are offloaded."""
    layout = case.layout
    if not (layout.offload_optimizer or layout.offload_params):
        return {}
    if layout.engine == "fsdp2":
        return _fsdp2_host(case)
    return _stage3_host(case) if layout.zero_stage == 3 else _stage12_host(case)


def state_transfers(case: Case) -> list[Transfer]:
    """What one rank moves in one optimizer step, by phase; empty when no states are offloaded."""
    layout = case.layout
    if not (layout.offload_optimizer or layout.offload_params):
        return []
    if layout.engine == "fsdp2":
        return _fsdp2_transfers(case)
    return _stage3_transfers(case) if layout.zero_stage == 3 else _stage12_transfers(case)


def update_accesses_bytes(case: Case) -> Number:
    """Bytes that the host reads and writes in one optimizer step: weights, gradients and moments read, weights and
    moments written, and DeepSpeed's 16-bit copy of the new weights."""
    if not case.layout.offload_optimizer:
        return 0.0
    if case.layout.engine == "fsdp2":
        each = trained_states(case)
        return fsdp2.trained_shards(case, 2 * each.weight + each.grad) + 2 * moments(case, sharded=True)
    states, elements = deepspeed.states(case), deepspeed_elements(case)
    return 2 * deepspeed.optimizer_bytes(case, elements) + elements * (states.master + states.weight)


def deepspeed_elements(case: Case) -> Number:
    """Elements whose optimizer states a rank has under DeepSpeed."""
    if case.layout.zero_stage == 3:
        return deepspeed.shard_elements(case, trainable=True)
    return deepspeed.partition_elements(case)


def _stage12_host(case: Case) -> Held:
    """Master, moments, a gradient in the master's format, the 16-bit copy that is uploaded, a buffer of one weight;
    accumulation keeps the gradients of every weight that touches the partition, whole."""
    each, partition = deepspeed.states(case), deepspeed.partition_elements(case)
    accumulated = where(case.layout.grad_accum > 1, deepspeed.touching_elements(case) * each.weight, 0.0)
    return {
        "optimizer": deepspeed.optimizer_bytes(case, partition),
        "grads": partition * each.master + accumulated,
        "buckets": partition * each.weight + deepspeed.largest_trained(case) * each.weight,
    }


def _stage12_transfers(case: Case) -> list[Transfer]:
    """Gradients leave in the master's format after the last micro-batch; with accumulation each reduction also fetches
    the sum so far and puts it back (stage 1 reduces once a step); the new weights come in 16 bit."""
    each, partition, accum = deepspeed.states(case), deepspeed.partition_elements(case), case.layout.grad_accum
    whole = deepspeed.touching_elements(case) * each.weight
    once = where(accum > 1, 1, 0)
    put, fetched = (once * accum, accum - 1) if case.layout.zero_stage == 2 else (once, once)
    return [
        Transfer("backward", partition * each.master + whole * put, whole * fetched, True),
        Transfer("optimizer", 0.0 * partition, partition * each.weight, False),
    ]


def _stage3_host(case: Case) -> Held:
    each, trained = deepspeed.states(case), deepspeed.shard_elements(case, trainable=True)
    held: Held = {}
    if case.layout.offload_params:
        held["params"] = deepspeed.shard_elements(case) * each.weight
    if case.layout.offload_optimizer:
        held["optimizer"] = deepspeed.optimizer_bytes(case, trained)
        held["grads"] = trained * (each.grad + each.master)  # as reduced, and in the master's format for the step
    return held


def _stage3_transfers(case: Case) -> list[Transfer]:
    """Each micro-batch puts its reduced gradients into the host's buffer and reads them back, the last one also in the
    master's format; shards in host memory are fetched for every gather."""
    layout, each = case.layout, deepspeed.states(case)
    accum, trained = layout.grad_accum, deepspeed.shard_elements(case, trainable=True)
    fetched = deepspeed.shard_elements(case) * each.weight * accum if layout.offload_params else 0.0 * trained
    out = trained * (each.grad * accum + each.master) if layout.offload_optimizer else 0.0 * trained
    sums = trained * each.grad * accum if layout.offload_optimizer else 0.0 * trained
    new = trained * each.weight
    crosses_at_step = layout.offload_optimizer != layout.offload_params
    step = Transfer(
        "optimizer",
        new if crosses_at_step and layout.offload_params else 0.0 * new,
        new if crosses_at_step and layout.offload_optimizer else 0.0 * new,
        False,
    )
    return [
        Transfer("forward", 0.0 * trained, fetched, True),
        Transfer("backward", out, sums + fetched, True),
        step,
    ]


def _fsdp2_host(case: Case) -> Held:
    """Shards, their gradients and moments, and the temporaries of the optimizer's step, all as stored."""
    each = trained_states(case)
    on_host = msgspec.structs.replace(case.cluster, gpu=msgspec.structs.replace(case.cluster.gpu, kind="cpu"))
    stepping = Case(case.model, case.job, case.layout, on_host, case.runtime, case.stage)
    return {
        "params": fsdp2.weight_shards(case),
        "grads": fsdp2.trained_shards(case, each.grad),
        "optimizer": moments(case, sharded=True),
        "temporaries": optimizer_temporaries(stepping, each.weight, sharded=True),
    }


def _fsdp2_transfers(case: Case) -> list[Transfer]:
    """Every gather fetches the unit's shard as stored (it is cast on the device); reduced gradients leave in the
    weights' format. The tail is gathered once a micro-batch."""
    layout, accum = case.layout, case.layout.grad_accum
    shards = fsdp2.weight_shards(case)
    again = shards - fsdp2.unit_weight_shards(case, "tail") if layout.reshard_after_forward else 0.0 * shards
    reductions = accum if layout.sync_each_micro_batch else accum * 0 + 1
    grads = fsdp2.trained_shards(case, trained_states(case).grad) * reductions
    return [
        Transfer("forward", 0.0 * shards, shards * accum, True),
        Transfer("backward", grads, again * accum, True),
    ]
