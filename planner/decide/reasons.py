"""Why this layout, in the field's plain words: small rules from the figures of an answer to a sentence that names them.

A rule is a function of `Seen` that returns its sentence, or None where its figures do not call for it; RULES lists them
in the order they are printed. Many ask `what_if`: the same prediction for a layout one step away (whatif.py). Not here:
why a layout does not fit or launch (estimation.py), or any figure's formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from planner.basics.units import format_bytes, format_volume
from planner.decide.answers import Answer, Estimate
from planner.decide.network_reasons import (
    more_nodes_stop_helping,
    one_node_before_several,
    pipeline_bubble,
    shard_inside_nodes_when_the_network_is_slow,
    slow_link,
    waits_for_slowest,
    what_the_network_costs,
)
from planner.decide.whatif import (
    Seen,
    batch_apart,
    largest_term,
    needed,
    of_memory,
    seconds,
    speed_ratio,
    what_if,
)
from planner.parallelism.case import spans_nodes
from planner.parallelism.rules import divisors
from planner.spec.layout import strategy_name

COSTS_TIME = 0.01
"""Share by which accumulation must lengthen a step before it is said to cost time."""

LARGE_LOGITS = 0.3
"""Share of the peak from which logits dominate it, were they not its largest term anyway."""


METHODS = {"lora": "LoRA", "qlora": "QLoRA"}


class Reason(msgspec.Struct, frozen=True):
    """One sentence or two, and the rule that said it."""

    reason: str
    text: str


ReasonRule = Callable[[Seen], str | None]


def reasons_of(found: Answer) -> tuple[Reason, ...]:
    """Everything that is worth saying of an answer's best layout, in the order of RULES."""
    if not found.estimates:
        return ()
    place = found.recommended
    if place is None:
        place = min(range(len(found.estimates)), key=lambda at: found.estimates[at].memory.device_bytes)
    others = found.estimates[:place] + found.estimates[place + 1 :]
    seen = Seen(found.question, found.estimates[place], others)
    return tuple(Reason(rule.__name__, text) for rule in RULES if (text := rule(seen)) is not None)


# -- what limits ---------------------------------------------------------------------------------------------------


def what_limits(seen: Seen) -> str | None:
    """The largest part of the step, or the memory that is missing."""
    one, time = seen.one, seen.one.time
    if one.memory.host_fits is False:
        return (
            f"Host memory limits: {one.name} needs {format_bytes(one.memory.host_node_bytes)} on each node, which "
            f"has {format_bytes(one.case.cluster.host_memory_bytes)}."
        )
    if not one.fits:
        term, size = largest_term(one.memory)
        return (
            f"Memory limits: {one.name} needs least, {format_bytes(one.memory.device_bytes)} on a card of which "
            f"{format_bytes(seen.usable_bytes)} may be used; its largest term is {term}, {format_bytes(size)} live "
            f"in {one.memory.peak.phase}."
        )
    if time.step_s is None:
        return None
    slowest = f"the wait for stage {time.slowest_stage}, the pipeline's slowest"
    parts = {
        "compute": time.compute_s,
        "communication that nothing hides": time.exposed_comm_s,
        "the pipeline's ramp": time.ramp_s,
        slowest: waits_for_slowest(time),
        "the optimizer": time.optimizer_s,
    }
    shares = sorted(((float(part or 0) / float(time.step_s), name) for name, part in parts.items()), reverse=True)
    (first, limit), (second, then) = shares[:2]
    rest = f"; then {then}, {second:.1%}" if second >= 0.0005 else ""
    return f"What limits the step is {limit}, {first:.1%} of {seconds(time.step_s)}{rest}."


def memory_limits_the_micro_batch(seen: Seen) -> str | None:
    """Twice the micro-batch would not fit, and which term is in the way."""
    if not seen.one.fits or seen.question.pins.micro_batch_size is not None:
        return None
    micro = seen.layout.micro_batch_size * 2
    accum = seen.layout.grad_accum
    if seen.question.job.global_batch_size is not None:
        accum, odd = divmod(accum, 2)
        if odd:
            return None
    larger = what_if(seen, micro_batch_size=micro, grad_accum=accum)
    if larger is None or larger.memory.device_bytes <= seen.usable_bytes:
        return None
    term, size = largest_term(larger.memory)
    return (
        f"Memory limits the micro-batch: {micro} sequences instead of {micro // 2} would need "
        f"{format_bytes(larger.memory.device_bytes)} on a card of which {format_bytes(seen.usable_bytes)} may be used, "
        f"most of it {term}, {format_bytes(size)} live."
    )


def logits_dominate(seen: Seen) -> str | None:
    """The loss holds more than anything else at the peak."""
    peak = seen.one.memory.peak
    term, _ = largest_term(seen.one.memory)
    logits = peak.terms["logits"]
    if not logits or (term != "logits" and logits < LARGE_LOGITS * peak.total):
        return None
    case = seen.one.case
    return (
        f"Logits dominate the peak: {format_bytes(logits)} of {format_bytes(peak.total)} live in {peak.phase}, "
        f"for {case.tokens:,} tokens and a vocabulary of {case.model.vocab:,}. "
        "A chunked or fused loss never holds them whole."
    )


