"""Why this layout, in the field's plain words: small rules from the figures of an answer to a sentence that names them.

A rule is a function of `Seen` that returns its sentence, or None where its figures do not call for it; RULES lists them
in the order they are printed. Many ask `what_if`: the same prediction for a layout one step away (levers.py). Not here:
why a layout does not fit or launch (estimation.py), or any figure's formula.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from planner.basics.quantities import BYTES, format_bytes, format_volume
from planner.decide.answers import Answer, Estimate
from planner.decide.candidates import floor_bytes
from planner.decide.levers import (
    Seen,
    WhatIf,
    batch_apart,
    fits,
    largest_term,
    needed,
    of_memory,
    seconds,
    speed_ratio,
    what_if,
)
from planner.figures.memory import device_bytes
from planner.figures.steptime import StepTime
from planner.parallelism.case import spans_nodes
from planner.parallelism.rules import divisors
from planner.spec import Cluster, Link
from planner.spec.layout import strategy_name

SLOW_NETWORK = 0.1
"""Share of a step that waits for communication from which other ways to shard are worth a sentence."""


POOR_DOUBLING = 1.6
"""Times the tokens/s that twice the nodes must give, or it is said that they stop helping: 80 % of twice."""


ETHERNET = Link(name="100 GbE", bytes_per_s_per_direction=12.5e9, latency_s=20e-6)
INFINIBAND = Link(name="InfiniBand NDR", bytes_per_s_per_direction=50e9, latency_s=5e-6)
"""What people weigh a network against: a node's one adapter for all of its GPUs, and 400 Gbit/s for each (the links of
presets/gpus/a10g-24gb.toml and presets/nodes/dgx-h100.toml)."""

LEAST_SHARE = 0.0005
"""Share of a step that is printed as more than nothing."""

UNEVEN_STAGES = 0.01
"""Share of a step that the first stage waits for a slower one from which it is worth a sentence."""


def one_node_before_several(seen: Seen) -> str | None:
    """What several nodes (or NVLink racks) add where one would hold it."""
    one, cluster = seen.one, seen.one.case.cluster
    fast = cluster.fast_domain
    several, left = divmod(cluster.gpus, fast.gpus)
    if several < 2 or left or not one.fits:
        return None
    alone = _on_one_node(seen, several)
    if alone is None:
        return None
    gain = speed_ratio(one.throughput, alone.throughput)
    speed = "" if gain is None else f", and give {gain:.2f} times one {fast.name}'s tokens/s"
    worth = "for speed" if gain is None or gain > 1 + SLOW_NETWORK else "no gain"
    return (
        f"One {fast.name} would hold it, {format_bytes(alone.memory.device_bytes)} on the card of each of {fast.gpus} "
        f"GPUs{batch_apart(alone.case.layout, seen.layout)}: {several} {fast.name}s are {worth}. They send "
        f"{format_volume(one.comm.inter_node_bytes_per_rank)} a GPU and step over {slow_link(cluster).name}{speed}."
    )


def _on_one_node(seen: Seen, several: int) -> WhatIf | None:
    """The same split on one of several nodes, with as many times fewer data-parallel ranks, at the largest micro-batch
    up to this one's that fits."""
    layout, nodes = seen.layout, seen.one.case.cluster.nodes
    copies = math.gcd(layout.dp_replicate, several)
    if layout.dp_shard % (several // copies):
        return None
    sizes = {"dp_replicate": layout.dp_replicate // copies, "dp_shard": layout.dp_shard // (several // copies)}
    fixed = seen.question.job.global_batch_size is not None
    micro, accum = layout.micro_batch_size, layout.grad_accum * (several if fixed else 1)
    cluster = msgspec.structs.replace(seen.one.case.cluster, nodes=nodes // several)
    case = msgspec.structs.replace(seen.one.case, cluster=cluster, layout=msgspec.structs.replace(layout, **sizes))
    if device_bytes(case, floor_bytes(case)) > seen.usable_bytes:
        return None  # the states alone are too large: no walk is needed to know it
    while True:
        alone = what_if(seen, cluster, micro_batch_size=micro, grad_accum=accum, **sizes)
        if alone is None or fits(seen, alone):
            return alone
        if micro % 2 or alone.memory.host_fits is False:
            return None
        micro, accum = micro // 2, accum * 2


def what_the_network_costs(seen: Seen) -> str | None:
    """The step on this network against 100 GbE, or InfiniBand against this one, as it overlaps and if nothing did."""
    one, cluster = seen.one, seen.one.case.cluster
    link = slow_link(cluster)
    if not one.fits or cluster.nodes == 1 or cluster.levels[-1].link != link or cluster.gpu.kind == "cpu":
        return None
    ethernet = msgspec.structs.replace(
        ETHERNET, bytes_per_s_per_direction=ETHERNET.bytes_per_s_per_direction / cluster.gpus_per_node
    )
    slower = link.bytes_per_s_per_direction <= ethernet.bytes_per_s_per_direction
    other = INFINIBAND if slower else ethernet
    then = what_if(seen, msgspec.structs.replace(cluster, inter_link=other))
    if then is None or not one.time.step_s or not then.time.step_s:
        return None
    fast, slow = (then.time, one.time) if slower else (one.time, then.time)
    names = (other.name, link.name) if slower else (link.name, other.name)
    hidden, bare = (1 - spent(fast) / spent(slow) for spent in (lambda time: float(time.step_s or 0), _without_overlap))
    if bare < LEAST_SHARE:
        return None
    shares = f"{hidden:.1%} of the step; {bare:.1%} if nothing overlapped"
    return f"{names[0]} against {names[1]}: {shares}."


def _without_overlap(time: StepTime) -> float:
    """Seconds of the step if all that is sent were waited for."""
    return float(time.step_s or 0) - float(time.exposed_comm_s or 0) + float(time.comm_s or 0)


def shard_inside_nodes_when_the_network_is_slow(seen: Seen) -> str | None:
    """HSDP or ZeRO++'s hpZ where the step waits for gathers between nodes, and why HSDP where it was chosen."""
    one, layout, cluster = seen.one, seen.layout, seen.one.case.cluster
    fast = cluster.fast_domain
    if layout.zero_stage < 3 or layout.dp_shard == 1 or cluster.gpus <= fast.gpus or not one.time.step_s:
        return None
    if not spans_nodes(layout, "dp_shard", fast.gpus):
        return _why_hsdp(seen)
    waited = float(one.time.exposed_comm_s or 0)
    share = waited / float(one.time.step_s)
    shard = fast.gpus // (layout.tp * layout.cp)
    if share < SLOW_NETWORK or shard < 1 or layout.data_parallel % shard:
        return None
    slow = f"The network is slow for this: {seconds(waited)} of the step, {share:.1%}, wait for communication."
    if shard == 1:  # the other groups fill the node: no shards are left inside it
        return slow
    sizes: dict[str, object] = {"dp_shard": shard, "dp_replicate": layout.data_parallel // shard}
    inside = what_if(seen, **sizes) or what_if(seen, engine="fsdp2", **sizes)
    if inside is not None and fits(seen, inside):
        if float(inside.time.step_s or 0) >= float(one.time.step_s):
            return None
        return (
            f"{slow} HSDP keeps the gathers inside nodes (dp_shard={shard}): "
            f"{format_volume(inside.comm.inter_node_bytes_per_rank)} a GPU between nodes instead of "
            f"{format_volume(one.comm.inter_node_bytes_per_rank)}, a step of {seconds(inside.time.step_s)} instead of "
            f"{seconds(one.time.step_s)}, {format_bytes(inside.memory.device_bytes)} on the card."
        )
    if inside is not None:
        slow += f" HSDP inside nodes does not fit ({format_bytes(inside.memory.device_bytes)} on the card)."
    return slow + _hpz(seen, shard)


def _why_hsdp(seen: Seen) -> str | None:
    one, layout = seen.one, seen.layout
    flat = what_if(seen, dp_shard=layout.data_parallel, dp_replicate=1)
    if flat is None or layout.dp_replicate == 1:
        return None
    here, there = one.comm.inter_node_bytes_per_rank, flat.comm.inter_node_bytes_per_rank
    if here >= there or float(one.time.exposed_comm_s or 0) >= float(flat.time.exposed_comm_s or 0):
        return None
    return (
        f"HSDP because the network is slow: gathers stay inside nodes, so {format_volume(here)} a GPU and step go "
        f"between them instead of {format_volume(there)}, and {seconds(one.time.exposed_comm_s)} are waited for "
        f"instead of {seconds(flat.time.exposed_comm_s)}."
    )


def _hpz(seen: Seen, shard: int) -> str:
    """A second copy of the weights that compute, sharded over a node alone, serves the gathers of backward (Wang et al.
    2023, ZeRO++, section 3.2)."""
    if seen.layout.zero_secondary_shard:
        return ""
    calls = [call for call in seen.one.comm.engine if (call.op, call.group) == ("all_gather", "dp_shard")]
    gathered = sum(call.wire_bytes_per_rank for call in calls)
    backward = sum(call.wire_bytes_per_rank for call in calls if call.phase == "backward")
    if not backward:
        return ""
    copy = BYTES["fp32" if seen.question.job.precision == "fp32" else "bf16"] * seen.one.case.total() / shard
    if seen.one.memory.device_bytes + copy > seen.usable_bytes:
        return ""
    return (
        f" ZeRO++'s secondary shards (hpZ) would serve backward's gathers inside nodes, {backward / gathered:.0%} of "
        f"all gathers, for a copy of {format_bytes(float(copy))} live."
    )


def more_nodes_stop_helping(seen: Seen) -> str | None:
    """What twice the nodes would give, where that is much less than twice."""
    one, layout, job = seen.one, seen.layout, seen.question.job
    if not one.time.step_s or not one.fits or layout.world_size == 1:
        return None
    axis = "dp_shard" if layout.dp_shard > 1 and layout.dp_replicate == 1 else "dp_replicate"
    changes: dict[str, object] = {axis: getattr(layout, axis) * 2}
    if job.global_batch_size is not None:
        split = next((name for name in ("grad_accum", "micro_batch_size") if getattr(layout, name) % 2 == 0), None)
        if split is None:
            each = layout.micro_batch_size * layout.grad_accum
            return (
                f"More nodes stop helping: a global batch of {job.global_batch_size} gives each of "
                f"{layout.data_parallel} data-parallel ranks {each} sequence{'s' if each > 1 else ''}, "
                "which twice as many ranks cannot share evenly."
            )
        changes[split] = getattr(layout, split) // 2
    nodes = seen.one.case.cluster.nodes * 2
    twice = what_if(seen, msgspec.structs.replace(seen.one.case.cluster, nodes=nodes), **changes)
    gain = None if twice is None else speed_ratio(twice.throughput, one.throughput)
    if twice is None or gain is None or gain >= POOR_DOUBLING:
        return None
    now, then = (float(time.exposed_comm_s or 0) / float(time.step_s or 1) for time in (one.time, twice.time))
    return (
        f"More nodes stop helping: {nodes} instead of {nodes // 2} would give {gain:.2f} times the tokens/s, with "
        f"{then:.1%} of the step waiting for communication (now {now:.1%})."
    )


def pipeline_bubble(seen: Seen) -> str | None:
    """What a pipeline stands idle: for its ramp, which more micro-batches shorten, and for its slowest stage, which
    they do not."""
    layout, time = seen.layout, seen.one.time
    if layout.pp == 1 or not time.step_s or time.ramp_s is None:
        return None
    step_s, waits_s = float(time.step_s), waits_for_slowest(time)
    idle = (
        f"stands idle for {time.ramp_s / step_s:.1%} of the step, in the ramp and for sends, with {layout.grad_accum} "
        f"micro-batches{_with_more_micro_batches(seen)}."
    )
    if waits_s < UNEVEN_STAGES * step_s:
        return f"The pipeline of {layout.pp} stages {idle}"
    return (
        f"Stage {time.slowest_stage} of the pipeline's {layout.pp} is the slowest: the first waits for it "
        f"{seconds(waits_s)} of a step of {seconds(step_s)}, {waits_s / step_s:.1%}, which more micro-batches do not "
        f"shorten. Even the slowest {idle}"
    )


def waits_for_slowest(time: StepTime) -> float:
    """Seconds of a step that the first stage waits for a stage whose passes take longer."""
    return 0.0 if time.ramp_s is None else max(float(time.bubble_s) - time.ramp_s, 0.0)


def _with_more_micro_batches(seen: Seen) -> str:
    """The ramp's share with twice the micro-batches: a larger global batch, or smaller ones of the same."""
    layout = seen.layout
    changes: dict[str, object] = {"grad_accum": 2 * layout.grad_accum}
    smaller = ""
    if seen.question.job.global_batch_size is not None:
        if layout.micro_batch_size % 2:
            return ""
        changes["micro_batch_size"] = layout.micro_batch_size // 2
        smaller = f" of {layout.micro_batch_size // 2} instead of {layout.micro_batch_size} sequences"
    more = what_if(seen, **changes)
    if more is None or not more.time.step_s or more.time.ramp_s is None:
        return ""
    return f"; {2 * layout.grad_accum}{smaller} would make it {more.time.ramp_s / float(more.time.step_s):.1%}"


def slow_link(cluster: Cluster) -> Link:
    """What joins such domains."""
    levels = cluster.levels
    return next((level.link for level in levels if level.gpus > cluster.fast_domain.gpus), cluster.inter_link)


# -- Reasons of the network --------------------------------------------------------------------------------------------

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
    told = (
        f"Logits dominate the peak: {format_bytes(logits)} of {format_bytes(peak.total)} live in {peak.phase}, "
        f"for {case.tokens:,} tokens and a vocabulary of {case.model.vocab:,}. "
    )
    pieced = what_if(seen, loss="chunked") if seen.layout.loss in (None, "whole") else None
    if pieced is None:
        return f"{told}A chunked or fused loss never holds them whole."
    return f"{told}In pieces (--loss chunked) {needed(seen, pieced)}{_at_a_speed(seen, pieced)}."


def loss_in_pieces(seen: Seen) -> str | None:
    """Head and loss run in pieces though it was not asked for: what whole logits would need."""
    if seen.layout.loss != "chunked" or seen.question.pins.given("loss") is not None:
        return None
    whole = what_if(seen, loss=None)
    if whole is None:
        return None
    return (
        "Head and loss take the tokens in pieces (--loss chunked), so that the logits are never all there: with whole "
        f"logits {needed(seen, whole)}."
    )


def _at_a_speed(seen: Seen, other: WhatIf) -> str:
    """The tokens/s of another layout over those of now; nothing where one is unknown."""
    ratio = speed_ratio(other.throughput, seen.one.throughput)
    return "" if ratio is None else f", at {ratio:.1%} of the tokens/s"


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
        f"A step of {mine} has a batch of {new}, one of {theirs} of {old}: that changes the training, not only its "
        f"speed. The same tokens take {old / new:.3g} times the steps, and the learning rate (now "
        f"{job.optimizer.lr:g}) has to be chosen for the batch. --global-batch-size holds it."
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
    loss_in_pieces,
    recompute_costs,
    experts_padded_to_the_shards,
    accumulation_saves_memory,
    a_changed_global_batch,
)
"""In the order they are printed: what limits, what to shard, the network, memory, the batch."""
