"""DeepSpeed ZeRO: the engine of all stages, and stages 1 and 2 (and 0, a pipeline's): weights whole, states in
one flat partition a rank.

Gradients are averaged by all-reduce of whole buckets (DeepSpeed's default on every transport), at the end of backward
at stage 1 and whenever a bucket is full at stage 2. Read in deepspeed 0.19.8, runtime/zero/stage_1_and_2.py, and
measured there. Not counted: the fp64 copy of a weight's part that its norm is taken of under offload, in the last
micro-batch (`set_norm_for_param_grad_in_gpu`); it was 0.2 % of the peak in one of twelve measured runs. Not here: stage
3 (deepspeed_stage3.py), or what all stages share (deepspeed_common.py).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any

from planner.basics.arith import Number, by_value, ceil_div, in_shape_of, is_column, maximum, minimum, where
from planner.basics.quantities import BYTES
from planner.engines import deepspeed_stage3
from planner.engines.base import Blocks, Call, Engine, Held, Holder, HookOperations
from planner.engines.common import (
    allgather_bucket_elements,
    implementation,
    packed_weight_bytes,
    parallel_compute,
    sent_elements,
)
from planner.engines.ddp import finished_elements, waiting_elements
from planner.engines.deepspeed_common import (
    BUCKETS,
    NO_REPLICAS,
    START_ALIGNMENT,
    bucket_count,
    bucket_elements,
    configured_elements,
    drawn_bytes,
    flush_bytes,
    flushes,
    flushing_layers,
    frozen_bytes,
    largest_part_elements,
    left_to_adamw,
    optimizer_bytes,
    partition_share,
    reduced_bytes,
    states,
    touching_by_rank,
    touching_elements,
    trained_sizes,
    with_terms,
)
from planner.inventory import Compute, Moment, optimizers
from planner.inventory.mlp import parameters_of
from planner.inventory.packaged import is_part
from planner.parallelism import zero
from planner.parallelism.case import Case, once
from planner.parallelism.rule import Rule
from planner.parallelism.rules import COMMON, JOB, reads_only, splits_only
from planner.parallelism.zero import whole_bytes


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
    share, total = partition_share(sizes, ranks), sum(sizes)
    found: list[tuple[int, int]] = []
    for rank, kept in reversed([*enumerate(touching_by_rank(sizes, ranks))]):
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
        share, fuller, reduced = partition_share(sizes, ranks), _fuller_ranks(sizes, ranks), 0
        for one, (finished, content) in zip(found, flushed, strict=True):
            one += [_spans(total - finished, content, share), bisect_left(fuller, (reduced,))]
            reduced = finished
    return tuple(map(tuple, found))


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
    laid_out = by_value(
        lambda ranks: float(_spans(start, content, partition_share(sizes, int(ranks)))), case.layout.dp_shard
    )
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


# -- The engine of all stages ------------------------------------------------------------------------------------------

HOST_OPTIMIZERS = ("adamw", "lion")
"""Those with a step for CPUs (deepspeed/ops/adam/cpu_adam.py, ops/lion/cpu_lion.py)."""

LIMITS = (
    "zero3_prefetch_elements",
    "zero3_persistence_elements",
    "zero3_max_live_elements",
    "zero3_max_reuse_elements",
)

ON_HOST: tuple[Rule, ...] = (
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
)
"""What ZeRO asks of offload."""


FETCH, FETCH_BACK, REDUCED = 20, 7, 33
"""Operations' worth of the host at stage 3 for each weight: in a forward, and when that runs again, its module's hooks,
fetch and release; in a backward these, and what joins, reduces and shares out a gradient. `bench/zero_host.py` measures
them (deepspeed 0.19.8): Python beside a plain model's operations. On cores that others used too, repeats gave 16 to 32
for the first and 40 to 63 for the others together; values near the lower end are taken, since sharing a core lengthens
Python more than it does kernels. Transformers 4.57's experts, 32 a layer, took 29 and 50 for each of their linear ones
on the same cores."""
REDUCED_WHOLE = 12
"""The same at stages 1 and 2: a gradient's hook, its copy into the bucket and its share."""


def _at_stage3(case: Case) -> bool:
    return case.layout.zero_stage == 3