# -- what is sharded -----------------------------------------------------------------------------------------------


def ddp_when_it_fits(seen: Seen) -> str | None:
    """Whole replicas need no sharding; what it costs or gains to shard all the same."""
    one = seen.one
    if seen.layout.data_parallel == 1:
        return None
    if _replicated(one) and one.fits and not one.case.lora:
        sharded = next((other for other in seen.others if other.case.layout.dp_shard > 1 and not other.case.lora), None)
        beside = f"; {sharded.name} would send {format_volume(sharded.comm.wire_bytes_per_rank)}" if sharded else ""
        return (
            f"DDP fits, {of_memory(one)}: nothing has to be sharded. It reduces the gradients once a step, "
            f"{format_volume(one.comm.all_reduce_bytes)}, and sends twice that less a rank's share, "
            f"{format_volume(one.comm.wire_bytes_per_rank)}{beside}."
        )
    plain = (other for other in seen.others if other.strategy == strategy_name(other.case.layout))
    ddp = next((other for other in plain if _replicated(other) and other.fits), None)
    if ddp is None or seen.layout.dp_shard == 1 or ddp.case.job.method != one.case.job.method:
        return None
    gain = speed_ratio(one.throughput, ddp.throughput)
    if gain is None:
        return f"DDP fits too, {of_memory(ddp)}: memory asks for no sharding."
    batch = batch_apart(seen.layout, ddp.case.layout)
    speed = f"gives {gain:.2f} times its tokens/s{batch}" if gain >= 1.01 else "is hardly faster"
    return f"DDP fits too, {of_memory(ddp)}, and is the simplest: memory asks for no sharding. {one.name} {speed}."


def _replicated(one: Estimate) -> bool:
    """Whether every rank holds the model whole (DDP)."""
    return one.case.layout.facts.copies == "replicas"


def lora_before_sharding(seen: Seen) -> str | None:
    """Where the frozen base fits whole, adapters under DDP send next to nothing."""
    one = seen.one
    if one.case.lora and _replicated(one) and seen.layout.data_parallel > 1 and one.fits:
        ranks = seen.layout.data_parallel
        sharded = what_if(seen, engine="fsdp2", zero_stage=3, dp_replicate=1, dp_shard=ranks)
        if sharded is None:
            return None
        return (
            f"{METHODS[one.case.job.method]} under DDP before FSDP: the frozen base fits whole, {of_memory(one)}, "
            "so a step sends only the "
            f"adapters' gradients, {format_volume(one.comm.wire_bytes_per_rank)} a GPU; "
            f"FSDP would gather the base, {format_volume(sharded.comm.wire_bytes_per_rank)}."
        )
    if one.case.lora or seen.layout.dp_shard == 1:
        return None
    able = (other for other in seen.others if other.case.lora and _replicated(other) and other.fits)
    lora = next(able, None)
    if lora is None:
        return None
    return (
        f"If adapters are enough, {METHODS[lora.case.job.method]} under DDP comes before sharding: {of_memory(lora)}, "
        f"and {format_volume(lora.comm.wire_bytes_per_rank)} a GPU and step instead of "
        f"{format_volume(one.comm.wire_bytes_per_rank)}."
    )


def what_adapters_send(seen: Seen) -> str | None:
    """What LoRA is known for: under DDP a step sums the gradients of the adapters alone."""
    told = [
        f"{format_volume(other.comm.all_reduce_bytes)} for {METHODS[other.case.job.method]}"
        for other in (seen.one, *seen.others)
        if other.case.lora and _replicated(other) and other.case.layout.data_parallel > 1
    ]
    return f"Under DDP a step sums only the adapters' gradients: {' and '.join(told)}." if told else None


def recompute_costs(seen: Seen) -> str | None:
    """What recomputation adds to the compute and to the step, and what it saves."""
    one, how = seen.one, seen.layout.recompute
    if how == "none":
        return None
    kept = what_if(seen, recompute="none")
    if kept is None:
        return None
    what = {"full": "every layer", "attention": "the attention core"}.get(how, "all but matrix products")
    adds = "takes time that is not known"
    if one.time.step_s and kept.time.step_s and one.time.compute_s and kept.time.compute_s:
        extra = float(one.time.compute_s) / float(kept.time.compute_s) - 1
        now, then = seconds(one.time.step_s), seconds(kept.time.step_s)
        costs = "which other times of the step hide," if now == then else f"for a step of {now} instead of {then},"
        adds = f"adds {extra:.1%} to the compute, {costs}"
    saved = kept.memory.device_bytes - one.memory.device_bytes
    saves = f"saves {format_bytes(saved)} on the card" if saved > 0 else "saves no memory"
    return f"Recomputing {what} {adds} and {saves}: without it {needed(seen, kept)}."


