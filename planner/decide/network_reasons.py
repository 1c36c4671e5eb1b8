"""Reasons about the network and the pipeline: where links between nodes, or stages that wait, are worth a sentence.

Not here: the order of reasons (reasons.py), or how a prediction is asked again (whatif.py).
"""

from __future__ import annotations

import math

import msgspec

from planner.basics.units import BYTES, format_bytes, format_volume
from planner.decide.candidates import floor_bytes
from planner.decide.whatif import Seen, WhatIf, batch_apart, fits, seconds, speed_ratio, what_if
from planner.figures.memory import device_bytes
from planner.figures.steptime import StepTime
from planner.parallelism.case import spans_nodes
from planner.spec import Cluster, Link

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