def updated_elements(case: Case) -> Number:
    """Elements whose optimizer states a rank has."""
    if _at_stage3(case):
        return deepspeed_stage3.shard_elements(case, trainable=True)
    return partition_elements(case)


NORM_BYTES = 8
"""DeepSpeed takes norms in fp64 (runtime/zero/utils.py, get_norm_dtype)."""

SUB_GROUP_ELEMENTS = 10**9
"""Stage 3 updates a rank's weights in groups of this size (elements; sub_group_size, runtime/zero/config.py)."""


def _updated_at_once(case: Case) -> Number:
    elements = updated_elements(case)
    return minimum(elements, SUB_GROUP_ELEMENTS) if _at_stage3(case) else elements


def _step_temporaries(case: Case, elements: Number) -> Number:
    """The optimizer's own; Muon's matrices are whole on the rank that updates them, one after the other."""
    settings, master = case.job.optimizer, states(case).master or states(case).weight
    seen: optimizers.UpdateUnits = [([optimizers.flat(elements)], 1)]
    if settings.name == "muon":
        matrices = [w for unit in case.kinds for w in case.units()[unit] if w.trainable and len(w.shape) >= 2]
        rest = optimizers.flat(elements * left_to_adamw(case))
        seen = [([optimizers.TrainedTensor(w.shape, w.elements) for w in matrices], 1), ([rest], 1)]
    return optimizers.temporaries(settings, seen, master, implementation(case))


