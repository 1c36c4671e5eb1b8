"""What the sentences of reasons mean: a template of each that names its figures, and the question that each answers.

A figure is computed anew from `planner estimate` of one layout, asked through the options of the command line. Not
here: the questions, or the test (test_reasons_asked_again.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cached_property
from typing import Any, NamedTuple

import msgspec
import pytest
from layout_options import layout_options

from planner.ask.fits import kept_free
from planner.ask.options import question
from planner.ask.question import GROUP_AXES
from planner.basics.errors import PlannerError
from planner.basics.quantities import format_bytes, format_seconds, format_volume
from planner.decide.answers import Answer, Estimate
from planner.decide.reasons import reasons_of
from planner.decide.strategies import answer
from planner.figures.steptime import Throughput
from planner.inventory import parameters
from planner.parallelism.rules import divisors
from planner.spec import Cluster, Layout, Link

Given = dict[str, Any]
PER_LAYOUT = (
    *GROUP_AXES, "zero_stage", "micro_batch_size", "grad_accum", "recompute", "reshard_after_forward",
    "sync_each_micro_batch", "sequence_parallel", "cp_method", "pp_schedule", "virtual_stages", "stage_layers",
    "counted_ends", "offload_optimizer", "offload_params", "offload_activations", "zero_secondary_shard", "runtime",
    "strategy", "loss", "attention", "liger", "compile", "experts", "recompute_modules", "tp_comm_overlap",
    "token_dispatcher",
)  # fmt: skip
SIZES = ("cluster", "gpu", "gpus", "nodes", "gpus_per_node")


class Again:
    """One answer, and its question asked again for other layouts, clusters and methods."""

    def __init__(self, given: Given, found: Answer) -> None:
        self.given, self.found = given, found
        place = found.recommended
        if place is None:
            place = min(range(len(found.estimates)), key=lambda at: found.estimates[at].memory.device_bytes)
        self.told = found.estimates[place]
        self.others = [one for at, one in enumerate(found.estimates) if at != place]

    @cached_property
    def one(self) -> Estimate:
        """The layout that the reasons are about."""
        return self.ask()

    def headroom_of(self, one: Estimate) -> float:
        """Share of the device that has to stay free."""
        asked = self.found.question
        return kept_free(asked.coefficients(one.case.runtime).bands, asked.headroom)

    @property
    def usable(self) -> str:
        return format_bytes(self.one.case.cluster.gpu.memory_bytes * (1 - self.headroom_of(self.one)))

    @property
    def capacity(self) -> str:
        return format_bytes(self.one.case.cluster.gpu.memory_bytes)

    def other(self, name: str) -> Estimate:
        """The answer's estimate that a sentence calls so, asked again."""
        return self.ask_like(next(one for one in self.others if name_of(one) == name))

    def ask_like(self, one: Estimate) -> Estimate:
        return self.ask(one.case.layout, method=one.case.job.method)

    def ask(
        self,
        layout: Layout | None = None,
        *,
        method: str | None = None,
        nodes: int | None = None,
        network: Link | None = None,
        **changes: Any,
    ) -> Estimate:
        """The estimate of a layout (the told one with `changes`), on so many of the cluster's nodes or another
        network between them."""
        layout = msgspec.structs.replace(layout or self.told.case.layout, **changes)
        cluster = self.told.case.cluster
        nodes = nodes or cluster.nodes
        given = {name: value for name, value in self.given.items() if name not in PER_LAYOUT}
        given |= {"gpus": None, "nodes": str(nodes), "gpus_per_node": str(cluster.gpus_per_node)}
        given |= {"method": method or self.told.case.job.method} | layout_options(layout)
        if given.get("global_batch_size") is not None and layout.global_batch_size != int(given["global_batch_size"]):
            given["global_batch_size"] = str(layout.global_batch_size)
        asked = question(given)
        if network is not None:
            asked = msgspec.structs.replace(asked, cluster=msgspec.structs.replace(asked.cluster, inter_link=network))
        (one,) = answer(asked).estimates
        assert one.case.layout == layout
        assert (one.case.cluster.nodes, one.case.cluster.gpus_per_node) == (nodes, cluster.gpus_per_node)
        return one


