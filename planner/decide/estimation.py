"""Every strategy side by side, or one given layout: memory, bytes on the wire, time, and whether it can be launched.

Answers are plain values (answers.py). Not here: their JSON (estimate_json.py), a plan of one (planning.py), the search
for each strategy's best layout (strategies.py), or tables (views/render.py).
"""

from __future__ import annotations

from itertools import islice

import msgspec

from planner.ask.bounds import Bound, qualified
from planner.ask.fits import FITS_FROM, Verdict, fit_probability, verdict
from planner.ask.launchable import launch_refusal
from planner.ask.offloading import ways_out
from planner.ask.question import (
    Question,
    case_of,
    check_batch,
    check_switches,
    exact_layout,
    limit_bytes,
    single_device,
    with_adapters,
)
from planner.basics.errors import PlannerError
from planner.basics.progress import Cancelled
from planner.basics.units import format_bytes
from planner.decide.answers import Answer as Answer  # others ask for both here, where they are made
from planner.decide.answers import Estimate as Estimate
from planner.decide.answers import able, seconds_of
from planner.decide.nearest import changes_text, nearest_launchable
from planner.decide.planning import probed_here
from planner.decide.strategies import LORA_SHARDINGS, best_of, groups_of
from planner.decide.ties import simplest
from planner.engines import engine_of
from planner.figures.comm import comm_volume
from planner.figures.memory import MemoryBreakdown, device_bytes, memory_breakdown
from planner.figures.passes import coefficients, peak_flops
from planner.figures.steptime import step_time, throughput
from planner.parallelism.case import Case
from planner.parallelism.rules import JOB, POSITIONS, broken, check
from planner.parallelism.technique_rules import STRAY
from planner.spec import Layout
from planner.spec.calibration import Bands
from planner.spec.engines import engines_with
from planner.spec.job import Method
from planner.spec.layout import STRATEGIES, Strategy, strategy_name
from planner.spec.options import OF_AXIS
from planner.spec.tuning import tuned

ADAPTED: tuple[Method, ...] = ("lora", "qlora")
"""Methods shown beside full training when none was chosen."""
METHODS: tuple[Method, ...] = ("full", *ADAPTED)
"""In the order of preference."""


def answer(question: Question) -> Answer:
    """The estimates a question asks for."""
    if question.pins.exact:
        layout = exact_layout(question)
        check_strategy(question, layout)
        case = case_of(question, layout)
        check(case, engine_of(layout.engine).rules)
        one = estimate(question, strategy_name(layout), layout)
        return Answer(question, (one,), {}, _recommended(question, [one]))
    check_question(question)
    shown: list[Estimate] = []
    unavailable: dict[str, str] = {}
    if _other_runtime(question):
        return _of_runtime(question)
    _check_choices(question)
    try:
        for strategy in strategies_of(question):
            found = _best(question, [strategy])
            if found is None:
                unavailable[strategy.name] = _why_none(question, strategy)
            else:
                shown.append(estimate(question, strategy.name, found[1], considered=found[2]))
        if question.both_methods and question.strategy is None:
            for method in ADAPTED:
                _add_adapted(question, method, shown, unavailable)
        tried = not any(one.fits for one in shown) and _add_offloaded(question, shown)
    except Cancelled:
        raise Cancelled("the strategies had not all been looked at") from None
    return Answer(question, tuple(shown), unavailable, _recommended(question, shown), tried)


def _check_choices(question: Question) -> None:
    """The named strategies split data alone: a choice about another axis says nothing without the axis."""
    for name, axis in OF_AXIS.items():
        value = question.pins.given(name)
        if value not in (None, False):
            raise PlannerError(name, value, f"is about {axis}, which no strategy shown here has", f"Add --{axis} N")


def _other_runtime(question: Question) -> bool:
    """Whether the pinned runtime's engine has no named strategy of data parallelism."""
    runtime = question.pins.runtime
    return runtime is not None and all(strategy.engine != runtime.engine for strategy in STRATEGIES)


def _of_runtime(question: Question) -> Answer:
    """The pinned runtime's best layout of all its dimensions; the one with the least memory when none fits."""
    from planner.decide.search import rank as rank_space  # NumPy, and only for these

    ranking = rank_space(question, own_rules=() if question.pins.tp is not None else (STRAY,))
    if not ranking.best and question.pins.tp is None and not ranking.interrupted:
        ranking = rank_space(question)
    if ranking.interrupted and not ranking.best:
        raise Cancelled
    layout = ranking.simplest.layout if ranking.simplest else ranking.smallest
    if layout is None and not ranking.rejected:
        # No sizes are left to look at: what was asked for is a layout that a rule names, or of one device alone.
        layout = exact_layout(question)
        check(case_of(question, layout), engine_of(layout.engine).rules)
    if layout is None:
        why = max(ranking.rejected.items(), key=lambda pair: pair[1])[0]
        name = question.pins.runtime.name if question.pins.runtime else None
        raise PlannerError("runtime", name, f"no layout is legal: {why}", "Change the number of GPUs or the options")
    one = estimate(question, strategy_name(layout), layout, considered=ranking.considered)
    return Answer(question, (one,), {}, _recommended(question, [one]), interrupted=ranking.interrupted)