class Deepspeed(Engine):
    """ZeRO under Accelerate."""

    name = "deepspeed"
    rules: tuple[Rule, ...] = (
        *splits_only(name),
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
        *ON_HOST,
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
            sentence=lambda case: (
                "ZeRO casts the whole model to one 16-bit format and keeps no fp32 weights to convert"
            ),
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

    def hooks(self, case: Case, unit: str) -> HookOperations:
        """What stage 3's hooks around modules, and every stage's for gradients, take of the host."""
        weights = [weight for weight in case.units()[unit] if not weight.replaced and not is_part(case.parts, weight)]
        count = sum(parameters_of(weight, case.parts) for weight in weights)
        trained = sum(parameters_of(weight, case.parts) for weight in weights if weight.trainable)
        if case.layout.zero_stage < 3:
            return HookOperations(backward=REDUCED_WHOLE * trained)
        return HookOperations(FETCH * count, FETCH_BACK * count + REDUCED * trained)

    def compute(self, case: Case) -> Compute:
        """DeepSpeed casts the model itself: no autocast, weights and results in the training format."""
        element = float(BYTES["fp32"] if case.job.precision == "fp32" else BYTES["bf16"])
        return Compute(
            weight_bytes=element,
            element_bytes=element,
            lora=case.lora,
            # DeepSpeed casts adapters with everything else.
            adapter_bytes=element,
            # Stage 3 puts its own linear function in place of PyTorch's, and that keeps the input of frozen weights
            # too.
            linear_keeps_input=case.layout.zero_stage == 3,
            **parallel_compute(case),
        )

    def resident(self, case: Case) -> Held:
        """What stays between steps, on CPU processes what is offloaded too."""
        held = deepspeed_stage3.resident(case) if _at_stage3(case) else resident(case)
        return held if case.host_apart else with_terms(held, self.host(case))

    def host(self, case: Case, *, built: bool = False) -> Held:
        """Bytes of one rank in host memory by term; empty without offload. `built`: before the first step, when there
        are neither moments nor accumulated gradients."""
        layout = case.layout
        if not (layout.offload_optimizer or layout.offload_params):
            return {}
        held = deepspeed_stage3.host(case) if _at_stage3(case) else host(case, built)
        if built and layout.offload_optimizer:
            held["optimizer"] = updated_elements(case) * states(case).master
        return held

    def outside(self, case: Case) -> list[tuple[str, Held]]:
        """Building, the reductions that end a backward (activations are gone by then), and the step."""
        stay = self.resident(case)
        reduced = deepspeed_stage3.final_reduction if _at_stage3(case) else final_reduction
        return [
            *(("load", held) for held in self.load(case)),
            ("backward", reduced(case, stay)),
            *(("optimizer", held) for held in [*self.norm(case), *self.step(case)]),
        ]

    def load(self, case: Case) -> list[Held]:
        """The fullest moments while model, engine and optimizer are built."""
        on_host = {} if case.host_apart else self.host(case, built=True)
        return deepspeed_stage3.load(case, on_host) if _at_stage3(case) else load(case, on_host)

    def load_host(self, case: Case) -> Number:
        """Bytes of one rank in host memory where the device has no room to lay the weights end to end (stages 1 and
        2)."""
        return 0.0 if _at_stage3(case) else load_host(case)

    def holder(self, case: Case) -> Holder:
        """Resident states, gradients so far, the bucket being filled, and (stage 3) the weights in use."""
        stay = self.resident(case)
        return deepspeed_stage3.holder(case, stay) if _at_stage3(case) else holder(case, stay)

    def reducing_layers(self, case: Case, moment: Moment, layers: Sequence[int]) -> Iterable[int]:
        """Those where a gradient does not fit into the bucket, which goes first."""
        if case.layout.zero_stage <= 1:  # buckets go when backward is over
            return ()
        kinds = [size for _, size in flushes(case, False)] if _at_stage3(case) else reductions(case)
        return flushing_layers(case, moment, layers, kinds)

    def step(self, case: Case) -> list[Held]:
        """The partition's gradients, laid end to end, then in the master's format; beside that the optimizer's
        temporaries.

        AdamW's loop on CPU holds two results of the partition's size, the list update one (its list has one tensor),
        and the fused one none. Up to stage 2 the gradients are let go once they are flat; stage 3 has buffers for them.
        Stage 3 then gathers the weights it never releases.
        """
        each, stay, elements = states(case), self.resident(case), _updated_at_once(case)
        # On the host one kernel updates in place, with the gradient that is there.
        on_device = in_shape_of(elements) if case.layout.offload_optimizer else elements * each.master
        updating = stay | {"temporaries": on_device + _step_temporaries(case, elements)}
        if case.layout.zero_stage == 0:
            updating["grads"] = case.total(trainable=True) * each.grad
            return [updating]
        if case.layout.offload_optimizer:
            moments = [stay | {"temporaries": on_device}]
        else:
            kept = 0.0 if _at_stage3(case) else elements * each.grad
            copied = elements * (each.grad if each.grad != each.master else 0.0)
            moments = [stay | {"grads": stay["grads"] + kept, "temporaries": copied + on_device}, updating]
        return [*moments, deepspeed_stage3.after_step(case, stay)] if _at_stage3(case) else moments

    def norm(self, case: Case) -> list[Held]:
        """Stages 1 and 2 take the norm of each gradient of the partition in fp64, one after the other, before they step
        (stage_1_and_2.py, get_grad_norm_direct). Stage 3's gradients are a rank's parts, and small."""
        if case.layout.zero_stage not in (1, 2) or case.layout.offload_optimizer:
            return []
        stay, elements = self.resident(case), partition_elements(case)
        one = in_shape_of(elements, largest_part_elements(case) * NORM_BYTES)
        return [stay | {"grads": stay["grads"] + elements * states(case).grad, "temporaries": one}]

    def blocks(self, case: Case) -> Blocks | None:
        """A rank's part of the gradients laid end to end, and that in the master's format: one allocation each
        (stage_1_and_2.py and stage3.py, `step`: flatten, then `.to`)."""
        if case.layout.zero_stage == 0 or case.layout.offload_optimizer:
            return None
        each, elements = states(case), _updated_at_once(case)
        sizes = (elements * (each.grad if each.grad != each.master else 0.0), elements * each.master)
        stepping, loading = (
            maximum(0.0, *(sum(held.values()) for held in some)) for some in (self.step(case), self.load(case))
        )
        return Blocks(sizes, stepping, loading)

    def collectives(self, case: Case) -> list[Call]:
        """Stages 1 and 2: bucketed all-reduces and one gather of the new weights; stage 3: gathers by weight."""
        return deepspeed_stage3.collectives(case) if _at_stage3(case) else collectives(case)

    def ideal(self, case: Case) -> list[Call]:
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


ENGINE = Deepspeed()