# -- what sentences mean -----------------------------------------------------------------------------------------------


class Reading(NamedTuple):
    """A sentence with its figures and names in braces (parts in [ ] may be missing), and what they must be, as text."""

    rule: str
    template: str
    means: Callable[[Again, dict[str, str]], dict[str, str]]


def pattern(template: str) -> re.Pattern[str]:
    """The template as an expression that names its figures."""
    text = re.escape(template).replace(r"\[", "(?:").replace(r"\]", ")?")
    return re.compile(re.sub(r"\\\{(\w+)\\\}", lambda found: f"(?P<{found[1]}>{OF_KIND.get(found[1], '.+?')})", text))


OF_KIND = {"share": r"[\d.]+%", "rest": r"[\d.]+%", "s": "s?", "old": r"\d+"}
"""Figures and endings that a name beside them may not swallow."""


def name_of(one: Estimate) -> str:
    return one.strategy if one.sharding is None else f"{one.strategy} ({one.sharding})"


def share(part: Any, whole: Any) -> str:
    return f"{float(part or 0) / float(whole):.1%}"


def ratio(new: Throughput, old: Throughput) -> float:
    return float(new.tokens_per_s) / float(old.tokens_per_s)


def largest(one: Estimate) -> tuple[str, float]:
    return max(one.memory.peak.terms.items(), key=lambda pair: pair[1])


def of_memory(a: Again, one: Estimate) -> dict[str, str]:
    return {"mem": format_bytes(one.memory.device_bytes), "cap": a.capacity}


def needed(a: Again, one: Estimate) -> dict[str, str]:
    """What would be needed, and whether it is there: on the device, then on the hosts."""
    verdict = "which fits"
    usable = one.case.cluster.gpu.memory_bytes * (1 - a.headroom_of(one))
    if one.memory.device_bytes > usable:
        verdict = f"more than the {format_bytes(usable)} that may be used"
    elif not one.fits:
        verdict = "and more host memory than there is"
    return {"need": format_bytes(one.memory.device_bytes), "verdict": verdict}


NEED = "{need} on the card would be needed[, {verdict}]"


def slower_link(cluster: Cluster) -> Any:
    return next((one.link for one in cluster.levels if one.gpus > cluster.fast_domain.gpus), cluster.inter_link)


def memory_limits(a: Again, said: dict[str, str]) -> dict[str, str]:
    least = min(a.found.estimates, key=lambda one: one.memory.device_bytes)
    term, size = largest(a.one)
    return {
        "name": name_of(least), "need": format_bytes(a.ask_like(least).memory.device_bytes), "usable": a.usable,
        "term": term, "size": format_bytes(size), "phase": a.one.memory.peak.phase,
    }  # fmt: skip


def hosts_limit(a: Again, said: dict[str, str]) -> dict[str, str]:
    memory, cluster = a.one.memory, a.one.case.cluster
    assert memory.host_node_bytes > cluster.host_memory_bytes
    return {
        "name": name_of(a.told), "need": format_bytes(memory.host_node_bytes),
        "there": format_bytes(cluster.host_memory_bytes),
    }  # fmt: skip


def step_limits(a: Again, said: dict[str, str]) -> dict[str, str]:
    """The step is the sum of its parts; the pipeline's wait is its ramp and the wait for its slowest stage."""
    time = a.one.time
    ramp_s = time.ramp_s or 0.0
    parts = {
        "compute": time.compute_s, "communication that nothing hides": time.exposed_comm_s, "the optimizer":
        time.optimizer_s, "the pipeline's ramp": ramp_s,
        f"the wait for stage {time.slowest_stage}, the pipeline's slowest": max(float(time.bubble_s) - ramp_s, 0.0),
    }  # fmt: skip
    assert sum(map(float, parts.values())) == pytest.approx(float(time.step_s))
    (first, limit), (second, then) = sorted(((float(s), name) for name, s in parts.items()), reverse=True)[:2]
    return {
        "first": limit, "share": share(first, time.step_s), "step": format_seconds(time.step_s), "second": then,
        "rest": share(second, time.step_s),
    }  # fmt: skip


