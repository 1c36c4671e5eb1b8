"""What engines move over the host link under offload, and whose host memory they take.

DeepSpeed moves the optimizer's states, its gradients and its step to the host (ZeRO-Offload), at stage 3 the weights'
shards too if asked; FSDP2's CPUOffloadPolicy moves shards, gradients and optimizer together. Read in deepspeed 0.19.8
(runtime/zero/stage_1_and_2.py, stage3.py) and torch 2.13 (distributed/fsdp/_fully_shard); bytes held are measured on
CPU processes, what crosses a link is not. Not here: activations (memory.py), bytes (each engine's own file).
"""

from __future__ import annotations

from planner.basics.arith import Number, in_shape_of, where
from planner.engines import deepspeed, deepspeed_common, deepspeed_stage3, deepspeed_ulysses, engine_of, fsdp2
from planner.engines.base import Held
from planner.engines.common import moments
from planner.parallelism.case import Case
from planner.parallelism.offload import Transfer


def host_states(case: Case) -> Held:
    """Bytes of one rank in host memory by term; empty when no states are offloaded, or the host's memory is the
    device's, where the engines count them."""
    if not case.host_apart:
        return {}
    return engine_of(case.layout.engine).host(case)


def _zero(case: Case) -> Case:
    """The case as ZeRO sees it, which shards over ranks that share sequences too."""
    return deepspeed_ulysses.zero(case) if case.layout.engine == "deepspeed-ulysses" else case


def state_transfers(case: Case) -> list[Transfer]:
    """What one rank moves in one optimizer step, by phase; empty when no states are offloaded or nothing lies between
    host and device."""
    layout = case.layout
    if not (layout.offload_optimizer or layout.offload_params) or not case.host_apart:
        return []
    if layout.engine in ("fsdp1", "fsdp2"):
        return _fsdp2_transfers(case)
    return _stage3_transfers(_zero(case)) if layout.zero_stage == 3 else _stage12_transfers(_zero(case))


def update_accesses_bytes(case: Case) -> Number:
    """Bytes that the host reads and writes in one optimizer step: weights, gradients and moments read, weights and
    moments written, and DeepSpeed's 16-bit copy of the new weights."""
    if not case.layout.offload_optimizer:
        return 0.0
    if case.layout.engine in ("fsdp1", "fsdp2"):
        return 3 * fsdp2.trained_shards(case) + 2 * moments(case, sharded=True)
    states, elements = deepspeed_common.states(case), deepspeed.updated_elements(_zero(case))
    return 2 * deepspeed_common.optimizer_bytes(case, elements) + elements * (states.master + states.weight)


def _stage12_transfers(case: Case) -> list[Transfer]:
    """Gradients leave in the master's format after the last micro-batch; where the host accumulates, each reduction
    also fetches the sum so far and puts it back; the new weights come in 16 bit."""
    each, partition, accum = (
        deepspeed_common.states(case),
        deepspeed.partition_elements(case),
        case.layout.grad_accum,
    )
    whole = deepspeed_common.touching_elements(case) * each.weight
    adds = deepspeed.accumulates_on_host(case)
    put, fetched = (where(accum > 1, accum, 0), accum - 1) if adds else (accum * 0, accum * 0)
    return [
        Transfer("backward", partition * each.master + whole * put, whole * fetched, True),
        Transfer("optimizer", in_shape_of(partition), partition * each.weight, False),
    ]


def _stage3_transfers(case: Case) -> list[Transfer]:
    """Each micro-batch puts its reduced gradients into the host's buffer and reads them back, the last one also in the
    master's format; shards in host memory are fetched for every gather."""
    layout, each = case.layout, deepspeed_common.states(case)
    accum, trained = layout.grad_accum, deepspeed_stage3.shard_elements(case, trainable=True)
    nothing, shards = in_shape_of(trained), deepspeed_stage3.shard_elements(case)
    fetched = shards * each.weight * accum if layout.offload_params else nothing
    out = trained * (each.grad * accum + each.master) if layout.offload_optimizer else nothing
    sums = trained * each.grad * accum if layout.offload_optimizer else nothing
    new = trained * each.weight
    crosses_at_step = layout.offload_optimizer != layout.offload_params
    step = Transfer(
        "optimizer",
        new if crosses_at_step and layout.offload_params else in_shape_of(new),
        new if crosses_at_step and layout.offload_optimizer else in_shape_of(new),
        False,
    )
    return [
        Transfer("forward", nothing, fetched, True),
        Transfer("backward", out, sums + fetched, True),
        step,
    ]


def _fsdp2_transfers(case: Case) -> list[Transfer]:
    """Every gather fetches the unit's shard as stored (it is cast on the device); reduced gradients leave in the
    weights' format. The tail is gathered once a micro-batch."""
    layout, accum = case.layout, case.layout.grad_accum
    shards = fsdp2.weight_shards(case)
    again = shards - fsdp2.unit_weight_shards(case, "tail") if layout.reshard_after_forward else in_shape_of(shards)
    reductions = accum if layout.sync_each_micro_batch else accum * 0 + 1
    grads = fsdp2.trained_shards(case) * reductions
    return [
        Transfer("forward", in_shape_of(shards), shards * accum, True),
        Transfer("backward", grads, again * accum, True),
    ]
