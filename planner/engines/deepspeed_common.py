"""What DeepSpeed does alike at every ZeRO stage: number formats, the optimizer's bytes, buckets as they fill, and the
flat partitions of stages 1 and 2.

Not here: what a stage shards and sends (deepspeed.py, deepspeed_stage3.py), or how large a bucket is made
(common.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from functools import lru_cache
from itertools import accumulate

from planner.basics.arith import Number, by_value, ceil_div, maximum
from planner.basics.quantities import BYTES
from planner.engines.base import Held
from planner.engines.common import (
    base_weight_bytes,
    packed,
    packed_weight_bytes,
    reduce_bucket_elements,
    stored_weight_bytes,
    weights_are_columns,
    whole_weight_bytes,
)
from planner.engines.ddp import finished_elements
from planner.inventory import Moment, is_layer, optimizers
from planner.inventory.ends import embedding_weight
from planner.parallelism import zero
from planner.parallelism.case import Case, once
from planner.parallelism.rule import Rule
from planner.parallelism.rules import accepts
from planner.parallelism.zero import StateBytes, moment_bytes


@once
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


@once
def bucket_elements(case: Case) -> Number:
    """Elements of the contiguous reduce bucket, as the emitted configuration sets it."""
    return reduce_bucket_elements(case.layout, configured_elements(case))


def configured_elements(case: Case) -> Number:
    """Trained elements that buckets are sized to: a rank's, of the fullest pipeline stage (one file configures all)."""
    if not case.pipelined:
        return case.total(trainable=True)
    return maximum(0, *(case.at(stage).total(trainable=True) for stage in case.stages()))


def optimizer_bytes(case: Case, elements: Number) -> Number:
    """Master weights and states of a rank's partition of `elements`.

    The optimizer sees them laid end to end: Adafactor cannot factor that, and keeps a whole second moment. Muon's
    matrices lie in a partition of their own, whose momentum has the format gradients wait in.
    """
    each, settings = states(case), case.job.optimizer
    if settings.name != "muon":
        updated = each.master or each.weight  # at stage 0 in fp32 the weights themselves
        return elements * each.master + optimizers.state_bytes(settings, optimizers.flat(elements), updated)
    share = 1 - left_to_adamw(case)
    others = optimizers.two_moment_bytes(elements * (1 - share), each.master)
    return elements * each.master + optimizers.one_moment_bytes(elements * share, each.grad) + others


def left_to_adamw(case: Case) -> Number:
    """Share of the trained elements that Muon does not take: all but the layers' matrices."""
    hidden = sum(
        times * weight.elements
        for times, weight in case.counted()
        if is_layer(weight.unit) and weight.trainable and len(weight.shape) >= 2
    )
    return 1 - hidden / case.total(trainable=True)


@once
def frozen_bytes(case: Case) -> Number:
    """Weights that are not trained, whole; a 4-bit one in its own format."""
    narrow = states(case).weight
    return sum(
        times * weight.elements * (stored_weight_bytes(case, weight) if packed(case, weight) else narrow)
        for times, weight in case.counted()
        if not weight.trainable
    )


def drawn_bytes(case: Case) -> Number:
    """Bytes beside the weights of CPU processes while one comes: as it is built, where DeepSpeed trains another format,
    or as it is before it is packed."""
    return maximum(packed_weight_bytes(case), narrowed_bytes(case))


def narrowed_bytes(case: Case) -> Number:
    """Bytes of the largest weight that is drawn in a wider format than DeepSpeed trains it in; else 0."""
    narrows = states(case).weight < base_weight_bytes(case) and case.job.recipe.checkpoint is None
    return whole_weight_bytes(case) if narrows else 0.0


@once
def trained_sizes(case: Case) -> tuple[int, ...]:
    """Elements of every trained weight of this rank, in forward order (numbers, not columns); a tied table stands
    first, since the gradient of its lookup completes it."""
    units = dict(case.units())
    if case.walked_model.tied:
        first = {embedding_weight(case.model).name}
        units["embed"] = tuple(one for one in units["tail"] if one.name in first)
        units["tail"] = tuple(one for one in units["tail"] if one.name not in first)
    each = {unit: [one.elements for one in weights if one.trainable] for unit, weights in units.items()}
    return tuple(elements for unit in case.unit_by_unit() for elements in each[unit])


def bucket_count(case: Case, forward_order: bool) -> Number:
    """Reductions of a backward; in columns of weights, what filling every bucket would take."""
    if weights_are_columns(case):
        return ceil_div(case.total(trainable=True), bucket_elements(case))
    return len(flushes(case, forward_order))


@once
def flushes(case: Case, forward_order: bool) -> tuple[tuple[int, int], ...]:
    """(elements finished before, elements in the bucket) at every reduction of a backward."""
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


def reduced_bytes(case: Case) -> float:
    """Bytes of a gradient's element on its way to other ranks: its own format, or fp32 where ranks share sequences
    (seq_parallel_communication_data_type of stage 3; stages 1 and 2 take fp32 whatever it says, `allreduce_bucket`)."""
    return float(BYTES["fp32"]) if case.layout.cp_method == "ulysses" else states(case).grad


