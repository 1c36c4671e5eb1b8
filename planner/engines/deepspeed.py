"""DeepSpeed ZeRO-1, 2 and 3: flat partitions, contiguous reduce buckets, a master copy of the weights.

Gradients are averaged by all-reduce of whole buckets at stages 1 and 2 (DeepSpeed's default on every transport), at
the end of backward at stage 1 and whenever a bucket is full at stage 2; stage 3 reduce-scatters, and gathers every
weight tensor for itself when its module runs. Read in deepspeed 0.19.8, runtime/zero/stage_1_and_2.py and stage3.py,
and measured there. Not here: the ideal (parallelism/zero.py).
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from typing import Any

from planner import optimizers
from planner.arith import Number, by_value, ceil_div, is_column, maximum, where
from planner.case import LAYERS, UNITS, Case
from planner.engines.base import Call, Held, Holder
from planner.engines.buckets import allgather_bucket_elements, reduce_bucket_elements
from planner.engines.common import (
    layer_form,
    packed,
    parallel_compute,
    sent_elements,
    stored_weight_bytes,
    unpacked_model_bytes,
    weights_are_columns,
)
from planner.engines.ddp import finished_elements
from planner.engines.deepspeed_rules import BUCKETS, NO_REPLICAS
from planner.engines.zero3_fetch import Codes, Fetches, Gather, Limits, fetches
from planner.inventory import Compute, Moment
from planner.inventory.forms import CODE_BYTES, nf4_state_bytes, storage_bytes
from planner.parallelism import zero
from planner.parallelism.base import IdealCollective
from planner.parallelism.zero import StateBytes, moment_bytes, padded_elements, whole_bytes
from planner.rules import COMMON, JOB, Rule, reads_only, splits_only
from planner.units import BYTES

CONTROL_BYTES = 1024
"""Calls below this are not predicted one by one (norms of stage 3's small weights, flags)."""

START_ALIGNMENT = 2
"""Flat groups are padded to a multiple of this times the ranks (nccl_start_alignment_factor)."""

HOST_OPTIMIZERS = ("adamw", "lion")
"""Those with a step for CPUs (deepspeed/ops/adam/cpu_adam.py, ops/lion/cpu_lion.py)."""

name = "deepspeed"
LIMITS = (
    "zero3_prefetch_elements",
    "zero3_persistence_elements",
    "zero3_max_live_elements",
    "zero3_max_reuse_elements",
)

rules: tuple[Rule, ...] = (
    *splits_only(),
    *reads_only("zero_stage", *BUCKETS, *LIMITS),
    *COMMON,
    *JOB,
    NO_REPLICAS,
    Rule(
        name="DeepSpeed needs a ZeRO stage",
        field="zero_stage",
        holds=lambda case: case.layout.zero_stage >= 1,
        sentence=lambda case: "DeepSpeed with stage 0 shards nothing",
        fix=lambda case: "Use zero_stage 1, 2 or 3, or engine ddp",
    ),
    Rule(
        name="DeepSpeed offloads weights at stage 3",
        field="offload_params",
        holds=lambda case: not case.layout.offload_params or case.layout.zero_stage == 3,
        sentence=lambda case: f"at ZeRO stage {case.layout.zero_stage} every rank computes with its own whole weights",
        fix=lambda case: "Use zero_stage=3, or offload_params=false",
    ),
    Rule(
        name="DeepSpeed's optimizers on the host",
        field="offload_optimizer",
        holds=lambda case: not case.layout.offload_optimizer or case.job.optimizer.name in HOST_OPTIMIZERS,
        sentence=lambda case: f"DeepSpeed has no {case.job.optimizer.name} that runs on the host",
        fix=lambda case: f"Use optimizer {' or '.join(HOST_OPTIMIZERS)}, or offload_optimizer=false",
    ),
    Rule(
        name="secondary shards with weights offloaded",
        field="zero_secondary_shard",
        holds=lambda case: not (case.layout.zero_secondary_shard and case.layout.offload_params),
        sentence=lambda case: "with the weights offloaded the second copy would be in host memory too",
        fix=lambda case: "Use zero_secondary_shard=0, or offload_params=false",
    ),
    Rule(
        name="ZeRO has one training format",
        field="precision",
        holds=lambda case: case.job.precision != "fp8",
        sentence=lambda case: "ZeRO casts the whole model to one 16-bit format and keeps no fp32 weights to convert",
        fix=lambda case: "Use engine fsdp2 or ddp, or precision=bf16",
    ),
    Rule(
        name="Muon needs gradients reduced whole",
        field="optimizer",
        # runtime/zero/stage3.py of 0.19.8 raises unless reduce_scatter is off, and then sends what is not modelled.
        holds=lambda case: (case.layout.zero_stage < 3) | (case.job.optimizer.name != "muon"),
        sentence=lambda case: "stage 3 reduce-scatters gradients, and DeepSpeed refuses Muon there",
        fix=lambda case: "Use zero_stage 1 or 2, engine fsdp2 or ddp, or optimizer adamw",
    ),
)


def compute(case: Case) -> Compute:
    """DeepSpeed casts the model itself: no autocast, weights and results in the training format."""
    element = float(BYTES["fp32"] if case.job.precision == "fp32" else BYTES["bf16"])
    return Compute(
        weight_bytes=element,
        element_bytes=element,
        lora=case.lora,
        # DeepSpeed casts adapters with everything else.
        adapter_bytes=element,
        # Stage 3 puts its own linear function in place of PyTorch's, and that keeps the input of frozen weights too.
        linear_keeps_input=case.layout.zero_stage == 3,
        codes_kept_above=_largest_persistent_bytes(case),
        **parallel_compute(case),
    )


def _largest_persistent_bytes(case: Case) -> float | None:
    """At stage 3 bitsandbytes' graph holds a view of the gathered codes, and a weight that is let go is only pointed
    elsewhere (partition_parameters.py, free_param): its bytes stay until backward. Persistent ones stay anyhow."""
    quantization = case.job.base_quantization
    if quantization is None or case.layout.zero_stage != 3:
        return None
    return case.layout.zero3_persistence_elements * storage_bytes(quantization)


def states(case: Case) -> StateBytes:
    """fp32 keeps a separate fp32 master too, but at stage 0; pure-bf16 keeps master and moments in bf16.

    fp16 is as bf16, with a scaled loss: the scale is one number.
    """
    if case.job.precision == "fp32" and case.layout.zero_stage == 0:
        return zero.state_bytes("fp32", case.job.optimizer)
    if case.job.precision in ("bf16", "fp16"):
        return zero.state_bytes("bf16", case.job.optimizer, separate_master=True)
    element = float(BYTES["fp32"] if case.job.precision == "fp32" else BYTES["bf16"])
    return StateBytes(element, element, element, moment_bytes(case.job.optimizer, element))


def held_grad_bytes(case: Case) -> float:
    """Bytes an element of a gradient that waits for the step: in the model's own format, unless the configuration has a
    grad_accum_dtype (engine.py, get_data_types)."""
    return states(case).grad


def bucket_elements(case: Case) -> Number:
    """Elements of the contiguous reduce bucket, as the emitted configuration sets it."""
    return reduce_bucket_elements(case.layout, configured_elements(case))


def configured_elements(case: Case) -> Number:
    """Trained elements that buckets are sized to: a rank's, of the fullest pipeline stage (one file configures all)."""
    if not case.pipelined:
        return case.total(trainable=True)
    most: Number = 0
    for stage in case.stages():
        most = maximum(most, case.at(stage).total(trainable=True))
    return most


def partition_elements(case: Case) -> Number:
    """Elements of one rank's flat partition: trained weights, padded so that every rank starts aligned."""
    if case.layout.zero_stage == 0:
        return case.total(trainable=True)
    ranks = case.layout.dp_shard
    return ceil_div(case.total(trainable=True), ranks * START_ALIGNMENT) * START_ALIGNMENT


def partitions(case: Case) -> Number:
    """Parts that the flat group of trained weights is cut into: none at stage 0."""
    return case.layout.dp_shard if case.layout.zero_stage else 1


def optimizer_bytes(case: Case, elements: Number) -> Number:
    """Master weights and states of a rank's partition of `elements`.

    The optimizer sees them laid end to end: Adafactor cannot factor that, and keeps a whole second moment. Muon's
    matrices lie in a partition of their own, whose momentum has the format gradients wait in.
    """
    each, settings = states(case), case.job.optimizer
    if settings.name != "muon":
        updated = each.master or each.weight  # at stage 0 in fp32 the weights themselves
        return elements * each.master + optimizers.state_bytes(settings, optimizers.flat(elements), updated)
    share = 1 - _left_to_adamw(case)
    momentum = held_grad_bytes(case) if case.layout.zero_stage == 1 else each.grad
    others = optimizers.two_moment_bytes(elements * (1 - share), each.master)
    return elements * each.master + optimizers.one_moment_bytes(elements * share, momentum) + others


def _left_to_adamw(case: Case) -> Number:
    """Share of the trained elements that Muon does not take: all but the layers' matrices."""
    hidden = sum(
        case.repeats(unit) * weight.elements
        for unit in LAYERS
        for weight in case.units()[unit]
        if weight.trainable and len(weight.shape) >= 2
    )
    return 1 - hidden / case.total(trainable=True)


def frozen_bytes(case: Case) -> Number:
    """Weights that are not trained, whole; a 4-bit one in its own format."""
    return sum(
        case.repeats(unit) * weight.elements * (stored_weight_bytes(case, weight) if packed(case, weight) else narrow)
        for narrow in (states(case).weight,)
        for unit in UNITS
        for weight in case.units()[unit]
        if not weight.trainable
    )


def resident(case: Case) -> Held:
    """What stays between steps, on CPU processes what is offloaded too."""
    held = _resident_stage3(case) if case.layout.zero_stage == 3 else _resident_stage12(case)
    return held if case.host_apart else _with(held, host(case))


def host(case: Case, *, built: bool = False) -> Held:
    """Bytes of one rank in host memory by term; empty without offload. `built`: before the first step, when there are
    neither moments nor accumulated gradients."""
    layout = case.layout
    if not (layout.offload_optimizer or layout.offload_params):
        return {}
    held = _host_stage3(case) if layout.zero_stage == 3 else _host_stage12(case, built)
    if built and layout.offload_optimizer:
        held["optimizer"] = updated_elements(case) * states(case).master
    return held


def _host_stage12(case: Case, built: bool) -> Held:
    """Master, moments, a gradient in the master's format, the 16-bit copy that is uploaded, a buffer of one weight;
    accumulation keeps the gradients of every weight that touches the partition, whole."""
    each, partition = states(case), partition_elements(case)
    gradients = partition * each.master
    if accumulates_on_host(case) and not built:
        gradients = gradients + where(case.layout.grad_accum > 1, touching_elements(case) * each.weight, 0.0)
    return {
        "optimizer": optimizer_bytes(case, partition),
        "grads": gradients,
        "buckets": (partition + largest_trained(case)) * each.weight,
    }


def accumulates_on_host(case: Case) -> bool:
    """Whether a micro-batch adds to gradients on the host; at stage 1 they wait whole on the device."""
    return case.layout.offload_optimizer and case.layout.zero_stage == 2


def _host_stage3(case: Case) -> Held:
    each, trained = states(case), shard_elements(case, trainable=True)
    held: Held = {}
    if case.layout.offload_params:
        held["params"] = shard_elements(case) * each.weight
    if case.layout.offload_optimizer:
        held["optimizer"] = optimizer_bytes(case, trained)
        held["grads"] = trained * (each.grad + each.master)  # as reduced, and in the master's format for the step
    return held


def updated_elements(case: Case) -> Number:
    """Elements whose optimizer states a rank has."""
    return shard_elements(case, trainable=True) if case.layout.zero_stage == 3 else partition_elements(case)


def _with(held: Held, more: Held) -> Held:
    return held | {term: held.get(term, 0.0) + size for term, size in more.items()}


def _resident_stage12(case: Case) -> Held:
    each, shards = states(case), partitions(case)
    flat = partition_elements(case) * shards
    offloaded = case.layout.offload_optimizer
    return {
        "params": whole_bytes(flat, each.weight) + frozen_bytes(case),
        "optimizer": optimizer_bytes(case, flat / shards) * (0.0 if offloaded else 1.0),
        "grads": 0.0 * flat,
        # ZeRO-Offload's temp_grad_buffer_for_gpu_offload: room for one weight's gradient.
        "buckets": (largest_trained(case) * each.weight if offloaded else 0.0) + 0.0 * flat,
    }


def largest_trained(case: Case) -> Number:
    """Elements of the largest trained weight."""
    largest: Number = 0
    for weight in (weight for unit in UNITS for weight in case.units()[unit] if weight.trainable):
        largest = maximum(largest, weight.elements)
    return largest


def shard_elements(case: Case, *, trainable: bool | None = None) -> Number:
    """Elements a rank holds at stage 3, where every weight is padded on its own to a multiple of the ranks; of 4-bit
    weights as many of the training format as fill their codes' bytes."""
    ranks, element = case.layout.dp_shard, states(case).weight
    quantization = case.job.base_quantization
    found: Number = 0.0
    for unit in UNITS:
        for weight in case.units()[unit]:
            if trainable not in (None, weight.trainable):
                continue
            if quantization is not None and packed(case, weight):
                held = storage_bytes(quantization)
                codes = weight.elements * CODE_BYTES / held
                share = padded_elements(codes, codes, ranks) * (held / element)
            else:
                share = padded_elements(weight.elements, weight.elements, ranks)
            found = found + case.repeats(unit) * share / ranks
    return found


def scale_bytes(case: Case) -> Number:
    """Scales and tables of 4-bit weights: no weights, so stage 3 leaves them whole on every rank."""
    quantization = case.job.base_quantization
    if quantization is None:
        return 0.0
    return sum(
        case.repeats(unit) * nf4_state_bytes(weight.elements, quantization.double)
        for unit in UNITS
        for weight in case.units()[unit]
        if packed(case, weight)
    ) + 0.0  # fmt: skip


def _resident_stage3(case: Case) -> Held:
    each = states(case)
    trained, layout = shard_elements(case, trainable=True), case.layout
    return {
        "params": whole_bytes(shard_elements(case), 0.0 if layout.offload_params else each.weight) + scale_bytes(case),
        "optimizer": optimizer_bytes(case, trained) * (not layout.offload_optimizer),
        "grads": whole_bytes(trained, 0.0 if layout.offload_optimizer else each.grad),
        "buckets": whole_bytes(bucket_elements(case), each.grad) + 0.0 * trained,
    }


def outside(case: Case) -> list[tuple[str, Held]]:
    """Building, the reductions that end a backward, and the step."""
    return (
        [("load", held) for held in load(case)] + _final_reduction(case) + [("optimizer", held) for held in step(case)]
    )


def load(case: Case) -> list[Held]:
    """Stages 1 and 2 copy the weights into a flat group beside the originals. At stage 3 the trainer shards weight by
    weight (zero.Init) from the model in host memory, which on CPU is there at first. zero.Init takes no 4-bit weights:
    such a model is whole on every GPU before it is sharded."""
    each = states(case)
    whole = case.total(trainable=True) * each.weight + frozen_bytes(case)
    if case.layout.zero_stage < 3:
        copied = partition_elements(case) * partitions(case) * each.weight if case.layout.zero_stage else 0.0
        begun: Held = {"params": maximum(whole + copied, unpacked_model_bytes(case))}
        buffers = {} if case.host_apart else host(case, built=True)
        return [begun, _with(_resident_stage12(case), buffers)] if buffers else [begun]
    built = dict(_resident_stage3(case))
    if not case.host_apart:
        built = _with(built, host(case, built=True))
    if not case.layout.offload_optimizer:
        built["optimizer"] = whole_bytes(shard_elements(case, trainable=True), each.master)
    largest = max(weight.elements for unit in UNITS for weight in case.units()[unit])
    built["params"] = built["params"] + largest * each.weight
    all_there = case.cluster.gpu.kind == "cpu" or case.job.base_quantization is not None
    there = maximum(whole, unpacked_model_bytes(case))
    return [built, {"params": there + 0.0 * built["params"]}] if all_there else [built]


def holder(case: Case) -> Holder:
    """Resident states, gradients so far, the bucket being filled, and (stage 3) the weight in use."""
    stay, each, stage = resident(case), states(case), case.layout.zero_stage
    kept = held_grad_bytes(case)
    bucket = bucket_elements(case)
    accumulated = 0.0 if stage == 3 else _accumulated(case)
    secondary = secondary_bytes(case)
    in_use: dict[float, Number] = {}
    looks_ahead, live, persistent = _stage3_fetches(case) if stage == 3 else (False, {}, 0.0)
    # What a layer's second forward gathered stays with its graph until each weight's backward, which gathers it once
    # more: checkpoint keeps the weight's storage, not the parameter that ZeRO empties (seen in a timeline, torch 2.13).
    again = _layer_elements(case) if runs_layers_again(case) and case.job.base_quantization is None else {}

    def held(moment: Moment, later: bool) -> Held:
        grads = stay["grads"] + moment.in_flight * each.grad
        buckets = stay["buckets"] + _flush_bytes(case, moment)
        if stage == 3:
            if looks_ahead:
                whole = live.get((moment.phase, moment.unit, moment.layer), 0)
            elif moment.unit in again and moment.phase == "backward":
                whole = again[moment.unit] - moment.unit_grads + (moment.weight if moment.unit_grads else 0)
            else:
                whole = moment.weight
            if whole not in in_use:
                in_use[whole] = _padded(whole, case.layout.dp_shard) * each.weight + persistent
            gathered = in_use[whole]
            params = stay["params"] + secondary
            return stay | {"params": params, "grads": grads, "buckets": buckets, "gathered": gathered}
        if later:
            grads = grads + accumulated
        finished = finished_elements(case, moment)
        if stage == 0:
            return stay | {"grads": grads if later else grads + finished * kept, "buckets": buckets}
        if finished > 0 or (stage == 1 and later):
            # The bucket is made once the first gradient is there and given back after the last reduction, which at
            # stage 1 comes after the last micro-batch.
            buckets = buckets + bucket * (each.grad if stage == 2 else kept)
            if stage == 1 and not later:
                grads = grads + finished * kept
        return stay | {"grads": grads, "buckets": buckets}

    return held


def _stage3_fetches(case: Case) -> tuple[bool, dict[tuple[str, str, int], float], float]:
    """(whether anything is kept or fetched beyond the module at work, elements whole by unit, persistent bytes)."""
    limits = limits_of(case)
    plan, each = _fetched(case, int(case.layout.tp)), states(case)
    persistent = sum(size * _bytes(code, each) for size, code in plan.persistent)
    return limits.prefetch + limits.max_reuse > 0, plan.live, persistent


def _layer_elements(case: Case) -> dict[str, float]:
    return {unit: float(sum(weight.elements for weight in case.units()[unit])) for unit in LAYERS}


def runs_layers_again(case: Case) -> bool:
    """Whether backward makes a layer's forward anew."""
    return case.layout.recompute in ("full", "sac:matmul")


def _fetched(case: Case, tp: int) -> Fetches:
    quantization, element = case.job.base_quantization, states(case).weight
    codes = None if quantization is None else Codes(layer_form(case), storage_bytes(quantization), element)
    return fetches(
        case.walked_model, case.lora, limits_of(case), codes, tp, case.runtime.parts, runs_layers_again(case)
    )


def _bytes(code: float | None, each: StateBytes) -> float:
    """Bytes of an element that is gathered: of a 4-bit weight's codes, or of any other weight."""
    return each.weight if code is None else code


def secondary_bytes(case: Case) -> Number:
    """ZeRO++'s second copy in the training format, over a smaller group: each weight's part is kept from its first
    gather of a step on, and let go when the optimizer steps (stage3.py, invalidate_secondary_tensor)."""
    group = case.layout.zero_secondary_shard
    if not group:
        return 0.0
    shards = shard_elements(case) * case.layout.dp_shard
    return zero.sharded_bytes(shards, states(case).weight, group)


def _padded(elements: float, ranks: Number) -> Number:
    return ceil_div(elements, ranks) * ranks


def _accumulated(case: Case) -> Number:
    """Gradients kept from earlier micro-batches: whole up to stage 1, of the partition's weights at stage 2, on the
    host when the optimizer is there."""
    if accumulates_on_host(case):
        return 0.0
    if case.layout.zero_stage <= 1:
        return case.total(trainable=True) * held_grad_bytes(case)
    return partition_grad_elements(case) * held_grad_bytes(case)


def partition_grad_elements(case: Case) -> Number:
    """Elements of the gradients the fullest rank keeps: of every weight that touches its partition, whole."""
    if case.job.precision == "bf16":
        return partition_elements(case)  # fp32 accumulation keeps the partition alone
    return touching_elements(case)


def touching_elements(case: Case) -> Number:
    """Elements of every weight that touches the fullest rank's partition, whole."""
    sizes = trained_sizes(case)
    return by_value(lambda ranks: _touching_elements(sizes, int(ranks)), case.layout.dp_shard)


def trained_sizes(case: Case) -> tuple[int, ...]:
    """Elements of every trained weight of this rank, in forward order (numbers, not columns)."""
    found: list[int] = []
    for unit in UNITS:  # a unit's sizes once, not once a layer: this runs some hundred times a question
        found += [weight.elements for weight in case.units()[unit] if weight.trainable] * int(case.repeats(unit))
    return tuple(found)


@lru_cache(maxsize=1024)
def _touching_elements(sizes: tuple[int, ...], ranks: int) -> float:
    share = -(-sum(sizes) // (ranks * START_ALIGNMENT)) * START_ALIGNMENT
    kept = [0] * ranks
    start = 0
    for size in sizes:
        for rank in range(start // share, min(ranks - 1, (start + size - 1) // share) + 1):
            kept[rank] += size
        start += size
    return float(max(kept))


def bucket_count(case: Case, forward_order: bool) -> Number:
    """Reductions of a backward; in columns of weights, what filling every bucket would take."""
    if weights_are_columns(case):
        return ceil_div(case.total(trainable=True), bucket_elements(case))
    return len(_flushes(case, forward_order))


def _flushes(case: Case, forward_order: bool) -> tuple[tuple[int, int], ...]:
    return _flushed(trained_sizes(case), int(bucket_elements(case)), forward_order)


@lru_cache(maxsize=256)
def _flushed(sizes: tuple[int, ...], limit: int, forward_order: bool) -> tuple[tuple[int, int], ...]:
    """(elements finished before, elements in the bucket) at every reduction: the bucket goes when the next weight
    does not fit, and once more at the end."""
    found, finished, content = [], 0, 0
    for size in sizes if forward_order else reversed(sizes):
        if content + size > limit and content:
            found.append((finished, content))
            content = 0
        content += size
        finished += size
    return (*found, (finished, content))


def _flush_bytes(case: Case, moment: Moment) -> Number:
    """Copies a reduction in the middle of backward makes: the bucket concatenated, and (stage 3 under gloo, whose
    reduce-scatter copies its input) once more."""
    if case.layout.zero_stage <= 1 or moment.phase != "backward" or not moment.in_flight:
        return 0.0
    finished = int(finished_elements(case, moment))
    for before, content in _flushes(case, False)[:-1]:
        if finished <= before < finished + moment.in_flight:
            return content * states(case).grad * _copies(case)
    return 0.0


def _copies(case: Case) -> int:
    return 2 if case.layout.zero_stage == 3 and case.cluster.gpu.kind == "cpu" else 1


def _final_reduction(case: Case) -> list[tuple[str, Held]]:
    """The reductions after backward: activations are gone; gradients are whole (stage 1) or in the last bucket."""
    each, stage, bucket = states(case), case.layout.zero_stage, bucket_elements(case)
    held = dict(resident(case))
    if stage == 0:  # each bucket is copied to be reduced, in turn
        held["grads"] = held["grads"] + case.total(trainable=True) * each.grad
        held["buckets"] = held["buckets"] + min(bucket, case.total(trainable=True)) * each.grad
        return [("backward", held)]
    if stage == 1:
        first = _flushes(case, True)[0][1]
        kept = held_grad_bytes(case)
        held["grads"] = held["grads"] + (case.total(trainable=True) - first) * kept
        held["buckets"] = held["buckets"] + (bucket + first) * kept
        return [("backward", held)]
    content = _flushes(case, False)[-1][1]
    made_now = bucket if stage == 2 else 0
    held["buckets"] = held["buckets"] + (made_now + content * _copies(case)) * each.grad
    held["params"] = held["params"] + secondary_bytes(case)
    if stage == 3:
        held["gathered"] = sum(w.elements for w in case.units()["embed"] if w.trainable) * each.weight
    return [("backward", held)]


def step(case: Case) -> list[Held]:
    """The partition's gradient made flat (fp32 for a separate master), and the optimizer's temporaries on it.

    AdamW on CPU holds two results of the partition's size, on GPUs one (the list update has one tensor). Stage 3 then
    gathers the weights it never releases.
    """
    each, stage3, offloaded = states(case), case.layout.zero_stage == 3, case.layout.offload_optimizer
    elements = updated_elements(case)
    # On the host one kernel updates in place, with the gradient that is there.
    on_device = 0.0 * elements if offloaded else elements * each.master + _step_temporaries(case, elements)
    moments = [resident(case) | {"temporaries": on_device}]
    if case.layout.zero_stage == 0:
        moments[0]["grads"] = case.total(trainable=True) * each.grad
    if stage3:
        moments.append(resident(case) | {"gathered": _stage3_fetches(case)[2]})
    return moments


def _step_temporaries(case: Case, elements: Number) -> Number:
    """The optimizer's own; Muon's matrices are whole on the rank that updates them, one after the other."""
    settings, master = case.job.optimizer, states(case).master or states(case).weight
    seen: optimizers.Units = [([optimizers.flat(elements)], 1)]
    if settings.name == "muon":
        matrices = [w for unit in LAYERS for w in case.units()[unit] if w.trainable and len(w.shape) >= 2]
        rest = optimizers.flat(elements * _left_to_adamw(case))
        seen = [([optimizers.Tensor(w.shape, w.elements) for w in matrices], 1), ([rest], 1)]
    return optimizers.temporaries(settings, seen, master, on_cpu=case.cluster.gpu.kind == "cpu")


def collectives(case: Case) -> list[Call]:
    """Stages 1 and 2: bucketed all-reduces and one gather of the new weights; stage 3: gathers by weight."""
    return _collectives_stage3(case) if case.layout.zero_stage == 3 else _collectives_stage12(case)


def _collectives_stage12(case: Case) -> list[Call]:
    each, layout = states(case), case.layout
    trained = case.total(trainable=True)
    rounds = layout.grad_accum if layout.zero_stage == 2 else layout.grad_accum * 0 + 1
    buckets = bucket_count(case, layout.zero_stage == 1)
    whole = partition_elements(case) * partitions(case)
    gathers = maximum(1, whole // allgather_bucket_elements(layout, configured_elements(case)))
    reduced = Call(
        "all_reduce",
        "dp_shard",
        "bucket",
        "backward",
        buckets * rounds,
        trained * each.grad * rounds,
        overlappable=layout.zero_stage == 2,
    )
    if layout.zero_stage == 0:
        return [reduced]
    return [reduced, Call("all_gather", "dp_shard", "params", "optimizer", gathers, whole * each.weight)]


def limits_of(case: Case) -> Limits:
    """The layout's four look-ahead limits of stage 3."""
    layout = case.layout
    return Limits(
        prefetch=layout.zero3_prefetch_elements,
        persistence=layout.zero3_persistence_elements,
        max_live=layout.zero3_max_live_elements,
        max_reuse=layout.zero3_max_reuse_elements,
    )


def _collectives_stage3(case: Case) -> list[Call]:
    each, layout = states(case), case.layout
    rounds, ranks = layout.grad_accum, layout.dp_shard
    gathered = _gathered(case)
    calls: list[Call] = []
    for phase in ("forward", "backward"):
        count, payload = gathered[phase]
        for axis, passes in _gathered_over(case, phase) if is_column(count) or count else ():
            ahead = limits_of(case).prefetch > 0
            calls.append(Call("all_gather", axis, "params", phase, count * passes, payload * passes, ahead))
    reduced = shard_elements(case, trainable=True) * ranks * each.grad
    buckets = bucket_count(case, False)
    calls.append(
        Call("reduce_scatter", "dp_shard", "bucket", "backward", buckets * rounds, reduced * rounds, overlappable=True)
    )
    # Weights that are never released are gathered anew, one by one, once the step has changed them.
    count, payload = gathered["optimizer"]
    if is_column(count) or count:
        calls.append(Call("all_gather", "dp_shard", "params", "optimizer", count, payload))
    return calls


def _gathered(case: Case) -> dict[str, tuple[Number, Number]]:
    """Stage 3's gathers of one pass by phase, and after the step: calls and bytes; of every distinct tp of a column."""
    tp: Any = case.layout.tp
    if not is_column(tp):
        return _gathered_with(case, int(tp))
    by_degree = [(tp == degree, _gathered_with(case, int(degree))) for degree in sorted(set(tp.tolist()))]
    return {
        phase: (
            sum(where(rows, found[phase][0], 0.0) for rows, found in by_degree),
            sum(where(rows, found[phase][1], 0.0) for rows, found in by_degree),
        )
        for phase in ("forward", "backward", "optimizer")
    }


def _gathered_with(case: Case, tp: int) -> dict[str, tuple[Number, Number]]:
    each, ranks, plan = states(case), case.layout.dp_shard, _fetched(case, tp)
    made = [*plan.gathers, *(Gather("optimizer", (size,), code) for size, code in plan.persistent)]
    counts = Counter(call for call in made if sum(call.sizes) * _bytes(call.code, each) >= CONTROL_BYTES)
    found: dict[str, tuple[Number, Number]] = dict.fromkeys(("forward", "backward", "optimizer"), (0, 0.0))
    for call, times in counts.items():
        count, payload = found[call.phase]
        sent = times * sum(_padded(size, ranks) for size in call.sizes) * _bytes(call.code, each)
        found[call.phase] = count + times, payload + sent
    return found


def _gathered_over(case: Case, phase: str) -> list[tuple[str, Number]]:
    """(axis, passes) of a phase's gathers: with a second copy only the first forward of a step goes to all ranks."""
    rounds = case.layout.grad_accum
    if not case.layout.zero_secondary_shard:
        return [("dp_shard", rounds)]
    if phase == "backward":
        return [("dp_secondary", rounds)]
    later = is_column(rounds) or rounds > 1
    return [("dp_shard", rounds * 0 + 1), *([("dp_secondary", rounds - 1)] if later else [])]


def ideal(case: Case) -> list[IdealCollective]:
    """The paper's own."""
    each = states(case)
    return zero.ideal_collectives(
        case.layout.zero_stage,
        sent_elements(case),
        case.total(trainable=True),
        each.weight,
        each.grad,
        case.layout.grad_accum,
        reshard=True,
        reduce_each=case.layout.zero_stage >= 2,
        secondary=case.layout.zero_secondary_shard > 0,
    )
