"""One layout's estimate: memory, bytes on the wire, time, and whether it can be launched.

Answers are plain values (answers.py). Not here: which layouts are looked at (strategies.py, recommendation.py), their
JSON (estimate_json.py), a plan of one (planning.py), or tables (views/render.py).
"""

from __future__ import annotations

from planner.ask.bounds import Bound, qualified
from planner.ask.fits import FITS_FROM, Verdict, fit_probability, verdict
from planner.ask.launchable import launch_refusal
from planner.ask.question import Question, case_of, limit_bytes
from planner.basics.errors import PlannerError
from planner.basics.units import format_bytes
from planner.decide.answers import Estimate
from planner.decide.nearest import changes_text, nearest_launchable
from planner.decide.planning import probed_here
from planner.figures.comm import comm_volume
from planner.figures.memory import MemoryBreakdown, device_bytes, memory_breakdown
from planner.figures.passes import coefficients, peak_flops
from planner.figures.steptime import step_time, throughput
from planner.parallelism.case import Case
from planner.parallelism.rules import JOB, POSITIONS, check
from planner.spec import Layout
from planner.spec.calibration import Bands
from planner.spec.engines import engines_with
from planner.spec.layout import strategy_name


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
        if case.loops_experts:
            looped = f"{case.layout.engine} runs {case.model.name}'s experts one after the other"
            missing = f"{looped}, and what the host takes for that is not known"
        elif peak_flops(case) is not None:
            missing = f"the link to the host or its memory's rate is unknown for {case.cluster.name}"
        reasons = (*reasons, f"{missing}: no time is predicted")
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