def micro_batch_limit(a: Again, said: dict[str, str]) -> dict[str, str]:
    layout = a.told.case.layout
    accum = layout.grad_accum // (2 if a.found.question.job.global_batch_size else 1)
    larger = a.ask(micro_batch_size=2 * layout.micro_batch_size, grad_accum=accum)
    term, size = largest(larger)
    return {
        "twice": str(2 * layout.micro_batch_size), "once": str(layout.micro_batch_size), "usable": a.usable,
        "need": format_bytes(larger.memory.device_bytes), "term": term, "size": format_bytes(size),
    }  # fmt: skip


def logits(a: Again, said: dict[str, str]) -> dict[str, str]:
    peak, layout, job = a.one.memory.peak, a.one.case.layout, a.one.case.job
    return {
        "logits": format_bytes(peak.terms["logits"]), "peak": format_bytes(peak.total), "phase": peak.phase,
        "tokens": f"{layout.micro_batch_size * job.seq_len // layout.cp:,}", "vocab": f"{a.one.case.model.vocab:,}",
    }  # fmt: skip


def logits_in_pieces(a: Again, said: dict[str, str]) -> dict[str, str]:
    pieces = a.ask(loss="chunked")
    assert said["share"] is None or pieces.throughput.tokens_per_s
    speed = f"{ratio(pieces.throughput, a.one.throughput):.1%}" if pieces.throughput.tokens_per_s else None
    return logits(a, said) | needed(a, pieces) | {"share": speed}


def whole_logits(a: Again, said: dict[str, str]) -> dict[str, str]:
    assert a.told.case.layout.loss == "chunked" and a.given.get("loss") is None
    return needed(a, a.ask(loss=None))


def ddp_fits(a: Again, said: dict[str, str]) -> dict[str, str]:
    return of_memory(a, a.one) | {
        "grads": format_volume(a.one.comm.all_reduce_bytes), "wire": format_volume(a.one.comm.wire_bytes_per_rank),
        "other": said["other"],
        "other_wire": said["other"] and format_volume(a.other(said["other"]).comm.wire_bytes_per_rank),
    }  # fmt: skip


def ddp_fits_too(a: Again, said: dict[str, str]) -> dict[str, str]:
    ddp = a.other("ddp")
    gain = ratio(a.one.throughput, ddp.throughput)
    assert ddp.fits and (gain < 1.01) == (said.get("gain") is None)
    return of_memory(a, ddp) | {"name": name_of(a.told), "gain": f"{gain:.2f}"} | batches(a.one, ddp)


def batches(here: Estimate, there: Estimate) -> dict[str, str]:
    """ "with 8 sequences a pass instead of 4"; left out where they are equal."""
    sizes = [one.case.layout.micro_batch_size for one in (here, there)]
    return {} if sizes[0] == sizes[1] else {"here": str(sizes[0]), "s": "s" * (sizes[0] > 1), "there": str(sizes[1])}


def lora_under_ddp(a: Again, said: dict[str, str]) -> dict[str, str]:
    layout = a.told.case.layout
    fsdp = a.ask(engine="fsdp2", zero_stage=3, dp_replicate=1, dp_shard=layout.data_parallel)
    return of_memory(a, a.one) | {
        "method": METHODS[a.told.case.job.method], "wire": format_volume(a.one.comm.wire_bytes_per_rank),
        "fsdp": format_volume(fsdp.comm.wire_bytes_per_rank),
    }  # fmt: skip


METHODS = {"lora": "LoRA", "qlora": "QLoRA"}


def adapters_are_enough(a: Again, said: dict[str, str]) -> dict[str, str]:
    lora = a.other(f"{said['method'].lower()} (ddp)")
    assert lora.fits
    return of_memory(a, lora) | {
        "method": said["method"], "wire": format_volume(lora.comm.wire_bytes_per_rank),
        "own": format_volume(a.one.comm.wire_bytes_per_rank),
    }  # fmt: skip


