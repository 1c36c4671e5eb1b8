"""One layout's estimate: memory, bytes on the wire, time, and whether it can be launched.

Answers are plain values (answers.py). Not here: which layouts are looked at (strategies.py, recommendation.py), their
JSON (estimate_json.py), a plan of one (planning.py), or tables (views/render.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import log2
from typing import Any

import msgspec

from planner.ask.fits import FITS_FROM, Bound, Verdict, fit_probability, qualified, verdict
from planner.ask.launchable import launch_refusal, launches
from planner.ask.question import GROUP_AXES, Question, case_of, limit_bytes, usual_runtime
from planner.basics.errors import PlannerError
from planner.basics.quantities import format_bytes
from planner.decide.answers import Estimate
from planner.decide.planning import probed_here
from planner.decide.space import Groups, expert_groups, group_sizes
from planner.figures.comm import comm_volume
from planner.figures.memory import MemoryBreakdown, device_bytes, memory_breakdown
from planner.figures.passes import coefficients, peak_flops
from planner.figures.steptime import step_time, throughput
from planner.figures.unitkernels import unmeasured_attention
from planner.parallelism.case import Case
from planner.parallelism.rule import as_option, check
from planner.parallelism.rules import JOB, POSITIONS
from planner.spec import Layout, Runtime
from planner.spec.calibration import Bands
from planner.spec.engines import ENGINES, OFFLOADS, EngineFacts, engines_with
from planner.spec.layout import strategy_name

MOST_TRIED = 3000
TOLD = ("engine", "zero_stage", "micro_batch_size", "grad_accum", "recompute", *OFFLOADS)
OTHER_ENGINE, OTHER_CHOICE = 1.5, 1.0
"""What a change weighs beside a group size doubled or halved, which is 1."""


def nearest_launchable(case: Case) -> Case | None:
    """The case with the fewest changes that breaks no rule of an engine and its backend; None where the job, not the
    layout, is what nothing runs."""
    weighed = sorted(_candidates(case), key=lambda pair: pair[0])
    for _, layout in weighed[:MOST_TRIED]:
        other = msgspec.structs.replace(case, layout=layout, runtime=_runtime(case, layout.engine))
        if launches(other):
            return other
    return None


def changes_text(case: Case, other: Case) -> str:
    """What differs, as `why-not` and the layout's options name it: "engine=fsdp2 tp=1 dp_shard=8"."""
    before, after = case.layout, other.layout
    names = [name for name in Layout.__struct_fields__ if getattr(before, name) != getattr(after, name)]
    if before.engine != after.engine:  # switches go back to the other engine's own defaults
        names = [name for name in names if name in (*TOLD, *GROUP_AXES)]
    if not names:
        return f"runtime={other.runtime.name}"
    return " ".join(f"{name}={as_option(getattr(after, name))}" for name in names)


def _runtime(case: Case, engine: str) -> Runtime:
    asked = case.runtime
    return asked if engine == asked.engine and asked.backend is not None else usual_runtime(engine)


def _candidates(case: Case) -> Iterator[tuple[float, Layout]]:
    asked = case.layout
    for engine, facts in ENGINES.items():
        try:
            if _runtime(case, engine).backend is None:
                continue
        except PlannerError:  # an engine whose runtime preset is not here
            continue
        bases = list(_bases(asked, engine))
        for groups in _groups(case, facts):
            experts = [size for size in expert_groups(facts, case.model, groups) if size in (1, asked.ep)]
            for base, ep in product(bases, experts):
                layout = msgspec.structs.replace(base, **groups._asdict(), ep=ep)
                for fitted in _batches(case, layout):
                    yield _distance(asked, fitted), fitted


def _groups(case: Case, facts: EngineFacts) -> list[Groups]:
    """Group sizes that the engine can have: what was not asked for is not split. Of as near ones more shards first."""
    asked = case.layout
    most = {"tp": asked.tp, "pp": asked.pp}

    def allows(axis: str, size: int) -> bool:
        return size <= most.get(axis, size) and (axis != "cp" or size in (1, asked.cp))

    found = group_sizes(facts, case.cluster.gpus, allows)
    some = [groups for groups in found if groups.dp_replicate in (1, asked.dp_replicate) or groups.dp_shard == 1]
    return sorted(some, key=lambda groups: (groups.tp, groups.pp, groups.dp_replicate, groups.cp))