def strategies_of(question: Question) -> list[Strategy]:
    """The one that was asked for, or all that have something to do: one device alone leaves nothing to split."""
    if (asked := question.asked_strategy) is not None:
        return [asked]
    if single_device(question):
        return [strategy for strategy in STRATEGIES if strategy.shards == "one device"]
    return [strategy for strategy in STRATEGIES if question.cluster.gpus == 1 or strategy.shards != "one device"]


def check_question(question: Question) -> None:
    """Refuse what no layout can answer (PlannerError)."""
    check_batch(question, question.cluster.gpus)
    runtime, strategies = question.pins.runtime, strategies_of(question)
    check_switches(question, [runtime.engine] if runtime else [strategy.engine for strategy in strategies])
    check_job(question)
    _check_kind(question)


def _add_adapted(question: Question, method: Method, shown: list[Estimate], unavailable: dict[str, str]) -> None:
    adapted = msgspec.structs.replace(
        question, job=tuned(with_adapters(question.model, question.job, method), question.given)
    )
    suited = [strategy for strategy in strategies_of(question) if strategy.name in LORA_SHARDINGS]
    found = _best(adapted, suited)
    if found is None:
        refusal = _broken_rule(adapted, suited)
        unavailable[method] = refusal or "no sharding that suits it is left by the options given"
        return
    sharding, layout, considered = found
    shown.append(estimate(adapted, method, layout, sharding=sharding, considered=considered))


def _add_offloaded(question: Question, shown: list[Estimate]) -> bool:
    """Each strategy's fastest layout that fits with states in host memory; whether there was any to look at."""
    looked = False
    ways = list(ways_out(question))
    for strategy in strategies_of(ways[0]) if ways else ():
        fitting = []
        for way in ways:
            found = _best(way, [strategy])
            looked = looked or found is not None
            if found is not None and (one := estimate(question, strategy.name, found[1], considered=found[2])).fits:
                fitting.append(one)
        if fitting:
            shown.append(min(fitting, key=seconds_of))
    return looked


def _best(question: Question, strategies: list[Strategy]) -> tuple[str, Layout, int] | None:
    """(strategy, layout, layouts considered): the fastest that fits, else the one with the least memory."""
    found = best_of(question, strategies)
    return found and (strategy_name(found[0]), *found)


def _recommended(question: Question, shown: list[Estimate]) -> int | None:
    """Full training before LoRA before QLoRA, which are different results and not ways to the same one; of those that
    tie with the fastest, the simplest."""
    for method in METHODS:
        if found := able(shown, method, launching=question.launching):
            chosen = simplest(found, seconds_of, lambda one: one.case.layout, found[0].case.job.seq_len)
            return next(place for place, one in enumerate(shown) if one is chosen)
    return None


def check_job(question: Question, *, any_runtime: bool = False) -> None:
    """Refuse a job that the model or the devices cannot do, however it is split (PlannerError): by the runtime that was
    named, by one that is launched here, or by `any_runtime`."""
    pinned = question.pins.runtime
    able = engines_with(lambda facts: facts.recipes)[0] if any_runtime else "ddp"
    # Any layout will do: these rules ask about the job, the devices and what the engine multiplies in.
    check(case_of(question, Layout(engine=able if pinned is None else pinned.engine)), (*JOB, POSITIONS))


def _check_kind(question: Question) -> None:
    pins = question.pins
    if pins.runtime is None or pins.zero_stage is None:
        return
    stages = sorted({s.zero_stage for s in STRATEGIES if s.engine == pins.runtime.engine})
    if stages and pins.zero_stage not in stages:
        rule = f"runtime {pins.runtime.name} has stage {' or '.join(map(str, stages))} only"
        raise PlannerError("zero_stage", pins.zero_stage, rule, f"Use zero_stage={stages[0]}")


def _why_none(question: Question, strategy: Strategy) -> str:
    gpus, pins = question.cluster.gpus, question.pins
    if pins.runtime is not None and pins.runtime.engine != strategy.engine:
        return f"runtime {pins.runtime.name} does not do it"
    if pins.zero_stage not in (None, strategy.zero_stage):
        return f"it is zero_stage {strategy.zero_stage}, not {pins.zero_stage}"
    if refusal := _broken_rule(question, [strategy]):
        return refusal
    if strategy.shards == "one device" and gpus > 1:
        return f"it runs on 1 GPU, not {gpus}"
    if strategy.shards in ("nothing", "all ranks") and gpus == 1:
        return f"it needs 2 GPUs or more, not 1{': use strategy single' if strategy.shards == 'nothing' else ''}"
    if strategy.shards == "some ranks":
        return f"it needs a GPU count with two factors above 1, not {gpus}"
    return "the options given leave no layout"


def _broken_rule(question: Question, strategies: list[Strategy]) -> str | None:
    """Why no layout of the strategies runs, as the first of them tells it."""
    for strategy in strategies:
        for group in islice(groups_of(question, [strategy]), 1):
            case = case_of(question, group[0])
            if (rule := broken(case, engine_of(strategy.engine).rules)) is not None:
                return rule.sentence(case)
    return None


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