def networks(a: Again, said: dict[str, str]) -> dict[str, str]:
    """An adapter of 100 Gbit/s that a node's GPUs share, or 400 Gbit/s for each GPU."""
    cluster = a.told.case.cluster
    own, ethernet = slower_link(cluster), 12.5e9 / cluster.gpus_per_node
    slow = own.bytes_per_s_per_direction <= ethernet
    name, rate, latency_s = ("InfiniBand NDR", 50e9, 5e-6) if slow else ("100 GbE", ethernet, 20e-6)
    other = a.ask(network=Link(name=name, bytes_per_s_per_direction=rate, latency_s=latency_s))
    slower, faster = (a.one.time, other.time) if slow else (other.time, a.one.time)
    bare = [float(one.step_s - one.exposed_comm_s + one.comm_s) for one in (faster, slower)]
    return {
        "fast": name if slow else own.name, "slow": own.name if slow else name,
        "share": f"{1 - float(faster.step_s) / float(slower.step_s):.1%}", "bare": f"{1 - bare[0] / bare[1]:.1%}",
    }  # fmt: skip


def adapters_send(a: Again, said: dict[str, str]) -> dict[str, str]:
    """All that DDP reduces is the gradients of what is trained."""
    under_ddp = {
        one.case.job.method: format_volume(a.ask_like(one).comm.all_reduce_bytes)
        for one in (a.told, *a.others)
        if one.case.lora and one.case.layout.engine == "ddp"
    }
    return {f"{method}_sum": size for method, size in under_ddp.items()}