def _bases(asked: Layout, engine: str) -> Iterator[Layout]:
    """Categories: as asked, or as the engine usually has them."""
    own = engine == asked.engine
    kept = {name: getattr(asked, name) for name in ("micro_batch_size", "grad_accum")}
    facts = ENGINES[engine]
    usual: dict[str, Any] = {"zero_stage": facts.usual_stage, "cp_method": facts.cp_methods[0]}
    plain = Layout(engine=engine, **usual, **kept)
    for stage, recompute, whole, offloaded in product(
        {asked.zero_stage, facts.usual_stage},
        dict.fromkeys((asked.recompute, "full", "none")),  # of two that are as near, that which saves memory as asked
        (True, False),
        (True, False),
    ):
        base = asked if own and whole else plain
        held = {name: getattr(asked, name) if offloaded else False for name in OFFLOADS}
        if offloaded and not any(held.values()) and any(getattr(asked, name) for name in OFFLOADS):
            continue
        yield msgspec.structs.replace(
            base,
            zero_stage=stage,
            recompute=recompute,
            sequence_parallel=asked.sequence_parallel and facts.sequence_parallel,
            loss="chunked" if asked.loss == "fused" and facts.chooses_loss else asked.loss,
            experts=asked.experts,
            **held,
        )


def _batches(case: Case, layout: Layout) -> Iterator[Layout]:
    """The layout with a global batch as asked: its micro-batches kept, or of one sequence."""
    batch = case.job.global_batch_size
    if batch is None:
        yield layout
        return
    each = batch // layout.data_parallel if batch % layout.data_parallel == 0 else 0
    for micro in {case.layout.micro_batch_size, 1}:
        if each and each % micro == 0:
            yield msgspec.structs.replace(layout, micro_batch_size=micro, grad_accum=each // micro)


def _distance(asked: Layout, other: Layout) -> float:
    total = OTHER_ENGINE * (asked.engine != other.engine)
    for name in Layout.__struct_fields__:
        mine, theirs = getattr(asked, name), getattr(other, name)
        if mine == theirs or name == "engine":
            continue
        if name in GROUP_AXES:
            total += abs(log2(mine) - log2(theirs))
        elif name in ("zero_stage", "micro_batch_size", "grad_accum"):
            total += 0.25  # these follow from the others
        else:
            total += OTHER_CHOICE
    return total


# -- The nearest that runs ---------------------------------------------------------------------------------------------


def check_job(question: Question, *, any_runtime: bool = False) -> None:
    """Refuse a job that the model or the devices cannot do, however it is split (PlannerError): by the runtime that was
    named, by one that is launched here, or by `any_runtime`."""
    pinned = question.pins.runtime
    able = engines_with(lambda facts: facts.recipes)[0] if any_runtime else "ddp"
    # Any layout will do: these rules ask about the job, the devices and what the engine multiplies in.
    check(case_of(question, Layout(engine=able if pinned is None else pinned.engine)), (*JOB, POSITIONS))


def check_strategy(question: Question, layout: Layout) -> None:
    """Refuse sizes that make another strategy than the one asked for (PlannerError)."""
    if question.strategy not in (None, strategy_name(layout)):
        rule = f"the sizes given make {strategy_name(layout)}"
        raise PlannerError("strategy", question.strategy, rule, "Give the strategy or the sizes")


def estimate(
    question: Question, strategy: str, layout: Layout, *, sharding: str | None = None, considered: int = 1
) -> Estimate:
    """Everything about one layout."""
    case = case_of(question, layout)
    memory, comm = memory_breakdown(case), comm_volume(case)
    time = step_time(case, question.calibration)
    speed = throughput(case, time)
    refusal = launch_refusal(case)
    if refusal is not None and (other := nearest_launchable(case)) is not None:
        refusal += f"; nearest that runs: {changes_text(case, other)}"
    bands = coefficients(case, question.calibration).bands
    held = fit_probability(memory.device_bytes, bands, case.cluster.gpu.memory_bytes)
    fits, reasons = _fit(question, case, memory, held)
    if time.step_s is None:
        missing = f"{case.cluster.gpu.name} has no known {case.job.precision} rate{_other_format(case)}"
        if peak_flops(case) is not None:
            missing = f"the link to the host or its memory's rate is unknown for {case.cluster.name}"
        reasons = (*reasons, f"{missing}: no time is predicted")
    elif unmeasured_attention(case):
        code, gpu = case.layout.attention or case.parts.attention, case.cluster.gpu.name
        reasons = (*reasons, f"attention {code} has no measured time on {gpu}: timed as torch's own")
    if time.step_s is not None and case.loops_experts:
        operation_s = coefficients(case, question.calibration).compute.operation_s
        reasons = (
            *reasons,
            f"{case.runtime.name} runs {case.model.name}'s experts one after the other, started at "
            f"{operation_s * 1e6:.0f} us an operation; each waits for the device too, which is not counted, so a step "
            "takes at least this",
        )
    return Estimate(
        strategy=strategy,
        sharding=sharding,
        case=case,
        memory=memory,
        comm=comm,
        time=time,
        throughput=speed,
        fits=fits,
        reasons=(*reasons, *loading_told(case, memory)),
        backend=case.runtime.backend,
        refusal=refusal,
        verdict=_verdict(question, memory, bands),
        low_bytes=memory.device_bytes * bands.memory_low,
        high_bytes=memory.device_bytes * bands.memory_high,
        considered=considered,
        probed=probed_here(case, question.calibration),
        fits_probability=None if question.uncounted.bound else 0.0 if memory.host_fits is False else held,
    )


def loading_told(case: Case, memory: MemoryBreakdown) -> tuple[str, ...]:
    """A sentence where loading the model takes more than training it, or has weights wait in host memory; else none."""
    if memory.peak.phase != "load" and not memory.load_host_node_bytes:
        return ()
    loading, training = (
        format_bytes(float(device_bytes(case, phase.total)))
        for phase in (next(one for one in memory.phases if one.phase == "load"), memory.training)
    )
    there = f"loading as {'this trainer' if case.runtime.backend else case.layout.engine} does {loading}"
    if memory.load_host_node_bytes:
        there += f", and {format_bytes(memory.load_host_node_bytes)} of each node's host memory"
    return (f"training takes {training} on the card; {there}",)


def _other_format(case: Case) -> str:
    """The 16-bit format that a device multiplies where it has no bf16: cards before Ampere."""
    lacks = case.job.precision in ("bf16", "pure-bf16") and "fp16" in case.cluster.gpu.flops_per_s
    return " (it multiplies fp16: --precision fp16)" if lacks else ""


def _verdict(question: Question, memory: MemoryBreakdown, bands: Bands) -> Verdict | Bound | None:
    """The device's, unless the hosts say less."""
    found = verdict(memory.device_bytes, bands, question.cluster.gpu.memory_bytes, question.headroom)
    if memory.host_fits is False:
        found = "no"
    elif memory.host_fits is None and found == "yes":
        found = "likely"
    return qualified(found, question.uncounted)


def _fit(question: Question, case: Case, memory: MemoryBreakdown, held: float | None) -> tuple[bool, tuple[str, ...]]:
    capacity, needed = question.cluster.gpu.memory_bytes, memory.device_bytes
    if memory.host_fits is False:
        there = f"{format_bytes(memory.host_node_bytes)} of host memory needed on each node"
        return False, (f"{there} of {format_bytes(question.cluster.host_memory_bytes or 0.0)}",)
    unknown = () if memory.host_fits else ("the hosts' memory is unknown: what is offloaded may not fit there",)
    if capacity is None:
        return True, ("the device's memory is unknown", *unknown)
    if needed <= limit_bytes(question, case):
        return True, unknown
    largest = max(memory.peak.terms.items(), key=lambda pair: pair[1])
    bound = f"{question.uncounted.bound} " if question.uncounted.bound in ("at least", "at most") else ""
    there = f"{bound}{format_bytes(needed)} on a card of {format_bytes(capacity)}"
    if needed <= capacity:
        short = (
            f"less than {question.headroom:.0%} headroom"
            if question.headroom is not None
            else f"held with a probability of {held:.0%}, less than {FITS_FROM:.0%}"
        )
        return False, (f"{there}: {short}, largest is {largest[0]} in {memory.peak.phase}",)
    return False, (f"{there}, largest is {largest[0]}, {format_bytes(largest[1])} live in {memory.peak.phase}",)