def experts_padded_to_the_shards(seen: Seen) -> str | None:
    """Weights that have a row an expert are padded to a row a shard, so that more shards can need more memory."""
    one, layout, moe = seen.one, seen.layout, seen.one.case.model.moe
    if moe is None or layout.zero_stage < 3 or layout.ep > 1 or layout.dp_shard * layout.cp <= moe.experts:
        return None
    fewer = [
        what_if(seen, dp_shard=shard, dp_replicate=layout.data_parallel // shard)
        for shard in divisors(layout.dp_shard)[1:-1]
    ]
    best = min((other for other in fewer if other), key=lambda other: other.memory.device_bytes, default=None)
    if best is None or best.memory.device_bytes >= one.memory.device_bytes:
        return None
    return (
        f"More shards do not save memory here: the weights of {moe.experts} experts are padded to "
        f"{layout.dp_shard * layout.cp} shards. With dp_shard={best.case.layout.dp_shard} "
        f"{needed(seen, best)}, instead of {format_bytes(one.memory.device_bytes)}."
    )


def tensor_parallel_inside_the_node(seen: Seen) -> str | None:
    """Tensor parallelism communicates in every layer, so it wants the fastest link."""
    layout, cluster = seen.layout, seen.one.case.cluster
    if layout.tp == 1:
        return None
    sent = sum(call.wire_bytes_per_rank for call in seen.one.comm.engine if call.group == "tp")
    carried = f"{format_volume(sent)} a GPU and step" if sent else "what it sends in every layer"
    fast, slow = cluster.fast_domain, slow_link(cluster)
    faster = fast.link.bytes_per_s_per_direction / slow.bytes_per_s_per_direction
    links = f"{fast.link.name}, {faster:.3g} times as fast as {slow.name}"
    if spans_nodes(layout, "tp", fast.gpus):
        inside = math.gcd(layout.tp, fast.gpus)
        return (
            f"Tensor parallelism leaves the {fast.name}: tp={layout.tp} on {fast.name}s of {fast.gpus} takes {carried} "
            f"off {links}. Use tp={inside} or less."
        )
    return f"Tensor parallelism stays inside the {fast.name}: tp={layout.tp} keeps {carried} on {links}."


# -- the batch -----------------------------------------------------------------------------------------------------


def a_changed_global_batch(seen: Seen) -> str | None:
    """Layouts side by side step on different batches where none was asked for: not the same training."""
    if seen.question.job.global_batch_size is not None:
        return None
    new = seen.layout.global_batch_size
    alike = [other for other in seen.others if other.fits and other.case.job.method == seen.one.case.job.method]
    differing = [other for other in alike if other.case.layout.global_batch_size != new]
    if not differing:
        return None
    other = differing[0]
    old, job = other.case.layout.global_batch_size, seen.question.job
    mine, theirs = seen.one.name, other.name
    if mine == theirs:
        mine, theirs = (
            f"{mine} of {layout.micro_batch_size} x {layout.grad_accum}" for layout in (seen.layout, other.case.layout)
        )
    return (
        f"A step of {mine} sees {new} sequences, one of {theirs} {old}: that changes the training, not only its speed. "
        f"The same tokens take {old / new:.3g} times the steps, and the learning rate (now {job.optimizer.lr:g}) has "
        "to be chosen for the batch. --global-batch-size holds it."
    )


def accumulation_saves_memory(seen: Seen) -> str | None:
    """What the whole step's batch at once would take."""
    one, layout = seen.one, seen.layout
    if layout.grad_accum == 1 or layout.pp > 1:
        return None
    whole = layout.micro_batch_size * layout.grad_accum
    together = what_if(seen, micro_batch_size=whole, grad_accum=1)
    if together is None:
        return None
    cost, time = "", ""
    if one.time.step_s and together.time.step_s:
        slower = float(one.time.step_s) / float(together.time.step_s) - 1
        cost = f" and costs time, {slower:.1%}" if slower >= COSTS_TIME else " and costs no time"
        time = f", for a step of {seconds(together.time.step_s)} instead of {seconds(one.time.step_s)}"
    return (
        f"Accumulation saves memory{cost}: with all {whole} sequences of a rank at once instead of "
        f"{layout.grad_accum} x {layout.micro_batch_size}, {needed(seen, together)}{time}."
    )


RULES: tuple[ReasonRule, ...] = (
    what_limits,
    ddp_when_it_fits,
    lora_before_sharding,
    what_adapters_send,
    one_node_before_several,
    what_the_network_costs,
    shard_inside_nodes_when_the_network_is_slow,
    more_nodes_stop_helping,
    tensor_parallel_inside_the_node,
    pipeline_bubble,
    memory_limits_the_micro_batch,
    logits_dominate,
    recompute_costs,
    experts_padded_to_the_shards,
    accumulation_saves_memory,
    a_changed_global_batch,
)
"""In the order they are printed: what limits, what to shard, the network, memory, the batch."""
