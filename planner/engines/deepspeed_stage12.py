"""DeepSpeed ZeRO-1 and 2 (and 0, a pipeline's): weights whole, states in one flat partition a rank.

Gradients are averaged by all-reduce of whole buckets (DeepSpeed's default on every transport), at the end of backward
at stage 1 and whenever a bucket is full at stage 2. Read in deepspeed 0.19.8, runtime/zero/stage_1_and_2.py, and
measured there. Not counted: the fp64 copy of a weight's part that its norm is taken of under offload, in the last
micro-batch (`set_norm_for_param_grad_in_gpu`); it was 0.2 % of the peak in one of twelve measured runs. Not here: stage
3 (deepspeed_stage3.py), or what all stages share (deepspeed_common.py).
"""

from __future__ import annotations

from bisect import bisect_left
from functools import lru_cache
from typing import Any

from planner.basics.arith import Number, by_value, ceil_div, in_shape_of, is_column, maximum, where
from planner.engines.base import Call, Held, Holder
from planner.engines.buckets import allgather_bucket_elements
from planner.engines.common import packed_weight_bytes
from planner.engines.ddp import finished_elements, waiting_elements
from planner.engines.deepspeed_common import (
    bucket_count,
    bucket_elements,
    configured_elements,
    drawn_bytes,
    flush_bytes,
    flushes,
    frozen_bytes,
    optimizer_bytes,
    reduced_bytes,
    states,
    trained_sizes,
    with_terms,
)
from planner.inventory import Moment
from planner.parallelism.case import Case, once
from planner.parallelism.zero import whole_bytes

START_ALIGNMENT = 2
"""Flat groups are padded to a multiple of this times the ranks (nccl_start_alignment_factor)."""


def partition_elements(case: Case) -> Number:
    """Elements of one rank's flat partition: trained weights, padded so that every rank starts aligned."""
    if case.layout.zero_stage == 0:
        return case.total(trainable=True)
    ranks = case.layout.dp_shard
    return ceil_div(case.total(trainable=True), ranks * START_ALIGNMENT) * START_ALIGNMENT


def partitions(case: Case) -> Number:
    """Parts that the flat group of trained weights is cut into: none at stage 0."""
    return case.layout.dp_shard if case.layout.zero_stage else 1


def resident(case: Case) -> Held:
    """On the device between steps: weights whole, states of the partition."""
    each, shards = states(case), partitions(case)
    flat = partition_elements(case) * shards
    offloaded = case.layout.offload_optimizer
    return {
        "params": whole_bytes(flat, each.weight) + frozen_bytes(case),
        "optimizer": optimizer_bytes(case, flat / shards) * (0.0 if offloaded else 1.0),
        "grads": in_shape_of(flat),
        # ZeRO-Offload's temp_grad_buffer_for_gpu_offload: room for one weight's gradient.
        "buckets": in_shape_of(flat, largest_trained(case) * each.weight if offloaded else 0.0),
    }


def largest_trained(case: Case) -> Number:
    """Elements of the largest trained weight."""
    return maximum(0, *(weight.elements for _, weight in case.counted() if weight.trainable))


def host(case: Case, built: bool) -> Held:
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


def load(case: Case, on_host: Held) -> list[Held]:
    """The weights come one by one in the training format, and are copied into a flat group. `on_host`: what this
    device's memory holds of offload by then.

    Where the device has no room for both, they wait in host memory, are laid end to end there, and the group comes
    back (stage_1_and_2.py, `flatten_on_accelerator`).
    """
    whole, flat, free = loaded_bytes(case), flat_bytes(case), _free_bytes(case)
    both = where(free >= flat, whole + flat, maximum(whole, frozen_bytes(case) + flat))
    drawn = drawn_bytes(case) if case.cluster.gpu.kind == "cpu" else packed_weight_bytes(case)
    begun: list[Held] = [{"params": whole, "temporaries": in_shape_of(whole, drawn)}, {"params": both}]
    return [*begun, with_terms(resident(case), on_host)] if on_host else begun


def loaded_bytes(case: Case) -> Number:
    """Bytes of the model's weights in the format that DeepSpeed computes in."""
    return case.total(trainable=True) * states(case).weight + frozen_bytes(case)


def flat_bytes(case: Case) -> Number:
    """Bytes of the flat group of trained weights; none at stage 0."""
    return partition_elements(case) * partitions(case) * states(case).weight * (1.0 if case.layout.zero_stage else 0.0)


def _free_bytes(case: Case) -> Number:
    """What a GPU has left beside the loaded weights. CPU processes have room for the group, and so is assumed of a card
    of unknown size."""
    memory = case.cluster.gpu.memory_bytes
    if case.cluster.gpu.kind == "cpu" or memory is None:
        return flat_bytes(case)
    return memory - case.runtime.allocator.context_bytes - loaded_bytes(case)