def one_node(a: Again, said: dict[str, str]) -> dict[str, str]:
    """The same split with fewer replicas, then fewer shards; with the batch kept, more accumulation."""
    layout, cluster = a.told.case.layout, a.told.case.cluster
    domain = cluster.fast_domain
    several = cluster.gpus // domain.gpus
    copies = next(n for n in reversed(divisors(several)) if layout.dp_replicate % n == 0)
    micro = int(said["here"] or layout.micro_batch_size)
    accum = layout.grad_accum * (layout.micro_batch_size // micro)
    if a.found.question.job.global_batch_size:
        accum *= several
    alone = a.ask(
        nodes=cluster.nodes // several, micro_batch_size=micro, grad_accum=accum,
        dp_replicate=layout.dp_replicate // copies, dp_shard=layout.dp_shard // (several // copies),
    )  # fmt: skip
    assert alone.fits
    gain = ratio(a.one.throughput, alone.throughput) if a.one.time.step_s else None
    return batches(alone, a.one) | {
        "domain": domain.name, "domains": domain.name, "domain2": domain.name, "gpus": str(domain.gpus),
        "mem": format_bytes(alone.memory.device_bytes), "several": str(several),
        "worth": "for speed" if gain is None or gain > 1.1 else "no gain",
        "inter": format_volume(a.one.comm.inter_node_bytes_per_rank), "link": slower_link(cluster).name,
        "gain": "" if gain is None else f"{gain:.2f}",
    }  # fmt: skip


def waits(a: Again) -> dict[str, str]:
    time = a.one.time
    return {"waited": format_seconds(time.exposed_comm_s), "share": share(time.exposed_comm_s, time.step_s)}


def inside_nodes(a: Again) -> tuple[int, Estimate | None]:
    """(ranks that share states inside a node, the layout that shards over them alone)."""
    layout = a.told.case.layout
    shard = a.told.case.cluster.fast_domain.gpus // (layout.tp * layout.cp)
    sizes = {"dp_shard": shard, "dp_replicate": layout.data_parallel // shard}
    for engine in (layout.engine, "fsdp2") if shard > 1 else ():
        try:
            return shard, a.ask(engine=engine, **sizes)
        except PlannerError:
            continue
    return shard, None


def hsdp_keeps(a: Again, said: dict[str, str]) -> dict[str, str]:
    shard, inside = inside_nodes(a)
    assert inside is not None and inside.fits
    return waits(a) | {
        "shard": str(shard), "inter": format_volume(inside.comm.inter_node_bytes_per_rank),
        "own_inter": format_volume(a.one.comm.inter_node_bytes_per_rank), "step": format_seconds(inside.time.step_s),
        "own_step": format_seconds(a.one.time.step_s), "mem": format_bytes(inside.memory.device_bytes),
    }  # fmt: skip


def hsdp_does_not_fit(a: Again, said: dict[str, str]) -> dict[str, str]:
    """The second copy is one of 16-bit weights (fp32 in fp32), a node's share a rank."""
    shard, inside = inside_nodes(a)
    assert inside is None or not inside.fits
    gathers = [call for call in a.one.comm.engine if (call.op, call.group) == ("all_gather", "dp_shard")]
    backward = sum(call.wire_bytes_per_rank for call in gathers if call.phase == "backward")
    layout, each = a.told.case.layout, 4 if a.found.question.job.precision == "fp32" else 2
    copy = each * (parameters(a.told.case.model) / shard if layout.tp * layout.pp == 1 else a.told.case.total() / shard)
    return waits(a) | {
        "mem": "" if inside is None else format_bytes(inside.memory.device_bytes),
        "part": f"{backward / max(sum(call.wire_bytes_per_rank for call in gathers), 1):.0%}",
        "copy": format_bytes(copy),
    }


def hsdp_because(a: Again, said: dict[str, str]) -> dict[str, str]:
    flat = a.ask(dp_shard=a.told.case.layout.data_parallel, dp_replicate=1)
    return {
        "here": format_volume(a.one.comm.inter_node_bytes_per_rank),
        "there": format_volume(flat.comm.inter_node_bytes_per_rank),
        "waits": format_seconds(a.one.time.exposed_comm_s), "flat": format_seconds(flat.time.exposed_comm_s),
    }  # fmt: skip


def uneven_batch(a: Again, said: dict[str, str]) -> dict[str, str]:
    layout = a.told.case.layout
    each = layout.micro_batch_size * layout.grad_accum
    assert each % 2
    return {
        "batch": str(layout.global_batch_size), "ranks": str(layout.data_parallel), "each": str(each),
        "s": "s" * (each > 1),
    }  # fmt: skip


def twice_the_nodes(a: Again, said: dict[str, str]) -> dict[str, str]:
    """The shards double where nothing else is replicated; with the batch kept, half the passes or half their size."""
    layout, nodes = a.told.case.layout, a.told.case.cluster.nodes
    axis = "dp_shard" if layout.dp_shard > 1 and layout.dp_replicate == 1 else "dp_replicate"
    half = "grad_accum" if layout.grad_accum % 2 == 0 else "micro_batch_size"
    kept = {half: getattr(layout, half) // 2} if a.found.question.job.global_batch_size else {}
    twice = a.ask(nodes=2 * nodes, **{axis: 2 * getattr(layout, axis)}, **kept)
    return {
        "nodes": str(2 * nodes), "half": str(nodes), "gain": f"{ratio(twice.throughput, a.one.throughput):.2f}",
        "then": share(twice.time.exposed_comm_s, twice.time.step_s),
        "now": share(a.one.time.exposed_comm_s, a.one.time.step_s),
    }  # fmt: skip


def tensor_links(a: Again, said: dict[str, str]) -> dict[str, str]:
    layout, cluster = a.told.case.layout, a.told.case.cluster
    domain, slow = cluster.fast_domain, slower_link(cluster)
    sent = sum(call.wire_bytes_per_rank for call in a.one.comm.engine if call.group == "tp")
    faster = domain.link.bytes_per_s_per_direction / slow.bytes_per_s_per_direction
    inside = max(size for size in divisors(domain.gpus) if layout.tp % size == 0)
    return {
        "domain": domain.name, "domain2": domain.name, "gpus": str(domain.gpus), "tp": str(layout.tp),
        "sent": f"{format_volume(sent)} a GPU and step" if sent else "what it sends in every layer",
        "fast": domain.link.name, "faster": f"{faster:.3g}", "slow": slow.name, "inside": str(inside),
    }  # fmt: skip


def bubble(a: Again, said: dict[str, str]) -> dict[str, str]:
    """A pipeline's rank waits for the ramp, and the first for the slowest; then the question with more micro-batches,
    read off the answer to that."""
    layout, time = a.told.case.layout, a.one.time
    found = {"pp": str(layout.pp), "idle": share(time.ramp_s, time.step_s), "m": str(layout.grad_accum)}
    waits_s = float(time.bubble_s) - time.ramp_s
    found |= {
        "stage": str(time.slowest_stage), "waits": format_seconds(waits_s), "step": format_seconds(time.step_s),
        "share": share(waits_s, time.step_s),
    }  # fmt: skip
    if said["more"]:
        smaller = layout.micro_batch_size // (2 if a.found.question.job.global_batch_size else 1)
        more = a.ask(grad_accum=2 * layout.grad_accum, micro_batch_size=smaller)
        found |= {"more": str(2 * layout.grad_accum), "then": share(more.time.ramp_s, more.time.step_s)}
        found |= {"smaller": str(smaller), "larger": str(layout.micro_batch_size)}
    return found


MORE = "[; {more}[ of {smaller} instead of {larger} sequences] would make it {then}]"


def recomputed(a: Again, said: dict[str, str]) -> dict[str, str]:
    """The compute is seconds of the step's compute, with and without."""
    kept = a.ask(recompute="none")
    saved = kept.memory.device_bytes - a.one.memory.device_bytes
    known = a.one.time.step_s is not None
    what = {"full": "every layer", "attention": "the attention core", "sac:matmul": "all but matrix products"}
    return needed(a, kept) | {
        "what": what[a.told.case.layout.recompute],
        "extra": f"{float(a.one.time.compute_s) / float(kept.time.compute_s) - 1:.1%}" if known else "",
        "step": format_seconds(a.one.time.step_s), "without": format_seconds(kept.time.step_s),
        "saves": f"saves {format_bytes(saved)} on the card" if saved > 0 else "saves no memory",
    }  # fmt: skip


def padded_experts(a: Again, said: dict[str, str]) -> dict[str, str]:
    layout = a.told.case.layout
    fewer = [
        a.ask(dp_shard=shard, dp_replicate=layout.data_parallel // shard) for shard in divisors(layout.dp_shard)[1:-1]
    ]
    best = min(fewer, key=lambda one: one.memory.device_bytes)
    return needed(a, best) | {
        "experts": str(a.told.case.model.moe.experts), "shards": str(layout.dp_shard * layout.cp),
        "fewer": str(best.case.layout.dp_shard), "own": format_bytes(a.one.memory.device_bytes),
    }  # fmt: skip


def other_batch(a: Again, said: dict[str, str]) -> dict[str, str]:
    """The other may be of the same name: then both are told with their batches."""
    new = a.one.case.layout.global_batch_size
    other = next(
        one
        for one in a.others
        if one.fits and one.case.layout.global_batch_size != new and one.case.job.method == a.told.case.job.method
    )
    apart = name_of(other) == name_of(a.told)
    old = a.ask_like(other).case.layout.global_batch_size
    return {
        "name": batch_name(a.told, apart), "new": str(new), "other": batch_name(other, apart), "old": str(old),
        "times": f"{old / new:.3g}", "lr": f"{a.one.case.job.optimizer.lr:g}",
    }  # fmt: skip


def batch_name(one: Estimate, apart: bool) -> str:
    layout = one.case.layout
    return name_of(one) + (f" of {layout.micro_batch_size} x {layout.grad_accum}" if apart else "")


def accumulated(a: Again, said: dict[str, str]) -> dict[str, str]:
    layout = a.told.case.layout
    whole = layout.micro_batch_size * layout.grad_accum
    together = a.ask(micro_batch_size=whole, grad_accum=1)
    found = needed(a, together) | {
        "whole": str(whole), "accum": str(layout.grad_accum), "micro": str(layout.micro_batch_size),
        "step": format_seconds(together.time.step_s), "own": format_seconds(a.one.time.step_s),
    }  # fmt: skip
    if a.one.time.step_s:
        slower = float(a.one.time.step_s) / float(together.time.step_s) - 1
        found["cost"] = f"costs time, {slower:.1%}" if slower >= 0.01 else "costs no time"
    return found


HSDP = "shard_inside_nodes_when_the_network_is_slow"
SLOW = "The network is slow for this: {waited} of the step, {share}, wait for communication."
IDLE = f"stands idle for {{idle}} of the step, in the ramp and for sends, with {{m}} micro-batches{MORE}."
READINGS = (
    Reading("what_limits", "Memory limits: {name} needs least, {need} on a card of which {usable} may be used; its "
            "largest term is {term}, {size} live in {phase}.", memory_limits),
    Reading("what_limits", "Host memory limits: {name} needs {need} on each node, which has {there}.", hosts_limit),
    Reading("what_limits", "What limits the step is {first}, {share} of {step}[; then {second}, {rest}].", step_limits),
    Reading("memory_limits_the_micro_batch", "Memory limits the micro-batch: {twice} sequences instead of {once} would "
            "need {need} on a card of which {usable} may be used, most of it {term}, {size} live.", micro_batch_limit),
    Reading("logits_dominate", "Logits dominate the peak: {logits} of {peak} live in {phase}, for {tokens} "
            "tokens and a "
            "vocabulary of {vocab}. A chunked or fused loss never holds them whole.", logits),
    Reading("logits_dominate", "Logits dominate the peak: {logits} of {peak} live in {phase}, for {tokens} "
            "tokens and a "
            "vocabulary of {vocab}. In pieces (--loss chunked) " + NEED + "[, at {share} of the tokens/s].",
            logits_in_pieces),
    Reading("loss_in_pieces", "Head and loss take the tokens in pieces (--loss chunked), so that the logits are never "
            "all there: with whole logits " + NEED + ".", whole_logits),
    Reading("ddp_when_it_fits", "DDP fits, {mem} on a card of {cap}: nothing has to be sharded. It reduces "
            "the gradients once a "
            "step, {grads}, and sends twice that less a rank's share, {wire}[; {other} would send {other_wire}].",
            ddp_fits),
    Reading("ddp_when_it_fits", "DDP fits too, {mem} on a card of {cap}, and is the simplest: memory asks "
            "for no sharding. "
            "{name} gives {gain} times its tokens/s[, with {here} sequence{s} a pass instead of {there}].",
            ddp_fits_too),
    Reading("ddp_when_it_fits", "DDP fits too, {mem} on a card of {cap}, and is the simplest: memory asks "
            "for no sharding. "
            "{name} is hardly faster.", ddp_fits_too),
    Reading("ddp_when_it_fits", "DDP fits too, {mem} on a card of {cap}: memory asks for no sharding.",
            lambda a, said: of_memory(a, a.other("ddp"))),
    Reading("lora_before_sharding", "{method} under DDP before FSDP: the frozen base fits whole, {mem} on a "
            "card of {cap}, so a "
            "step sends only the adapters' gradients, {wire} a GPU; FSDP would gather the base, {fsdp}.",
            lora_under_ddp),
    Reading("lora_before_sharding", "If adapters are enough, {method} under DDP comes before sharding: "
            "{mem} on a card of {cap}, "
            "and {wire} a GPU and step instead of {own}.", adapters_are_enough),
    Reading("what_adapters_send", "Under DDP a step sums only the adapters' gradients: [{lora_sum} for LoRA][ and ]"
            "[{qlora_sum} for QLoRA].", adapters_send),
    Reading("what_the_network_costs", "{fast} against {slow}: {share} of the step; {bare} if nothing overlapped.",
            networks),
    Reading("one_node_before_several", "One {domain} would hold it, {mem} on the card of each of {gpus} "
            "GPUs[, with {here} "
            "sequence{s} a pass instead of {there}]: {several} {domains}s are {worth}. They send {inter} a GPU and "
            "step over {link}[, and give {gain} times one {domain2}'s tokens/s].", one_node),
    Reading(HSDP, f"{SLOW} HSDP keeps the gathers inside nodes (dp_shard={{shard}}): {{inter}} a GPU between nodes "
            "instead of {own_inter}, a step of {step} instead of {own_step}, {mem} on the card.", hsdp_keeps),
    Reading(HSDP, f"{SLOW}[ HSDP inside nodes does not fit ({{mem}} on the card).][ ZeRO++'s secondary "
            f"shards (hpZ) would serve "
            "backward's gathers inside nodes, {part} of all gathers, for a copy of {copy} live.]", hsdp_does_not_fit),
    Reading(HSDP, "HSDP because the network is slow: gathers stay inside nodes, so {here} a GPU and step go between "
            "them instead of {there}, and {waits} are waited for instead of {flat}.", hsdp_because),
    Reading("more_nodes_stop_helping", "More nodes stop helping: a global batch of {batch} gives each of {ranks} "
            "data-parallel ranks {each} sequence{s}, which twice as many ranks cannot share evenly.", uneven_batch),
    Reading("more_nodes_stop_helping", "More nodes stop helping: {nodes} instead of {half} would give {gain} times the "
            "tokens/s, with {then} of the step waiting for communication (now {now}).", twice_the_nodes),
    Reading("tensor_parallel_inside_the_node", "Tensor parallelism stays inside the {domain}: tp={tp} keeps {sent} on "
            "{fast}, {faster} times as fast as {slow}.", tensor_links),
    Reading("tensor_parallel_inside_the_node", "Tensor parallelism leaves the {domain}: tp={tp} on {domain2}s of "
            "{gpus} takes {sent} off {fast}, {faster} times as fast as {slow}. Use tp={inside} or less.", tensor_links),
    Reading("pipeline_bubble", "Stage {stage} of the pipeline's {pp} is the slowest: the first waits for it {waits} of "
            "a step of {step}, {share}, which more micro-batches do not shorten. Even the slowest " + IDLE, bubble),
    Reading("pipeline_bubble", "The pipeline of {pp} stages " + IDLE, bubble),
    Reading("recompute_costs", "Recomputing {what} adds {extra} to the compute, for a step of {step} instead of "
            "{without}, and {saves}: without it " + NEED + ".", recomputed),
    Reading("recompute_costs", "Recomputing {what} adds {extra} to the compute, which other times of the step hide, "
            "and {saves}: without it " + NEED + ".", recomputed),
    Reading("recompute_costs", "Recomputing {what} takes time that is not known and {saves}: without it " + NEED + ".",
            recomputed),
    Reading("experts_padded_to_the_shards", "More shards do not save memory here: the weights of {experts} experts are "
            "padded to {shards} shards. With dp_shard={fewer} " + NEED + ", instead of {own}.", padded_experts),
    Reading("a_changed_global_batch", "A step of {name} has a batch of {new}, one of {other} of {old}: that changes "
            "the training, not only its speed. The same tokens take {times} times the steps, and the learning rate "
            "(now {lr}) has to be chosen for the batch. --global-batch-size holds it.", other_batch),
    Reading("accumulation_saves_memory", "Accumulation saves memory[ and {cost}]: with all {whole} sequences of a rank "
            "at once instead of {accum} x {micro}, " + NEED + "[, for a step of {step} instead of {own}].",
            accumulated),
)  # fmt: skip


def misread(given: Given, found: Answer) -> tuple[list[str], list[str]]:
    """(what is wrong in the sentences told of an answer, the rules that told one)."""
    again, wrong, told = Again(given, found), [], []
    for reason in reasons_of(found):
        told.append(reason.reason)
        read = [(one, match) for one in READINGS if one.rule == reason.reason
                if (match := pattern(one.template).fullmatch(reason.text))]  # fmt: skip
        if not read:
            wrong.append(f"{given}: no reading: {reason.text}")
            continue
        said = read[0][1].groupdict()
        means = read[0][0].means(again, said)
        wrong += [
            f"{given}: {reason.text}: {name} is {means.get(name)}"
            for name, text in said.items()
            if text is not None and means.get(name) != text
        ]
    return wrong, told
