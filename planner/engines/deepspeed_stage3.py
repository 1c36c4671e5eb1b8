"""DeepSpeed ZeRO-3: every weight sharded by itself, and gathered for itself when its module runs.

Gradients are reduce-scattered in buckets. Read in deepspeed 0.19.8, runtime/zero/stage3.py, and measured there. Not
here: which weights are fetched when (zero3_fetch.py), stages 1 and 2 (deepspeed.py), or what all stages share
(deepspeed_common.py).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from planner.basics.arith import Number, ceil_div, in_shape_of, is_column, maximum, where
from planner.engines.base import Call, Held, Holder
from planner.engines.common import base_weight_bytes, layer_form, packed, packed_weight_bytes
from planner.engines.deepspeed_common import (
    bucket_count,
    bucket_elements,
    flush_bytes,
    flushes,
    narrowed_bytes,
    optimizer_bytes,
    reduced_bytes,
    states,
    with_terms,
)
from planner.engines.zero3_fetch import Codes, Fetches, Gather, Limits, fetches
from planner.inventory import Moment
from planner.inventory.ends import first_weights
from planner.inventory.narrow import CODE_BYTES, nf4_state_bytes, storage_bytes
from planner.inventory.units import COPY
from planner.parallelism import zero
from planner.parallelism.case import Case
from planner.parallelism.zero import StateBytes, padded_elements, whole_bytes

CONTROL_BYTES = 1024
"""Calls below this are not predicted one by one (norms of stage 3's small weights, flags)."""


def shard_elements(case: Case, *, trainable: bool | None = None) -> Number:
    """Elements a rank holds at stage 3, where every weight is padded on its own to a multiple of the ranks; of 4-bit
    weights as many of the training format as fill their codes' bytes."""
    ranks, element = case.layout.dp_shard, states(case).weight
    quantization = case.job.base_quantization
    found: Number = 0.0
    for times, weight in case.counted():
        if trainable not in (None, weight.trainable):
            continue
        if quantization is not None and packed(case, weight):
            held = storage_bytes(quantization)
            codes = weight.elements * CODE_BYTES / held
            share = padded_elements(codes, codes, ranks) * (held / element)
        else:
            share = padded_elements(weight.elements, weight.elements, ranks)
        found = found + times * share / ranks
    return found


def scale_bytes(case: Case) -> Number:
    """Scales and tables of 4-bit weights: no weights, so stage 3 leaves them whole on every rank."""
    quantization = case.job.base_quantization
    if quantization is None:
        return 0.0
    double, weights = quantization.double, case.counted()
    return sum(times * nf4_state_bytes(one.elements, double) for times, one in weights if packed(case, one)) + 0.0


def resident(case: Case) -> Held:
    """On the device between steps: shards, and the bucket, which is never given back."""
    each = states(case)
    trained, layout = shard_elements(case, trainable=True), case.layout
    return {
        "params": whole_bytes(shard_elements(case), 0.0 if layout.offload_params else each.weight) + scale_bytes(case),
        "optimizer": optimizer_bytes(case, trained) * (not layout.offload_optimizer),
        "grads": whole_bytes(trained, 0.0 if layout.offload_optimizer else each.grad),
        "buckets": in_shape_of(trained, whole_bytes(bucket_elements(case), reduced_bytes(case))),
    }


def host(case: Case) -> Held:
    """Bytes of one rank in host memory by term."""
    each, trained = states(case), shard_elements(case, trainable=True)
    held: Held = {}
    if case.layout.offload_params:
        held["params"] = shard_elements(case) * each.weight
    if case.layout.offload_optimizer:
        held["optimizer"] = optimizer_bytes(case, trained)
        held["grads"] = trained * (each.grad + each.master)  # as reduced, and in the master's format for the step
    return held


def load(case: Case, on_host: Held) -> list[Held]:
    """The trainer fills the model weight by weight and shards each (zero.Init) before the next one comes; then
    DeepSpeed makes the master copy. `on_host`: what this device's memory holds of offload by then."""
    each = states(case)
    built = with_terms(resident(case), on_host)
    if not case.layout.offload_optimizer:
        built["optimizer"] = whole_bytes(shard_elements(case, trainable=True), each.master)
    plain = [weight for _, weight in case.counted() if not packed(case, weight)]
    whole = max(weight.elements for weight in plain) * each.weight
    shards = built["params"]
    drawn = narrowed_bytes(case) if case.cluster.gpu.kind == "cpu" else 0.0
    codes = packed_weight_bytes(case) * (1 + CODE_BYTES / base_weight_bytes(case))
    filled: Held = {"params": shards, "temporaries": in_shape_of(shards, maximum(whole + drawn, codes))}
    # Every trained weight is gathered once, to hang its reduction on (stage3.py, create_reduce_and_remove_grad_hooks).
    hooked = max(weight.elements for _, weight in case.counted() if weight.trainable) * each.weight
    return [built | {"params": shards + hooked}, filled]


def holder(case: Case, stay: Held) -> Holder:
    """Beside what stays: the gradient in flight, and the weights in use."""
    each, sent, secondary, copies = states(case), reduced_bytes(case), secondary_bytes(case), _copies(case)
    in_use: dict[float, Number] = {}
    looks_ahead, plan, persistent = _looked_ahead(case)
    copied = _copied(case)
    again = _layer_elements(case) if runs_layers_again(case) else {}

    def held(moment: Moment, later: bool) -> Held:
        received = 0.0
        if looks_ahead:
            whole, received = plan.at(moment)
        elif moment.unit in again and moment.phase == "backward":
            # What a layer's second forward gathered of trained weights stays with its graph until each weight's
            # backward, which gathers it once more: checkpoint keeps the weight's storage, not the parameter that ZeRO
            # empties (seen in a timeline, torch 2.13). Frozen weights stay parameters until the layer's first backward
            # is over (update_recompute_parameters in partitioned_param_coordinator.py).
            trained, frozen = again[moment.unit]
            gathered_anew = moment.weight if moment.unit_grads or moment.begun else 0
            whole = trained - moment.unit_grads + (0 if moment.begun else frozen) + gathered_anew
        else:
            whole = moment.weight
        if whole not in in_use:
            in_use[whole] = (_padded(whole, case.layout.dp_shard) * each.weight + persistent) * copied
        flushed = flush_bytes(case, moment, lambda *_: sent) * copies
        return stay | {
            "params": stay["params"] + secondary,
            "grads": stay["grads"] + moment.in_flight * each.grad,
            "buckets": stay["buckets"] + flushed + received * each.weight * copied,
            "gathered": in_use[whole],
        }

    return held


def _copied(case: Case) -> Number:
    """1 where a gather makes a copy of the weight, 0 where a rank has the whole of it: DeepSpeed then hands out the
    shard itself, on the device already (partition_parameters.py, NoGatherHandle)."""
    return 1.0 if case.layout.offload_params else where(case.layout.dp_shard > 1, 1.0, 0.0)


def _looked_ahead(case: Case) -> tuple[bool, Fetches, float]:
    """(whether anything is kept or fetched beyond the module at work, what is fetched when, persistent bytes)."""
    limits = limits_of(case)
    plan, each = _fetched(case, int(case.layout.tp)), states(case)
    persistent = sum(size * _bytes(code, each) for size, code in plan.persistent)
    return limits.prefetch + limits.max_reuse > 0, plan, persistent


def _layer_elements(case: Case) -> dict[str, tuple[float, float]]:
    """Elements of a layer's trained and frozen weights, 4-bit ones as what is gathered of them."""
    found: dict[str, tuple[float, float]] = {}
    codes = CODE_BYTES / states(case).weight
    for unit in case.kinds:
        weights = case.units()[unit]
        trained = sum(weight.elements for weight in weights if weight.trainable)
        frozen = [weight for weight in weights if not weight.trainable]
        gathered = sum(weight.elements * (codes if packed(case, weight) else 1.0) for weight in frozen)
        found[unit] = (float(trained), gathered)
    return found


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


def _copies(case: Case) -> int:
    """Copies of a bucket that a reduction makes: gloo's reduce-scatter copies its input once more."""
    return 2 if case.cluster.gpu.kind == "cpu" else 1


def final_reduction(case: Case, stay: Held) -> Held:
    """The last reduction after backward: of the gradients in the last bucket, beside the weights that are never
    released and the embedding, whose module is released only when its backward is over."""
    each = states(case)
    tables = {weight.name for weight in first_weights(case.model)}  # a tied head's unit has them
    passing = sum(
        weight.elements
        for unit in ("embed", "tail")
        for weight in case.units()[unit]
        if weight.name.removesuffix(COPY) in tables
        and weight.trainable
        and weight.elements > case.layout.zero3_persistence_elements
    )
    return stay | {
        "params": stay["params"] + secondary_bytes(case),
        "buckets": stay["buckets"] + flushes(case, False)[-1][1] * _copies(case) * reduced_bytes(case),
        "gathered": (_looked_ahead(case)[2] + passing * each.weight) * _copied(case),
    }


def after_step(case: Case, stay: Held) -> Held:
    """Once the step is done: the weights that are never released are gathered."""
    return stay | {"gathered": _looked_ahead(case)[2] * _copied(case)}


def limits_of(case: Case) -> Limits:
    """The layout's four look-ahead limits of stage 3."""
    layout = case.layout
    return Limits(
        prefetch=layout.zero3_prefetch_elements,
        persistence=layout.zero3_persistence_elements,
        max_live=layout.zero3_max_live_elements,
        max_reuse=layout.zero3_max_reuse_elements,
    )


def collectives(case: Case) -> list[Call]:
    """Gathers by weight in both passes, reduce-scatters of buckets, persistent weights gathered after the step."""
    layout = case.layout
    rounds, ranks = layout.grad_accum, layout.dp_shard
    gathered = _gathered(case)
    calls: list[Call] = []
    for phase in ("forward", "backward"):
        count, payload = gathered[phase]
        for axis, passes in _gathered_over(case, phase) if is_column(count) or count else ():
            ahead = limits_of(case).prefetch > 0
            calls.append(Call("all_gather", axis, "params", phase, count * passes, payload * passes, ahead))
    reduced = shard_elements(case, trainable=True) * ranks * reduced_bytes(case)
    buckets = bucket_count(case, False)
    # Gathers are started asynchronously; reductions are not, and hide on a stream of their own.
    count, payload = buckets * rounds, reduced * rounds
    calls.append(Call("reduce_scatter", "dp_shard", "bucket", "backward", count, payload, case.has_streams))
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