def load_host(case: Case) -> Number:
    """Bytes of one rank in host memory while its flat group is made there: the trained weights, and the group. None
    where the device does not even hold the weights."""
    flat, free = flat_bytes(case), _free_bytes(case)
    waits = case.total(trainable=True) * states(case).weight + flat
    return where((free >= 0) & (free < flat), waits, in_shape_of(waits))


def holder(case: Case, stay: Held) -> Holder:
    """Beside what stays: gradients so far, and the bucket being filled."""
    each, stage = states(case), case.layout.zero_stage
    bucket = allocated_bucket_elements(case)
    accumulated, on_host = _accumulated(case), accumulates_on_host(case)

    def held(moment: Moment, later: bool) -> Held:
        grads, in_flight = stay["grads"], moment.in_flight * each.grad
        added: Held = {}
        if later and stage <= 1:  # added to the gradient that waits, in place: it never is the weight's own
            added = {"temporaries": in_flight}
        else:
            grads = grads + in_flight
        buckets = stay["buckets"] + flush_bytes(case, moment, lambda *flush: copied_bytes(case, *flush))
        finished = finished_elements(case, moment)
        if later or stage == 2:  # else it is counted with those that are finished
            # A tied table's first gradient waits for the lookup's before either is added or reduced.
            added = added | {"logits": waiting_elements(case, moment) * each.grad}
        if stage == 2 and moment.phase == "backward" and not on_host:
            grads = grads + _partition_gradients(case, finished, later)
        elif later:
            grads = grads + accumulated
        if stage == 0:
            return stay | added | {"grads": grads if later else grads + finished * each.grad, "buckets": buckets}
        if finished > 0 or (stage == 1 and later):
            # The bucket is made once the first gradient is there and given back after the last reduction, which at
            # stage 1 comes after the last micro-batch.
            buckets = buckets + bucket * each.grad
            if stage == 1 and not later:
                grads = grads + finished * each.grad
        return stay | added | {"grads": grads, "buckets": buckets}

    return held


def allocated_bucket_elements(case: Case) -> Number:
    """Elements of the bucket being filled, and of a second one while the first is reduced beside backward
    (setup_buckets under overlap_comm)."""
    return bucket_elements(case) * (2 if case.layout.overlap_comm and case.layout.zero_stage else 1)


def _accumulated(case: Case) -> Number:
    """Gradients kept from earlier micro-batches: whole up to stage 1, of the partition's weights at stage 2, on the
    host when the optimizer is there."""
    if accumulates_on_host(case):
        return 0.0
    if case.layout.zero_stage <= 1:
        return case.total(trainable=True) * states(case).grad
    return touching_elements(case) * states(case).grad


def _partition_gradients(case: Case, finished: Number, accumulated: bool) -> Number:
    """Bytes of what stage 2 keeps of gradients on the fullest rank, by how many a backward has made.

    The first reduced bucket that has a weight of the rank's partition makes one buffer for all of them
    (`grads_in_partition`), beside what is `accumulated` of earlier micro-batches.
    """
    sizes = trained_sizes(case)
    reductions = flushes(case, False)  # each comes once all before it and its own are finished; the last is to come
    begun = min(bisect_left(reductions, (finished,)), len(reductions) - 1)
    reduced = reductions[begun - 1][0] if begun else 0
    elements = by_value(lambda ranks: _kept(sizes, int(ranks), reduced, accumulated), case.layout.dp_shard)
    return elements * states(case).grad


def _kept(sizes: tuple[int, ...], ranks: int, reduced: int, accumulated: bool) -> float:
    """Elements of whole gradients on the fullest rank, when `reduced` of them were, the last weights first."""
    fuller = _fuller_ranks(sizes, ranks)
    made = bisect_left(fuller, (reduced,))
    return float(max(fuller[-1][1] * accumulated, fuller[made - 1][1] * (accumulated + 1) if made else 0))


@lru_cache(maxsize=1024)
def _fuller_ranks(sizes: tuple[int, ...], ranks: int) -> tuple[tuple[int, int], ...]:
    """(elements reduced before the first of its own, elements of the weights that touch its partition) of each rank
    that has more of them than all whose gradients are reduced before."""
    share, total = _share(sizes, ranks), sum(sizes)
    found: list[tuple[int, int]] = []
    for rank, kept in reversed([*enumerate(_touching(sizes, ranks))]):
        if not found or kept > found[-1][1]:
            found.append((max(total - (rank + 1) * share, 0), kept))
    return tuple(found)


@once
def reductions(case: Case) -> tuple[tuple[int, ...], ...]:
    """Of every reduction of a backward its content, whether it is laid end to end, and how many of `_fuller_ranks` have
    begun, for each number of ranks: where all are equal, as much is held beside the model code."""
    ranks: Any = case.layout.dp_shard
    counts = sorted({int(one) for one in ranks.tolist()}) if is_column(ranks) else [int(ranks)]
    return _reductions(trained_sizes(case), flushes(case, False), tuple(counts))


