"""What would make a layout that does not fit smaller: the options that save most on the card, each asked again.

Options a step away come from levers.py, whatever they are of; here are those that go further, until it fits: smaller
micro-batches, shorter sequences, more nodes. Not here: the words (views/render.py), or a phase's bytes (phases.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import msgspec
from msgspec.structs import replace

from planner.ask.launchable import launch_rules, launchable_engines, launches, ways_out
from planner.ask.question import Pins, Question, case_of, limit_bytes
from planner.basics.errors import PlannerError
from planner.decide.answers import Answer
from planner.decide.levers import PEAK, Lever, levers, predicted, speed_ratio
from planner.decide.planning import make_plan
from planner.decide.search import rank
from planner.engines import engine_of
from planner.figures.memory import device_bytes, peak_bytes
from planner.parallelism.case import Case
from planner.parallelism.rule import broken
from planner.parallelism.rules import JOB
from planner.parallelism.technique_rules import STRAY
from planner.spec.calibration import Calibration, calibration
from planner.spec.engines import OFFLOADS
from planner.spec.plan import Plan


def plan_on_fewer(plan: Plan, nodes: int, known: Calibration | None = None) -> Plan:
    """The plan on the most nodes, `nodes` at most, on which a layout of its own engine fits and launches, the
    simplest of those that tie with the fastest; of any engine where its own has none on any of them.

    Sequences an optimizer step stay as many: accumulation takes what ranks no longer do. PlannerError (exit code 3)
    where no layout of any such size fits.
    """
    known = known or calibration()
    job = msgspec.structs.replace(plan.job, global_batch_size=plan.layout.global_batch_size)
    counts = range(min(nodes, plan.cluster.nodes), 0, -1)
    for pins, count in (*product((Pins(runtime=plan.runtime),), counts), *product((Pins(),), counts)):
        cluster = msgspec.structs.replace(plan.cluster, nodes=count)
        question = Question(model=plan.model, cluster=cluster, job=job, calibration=known, pins=pins)
        engines = (plan.layout.engine,) if pins.runtime else launchable_engines(question)
        found = rank(question, engines=engines, more_rules=launch_rules, own_rules=(STRAY,))
        if found.star is not None:
            made = make_plan(case_of(question, found.star.layout), known)
            return msgspec.structs.replace(made, inputs=plan.inputs).sealed()
    rule = f"has no layout on {nodes} node{'s' if nodes > 1 else ''} or fewer that fits, keeps its batch and launches"
    fix = "Give the run as many hosts as it had, or plan again with another batch"
    raise PlannerError("plan", plan.model.name, rule, fix, exit_code=3)


# -- Smaller models ----------------------------------------------------------------------------------------------------

WORTH = 0.05
"""Share of what is on the card that a piece of advice saves at least."""
MOST = 4
MOST_NODES = 64
SHORTEST = 512
"""Tokens. Who asks for a long context trains on no less."""


def advice(found: Answer) -> tuple[Lever, ...]:
    """What saves most on the card, the most first, of the layout that needs least, or of the same without offload where
    the hosts are too small; none where a layout is recommended, or fits and nothing launches it."""
    if found.recommended is not None or not found.estimates:
        return ()
    one = min(found.estimates, key=lambda estimate: estimate.memory.device_bytes)
    if one.fits:
        return ()
    question, case = replace(found.question, job=one.case.job), one.case
    if one.memory.host_fits is False:
        case = replace(case, layout=replace(case.layout, **dict.fromkeys(OFFLOADS, False)))
    now = float(device_bytes(case, peak_bytes(case)))
    best: dict[str, Lever] = {}
    for lever in (*_further(question, case), *levers(question, case, PEAK)):
        kind, saved = next(iter(lever.options)), now - lever.device_bytes
        before = best.get(kind)
        better = before is None or (not before.fits and lever.device_bytes < before.device_bytes)
        enough = lever.fits or kind != "gpus"  # 64 times the nodes are no half measure
        if better and enough and saved >= WORTH * now and (lever.launchable or not one.launchable):
            best[kind] = replace(lever, saved_bytes=saved)
    most = sorted(best.values(), key=lambda lever: (-round(lever.saved_bytes / now, 2), not lever.same_training))
    return tuple(most[:MOST])


def _further(question: Question, case: Case) -> Iterator[Lever]:
    """The first of each kind that fits, else the furthest."""
    for changes in (_smaller_batches(case), _shorter(case), _more_nodes(case), _offloaded(question, case)):
        last: tuple[dict[str, str], Case] | None = None
        for options, other in changes:
            if broken(other, (*JOB, *engine_of(other.layout.engine).rules)) is not None:
                continue
            last = options, other
            if device_bytes(other, peak_bytes(other)) <= limit_bytes(question, other):
                break
        if last is not None:
            yield _asked(question, case, *last)


def _asked(question: Question, case: Case, options: dict[str, str], other: Case) -> Lever:
    now, then = (predicted(one, question.calibration) for one in (case, other))
    size = then.memory.device_bytes
    return Lever(
        options=options,
        saved_bytes=now.memory.device_bytes - size,
        phase_bytes=then.memory.peak.total,
        device_bytes=size,
        fits=size <= limit_bytes(question, other) and then.memory.host_fits is not False,
        speed_ratio=speed_ratio(then.throughput, now.throughput),
        same_training=other.job == case.job and other.layout.global_batch_size == case.layout.global_batch_size,
        launchable=launches(other),
    )


def _smaller_batches(case: Case) -> Iterator[tuple[dict[str, str], Case]]:
    micro, accum = case.layout.micro_batch_size, case.layout.grad_accum
    while micro % 2 == 0:
        micro, accum = micro // 2, accum * 2
        layout = replace(case.layout, micro_batch_size=micro, grad_accum=accum)
        yield {"micro_batch_size": str(micro), "grad_accum": str(accum)}, replace(case, layout=layout)


def _offloaded(question: Question, case: Case) -> Iterator[tuple[dict[str, str], Case]]:
    """States in host memory, of a layout that was given: a search has tried them."""
    for way in ways_out(question) if question.pins.exact else ():
        layout = way.pins.applied(case.layout)
        yield {name: "true" for name in OFFLOADS if getattr(layout, name)}, replace(case, layout=layout)


def _shorter(case: Case) -> Iterator[tuple[dict[str, str], Case]]:
    length = case.job.seq_len
    while length % 2 == 0 and length // 2 >= SHORTEST and case.job.mean_seq_len is None:
        length //= 2
        yield {"seq_len": str(length)}, replace(case, job=replace(case.job, seq_len=length))


def _more_nodes(case: Case) -> Iterator[tuple[dict[str, str], Case]]:
    """Twice the nodes and so on, whose ranks share the states: a global batch that was asked for is kept."""
    layout, cluster, times = case.layout, case.cluster, 2
    while layout.dp_shard > 1 and times <= MOST_NODES:
        accum, odd = divmod(layout.grad_accum, times) if case.job.global_batch_size else (layout.grad_accum, 0)
        if odd:
            return
        wider = replace(layout, dp_shard=layout.dp_shard * times, grad_accum=accum)
        larger = replace(cluster, nodes=cluster.nodes * times)
        options = {"gpus": str(larger.gpus), "dp_shard": str(wider.dp_shard)}
        options |= {} if accum == layout.grad_accum else {"grad_accum": str(accum)}
        yield options, replace(case, layout=wider, cluster=larger)
        times *= 2