def flush_bytes(case: Case, moment: Moment, element_bytes: Callable[[int, int], Number]) -> Number:
    """The copies a reduction in the middle of backward makes of its bucket, of `element_bytes` an element of the flush
    (elements finished before it, elements in the bucket)."""
    if case.layout.zero_stage <= 1 or not moment.handed:
        return 0.0
    reductions = flushes(case, False)
    place = _flush_at(reductions, int(finished_elements(case, moment)), moment.in_flight)
    if place is None:
        return 0.0
    before, content = reductions[place]
    return content * element_bytes(before, content)


def _flush_at(reductions: Sequence[tuple[int, int]], finished: int, in_flight: int) -> int | None:
    """Which of `flushes` comes before the gradients in flight go into the bucket; the last comes after backward."""
    place = bisect_left(reductions, (finished,))
    return place if place < len(reductions) - 1 and reductions[place][0] < finished + in_flight else None


def flushing_layers(case: Case, moment: Moment, layers: Sequence[int], kinds: Sequence[Hashable]) -> list[int]:
    """In which of these layers, the moment's own first, a bucket goes as such a moment of their backward hands
    gradients on: the first of each kind. `kinds` has one for each of `flushes`, equal where as much memory is taken.

    Weights fill buckets whatever layer they are of, so the buckets of each layer may go at other moments.
    """
    start, before = int(finished_elements(case, moment)), _trained_before(case)
    reductions, found = flushes(case, False), dict[Hashable, int]()
    for layer in layers:
        passed = before[moment.layer + 1] - before[layer + 1]
        place = _flush_at(reductions, start + passed, moment.in_flight)
        if place is not None:
            found.setdefault(kinds[place], layer)
    return list(found.values())


@once
def _trained_before(case: Case) -> tuple[int, ...]:
    """Trained elements of the layers before each of the stage, and of all of them."""
    each = {kind: int(case.elements(kind, trainable=True)) for kind in case.kinds}
    return tuple(accumulate((each[kind] for kind in case.kind_by_layer), initial=0))


def with_terms(held: Held, more: Held) -> Held:
    """Both, term by term."""
    return held | {term: held.get(term, 0.0) + size for term, size in more.items()}


# -- Rules -------------------------------------------------------------------------------------------------------------

BUCKETS = ("reduce_bucket_elements", "allgather_bucket_elements", "overlap_comm")
"""Fields of a layout that set bucket sizes and overlap, at every stage."""

NO_REPLICAS = Rule(
    name="ZeRO shards over all data-parallel ranks",
    field="dp_replicate",
    holds=lambda case: case.layout.dp_replicate == 1,
    sentence=lambda case: "ZeRO shards over all data-parallel ranks",
    fix=lambda case: "Use dp_replicate=1, or engine fsdp2 for HSDP",
)

SPLIT_MODELS: tuple[Rule, ...] = (
    accepts("method", ("full", "lora"), "4-bit weights are not split over ranks"),
    accepts("precision", ("fp32", "bf16", "fp16", "pure-bf16"), "DeepSpeed casts the whole model to one 16-bit format"),
    accepts(
        "optimizer",
        ("adamw", "sgd", "lion", "adafactor", *optimizers.BITSANDBYTES_8BIT),
        "DeepSpeed's Muon wants models that are not split (runtime/bf16_optimizer.py)",
    ),
)
"""Jobs that DeepSpeed trains with tensor or pipeline parallelism."""


NO_GPT2 = Rule(
    name="AutoTP has no GPT-2",
    field="tp",
    # Its linears are Conv1D, which hold their weights the other way round (auto_tp.py, `AutoTP.supported`).
    holds=lambda case: (case.layout.tp == 1) | (case.model.family != "gpt2"),
    sentence=lambda case: f"DeepSpeed's AutoTP does not split GPT-2's modules, and {case.model.name} is one",
    fix=lambda case: "Use tp=1 and more data parallel ranks",
)
"""A rule of what splits linears as AutoTP does."""


START_ALIGNMENT = 2
"""Flat groups are padded to a multiple of this times the ranks (nccl_start_alignment_factor)."""


def partition_share(sizes: tuple[int, ...], ranks: int) -> int:
    """Elements of a rank's partition."""
    return -(-sum(sizes) // (ranks * START_ALIGNMENT)) * START_ALIGNMENT


def touching_elements(case: Case) -> Number:
    """Elements of every weight that touches the fullest rank's partition, whole."""
    sizes = trained_sizes(case)
    return by_value(lambda ranks: float(max(touching_by_rank(sizes, int(ranks)))), case.layout.dp_shard)


@lru_cache(maxsize=1024)
def touching_by_rank(sizes: tuple[int, ...], ranks: int) -> tuple[int, ...]:
    """Elements of the weights that touch each rank's partition, whole."""
    share = partition_share(sizes, ranks)
    kept = [0] * ranks
    start = 0
    for size in sizes:
        for rank in range(start // share, min(ranks - 1, (start + size - 1) // share) + 1):
            kept[rank] += size
        start += size
    return tuple(kept)


def largest_part_elements(case: Case) -> Number:
    """Elements of the largest part of one weight in any rank's partition."""
    sizes = trained_sizes(case)
    return by_value(lambda ranks: float(_largest_part(sizes, int(ranks))), case.layout.dp_shard)


@lru_cache(maxsize=1024)
def _largest_part(sizes: tuple[int, ...], ranks: int) -> int:
    share, start, largest = partition_share(sizes, ranks), 0, 0
    for size in sizes:
        first = min(size, share - start % share)  # up to the next rank's partition, then whole ones
        largest = max(largest, first, min(size - first, share))
        start += size
    return largest