@lru_cache(maxsize=256)
def _reductions(
    sizes: tuple[int, ...], flushed: tuple[tuple[int, int], ...], counts: tuple[int, ...]
) -> tuple[tuple[int, ...], ...]:
    total, found = sum(sizes), [[content] for _, content in flushed]
    for ranks in counts:
        share, fuller, reduced = _share(sizes, ranks), _fuller_ranks(sizes, ranks), 0
        for one, (finished, content) in zip(found, flushed, strict=True):
            one += [_spans(total - finished, content, share), bisect_left(fuller, (reduced,))]
            reduced = finished
    return tuple(map(tuple, found))


def touching_elements(case: Case) -> Number:
    """Elements of every weight that touches the fullest rank's partition, whole."""
    sizes = trained_sizes(case)
    return by_value(lambda ranks: float(max(_touching(sizes, int(ranks)))), case.layout.dp_shard)


def largest_part_elements(case: Case) -> Number:
    """Elements of the largest part of one weight in any rank's partition."""
    sizes = trained_sizes(case)
    return by_value(lambda ranks: float(_largest_part(sizes, int(ranks))), partitions(case))


@lru_cache(maxsize=1024)
def _largest_part(sizes: tuple[int, ...], ranks: int) -> int:
    share, start, largest = _share(sizes, ranks), 0, 0
    for size in sizes:
        first = min(size, share - start % share)  # up to the next rank's partition, then whole ones
        largest = max(largest, first, min(size - first, share))
        start += size
    return largest


def _share(sizes: tuple[int, ...], ranks: int) -> int:
    """Elements of a rank's partition."""
    return -(-sum(sizes) // (ranks * START_ALIGNMENT)) * START_ALIGNMENT


@lru_cache(maxsize=1024)
def _touching(sizes: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Elements of the weights that touch each rank's partition, whole."""
    share = _share(sizes, ranks)
    kept = [0] * ranks
    start = 0
    for size in sizes:
        for rank in range(start // share, min(ranks - 1, (start + size - 1) // share) + 1):
            kept[rank] += size
        start += size
    return tuple(kept)


def final_reduction(case: Case, stay: Held) -> Held:
    """The last reduction after backward: gradients are whole (up to stage 1) or in the last bucket."""
    each, stage, bucket = states(case), case.layout.zero_stage, allocated_bucket_elements(case)
    held = dict(stay)
    if stage == 0:  # each bucket is copied to be reduced, in turn
        held["grads"] = held["grads"] + case.total(trainable=True) * each.grad
        held["buckets"] = held["buckets"] + min(bucket, case.total(trainable=True)) * each.grad
    elif stage == 1:
        first = flushes(case, True)[0][1]
        held["grads"] = held["grads"] + (case.total(trainable=True) - first) * each.grad
        copied = copied_bytes(case, case.total(trainable=True), first)  # the first weights are the last of backward
        held["buckets"] = held["buckets"] + bucket * each.grad + first * copied
    else:
        made = case.total(trainable=True)
        kept = [_accumulated(case) * more for more in (0.0, 1.0)]
        if not accumulates_on_host(case):
            kept = [_partition_gradients(case, made, more) for more in (False, True)]
        held["grads"] = held["grads"] + where(case.layout.grad_accum > 1, kept[1], kept[0])
        last = flushes(case, False)[-1]
        held["buckets"] = held["buckets"] + bucket * each.grad + last[1] * copied_bytes(case, *last)
    return held


def copied_bytes(case: Case, finished: Number, content: Number) -> Number:
    """Bytes of a bucket's element in the copies that a reduction makes: laid end to end, where the bucket has parts of
    several ranks' partitions, and once more in the format that is sent where that is another (stage_1_and_2.py,
    `average_tensor` and `allreduce_bucket`). The bucket has the last `content` of the elements that are `finished`."""
    own, sent = states(case).grad, reduced_bytes(case)
    sizes = trained_sizes(case)
    start = sum(sizes) - finished
    laid_out = by_value(lambda ranks: float(_spans(start, content, _share(sizes, int(ranks)))), case.layout.dp_shard)
    return laid_out * own + (own != sent) * sent


def _spans(start: Number, content: Number, share: int) -> bool:
    """Whether the `content` elements from `start` on lie in the partitions of several ranks."""
    return bool(start // share != (start + content - 1) // share)


def collectives(case: Case) -> list[Call]:
    """Bucketed all-reduces, and one gather of the new weights."""
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
        trained * reduced_bytes(case) * rounds,
        overlappable=layout.zero_stage == 2 and case.has_streams,
    )
    if layout.zero_stage == 0:
        return [reduced]
    return [reduced, Call("all_gather", "dp_shard", "params", "optimizer", gathers, whole * each.weight)]
