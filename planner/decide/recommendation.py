"""One recommendation: the whole space in one ranking, within what the person asks for, with why-not counts.

Not here: the ranking (search.py), other objectives than the fastest (objectives.py), one named layout (whynot.py), or
the side-by-side view (estimation.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from planner.ask.launchable import (
    OFFLOADING,
    PIECEWISE,
    in_pieces,
    launch_refusal,
    launch_rules,
    launchable_engines,
    ways_out,
)
from planner.ask.question import Question, case_of, check_switches, exact_layout, with_adapters
from planner.basics.errors import PlannerError
from planner.basics.progress import Cancelled
from planner.decide.answers import FREE, Answer, Constraints, Estimate, seconds_of, serial_seconds_of
from planner.decide.candidates import Candidate, LayoutFigures, thing_of
from planner.decide.estimate_json import answer_dict
from planner.decide.estimation import check_job, check_strategy, estimate
from planner.decide.search import Ranking, rank, together
from planner.decide.space import proposed
from planner.engines import engine_of
from planner.parallelism.rule import check
from planner.parallelism.technique_rules import STRAY
from planner.spec import Layout
from planner.spec.engines import find_packaged
from planner.spec.job import Method, tuned
from planner.spec.layout import strategy_name

SCHEMA = "recommend/1"
WHOLE_FRONT = 10**9


ADAPTED: tuple[Method, ...] = ("lora", "qlora")
"""Methods that are looked at where none was chosen and full training does not fit, in the order of preference."""


def recommend(
    question: Question,
    top: int = 3,
    constraints: Constraints = FREE,
    *,
    front: int = 0,
    figures: LayoutFigures | None = None,
) -> Answer:
    """The star (star.py), then the fastest layouts of other things; where none fits and launches, the nearest to it.
    Where none fits with whole logits, those with a loss in pieces, then those with states in host memory.

    The nearest is the fastest when all miss the deadline, else the one with the least memory. `front` layouts of the
    Pareto front are found too. Where a watcher ends the search (progress.py), the best found until then; Cancelled is
    raised where none was. `figures` of the question spare working them out again.
    """
    if question.pins.exact and _whole(question):
        return _of_one(question, constraints, front)
    engines = engines_within(question, constraints)
    check_switches(question, engines)
    check_job(question, any_runtime=constraints.any_runtime)
    slowest = constraints.slowest(question)

    def ranked(
        slowest: float | None,
        asked: Question = question,
        among: tuple[str, ...] = engines,
        *,
        launched: bool = question.launching and not constraints.any_runtime,
        stray: bool = question.pins.tp is not None,
    ) -> Ranking:
        ranking = rank(
            asked, top, engines=among, slowest=slowest, front=WHOLE_FRONT if front else 0,
            more_rules=launch_rules if launched else None, own_rules=() if stray else (STRAY,), tie=constraints.tie,
            figures=figures if asked is question else None,
        )  # fmt: skip
        if ranking.interrupted and not ranking.best:
            raise Cancelled(f"no layout that fits was found in {seen_of(ranking.considered, ranking.unseen)}")
        return ranking

    ranking = ranked(slowest)
    nearest = ranking if ranking.best or slowest is None else ranked(None)
    if not nearest.best:
        able, way = tuple(engine for engine in engines if engine in PIECEWISE), in_pieces(question)
        pieced = ranked(slowest, way, able) if able and way is not None else None
        if pieced is not None and (pieced.best or pieced.smallest):
            ranking = nearest = together([nearest, pieced], top, question, constraints.tie)
    tried = False
    if not nearest.best and constraints.offload:
        able = tuple(engine for engine in engines if engine in OFFLOADING)
        offloaded = []
        for way in ways_out(question):
            offloaded.append(ranked(slowest, way, able))
            if offloaded[-1].interrupted:
                break
        tried = any(one.best or one.smallest for one in offloaded)
        if tried:
            ranking = nearest = together([nearest, *offloaded], top, question, constraints.tie)
    stray = False
    if not nearest.best and question.pins.tp is None:
        over_nodes = ranked(None, stray=True)
        stray = bool(over_nodes.best)
        nearest = over_nodes if stray or nearest.smallest is None else nearest
    unlaunched = not nearest.best and nearest.smallest is None and not constraints.any_runtime
    if unlaunched:
        nearest = ranked(None, launched=False)  # nothing is launched of such a job: what it would be
    if not nearest.best and nearest.smallest is None:
        from planner.decide.contradictions import refuse_empty  # only on the error path

        refuse_empty(question, engines)

    def estimated(layout: Layout) -> Estimate:
        return estimate(question, strategy_name(layout), layout, considered=ranking.considered)

    layouts = [one.layout for one in nearest.best]
    fastest = None
    if ranking.star is not None:
        star = ranking.star.layout
        others = [layout for layout in layouts if thing_of(layout) != thing_of(star)]
        fastest = layouts[0] if layouts[0] != star else None
        layouts = [star, *others][:top]
    if not layouts and nearest.smallest is not None:
        layouts = [nearest.smallest]
    shown = [estimated(layout) for layout in layouts]
    faster = next((one for one in shown if one.case.layout == fastest), None)
    if fastest is not None and faster is None:
        faster = estimated(fastest)
    return Answer(
        question=question,
        estimates=tuple(shown),
        recommended=None if ranking.star is None else 0,
        fastest=faster if faster is not None and faster.time.step_s is not None else None,
        constraints=constraints,
        considered=ranking.considered,
        rejected=ranking.rejected,
        evaluated=ranking.evaluated,
        pruned=ranking.pruned,
        front=thinned(ranking.front, front),
        run_s=run_seconds(question, constraints, shown),
        offload_tried=tried,
        unlaunched=unlaunched,
        stray=stray,
        interrupted=nearest.interrupted,
        unseen=nearest.unseen,
    )


def among_methods(question: Question, top: int = 3, constraints: Constraints = FREE, *, front: int = 0) -> Answer:
    """As `recommend`; where no method was asked for and full training does not fit, LoRA, then QLoRA."""
    found = recommend(question, top, constraints, front=front)
    short = found.best is None and any(not one.fits for one in found.estimates[:1])
    if not (short and question.both_methods) or question.pins.exact or found.unlaunched or found.interrupted:
        return found
    for method in ADAPTED:
        note = f"full training does not fit: ranked is {method}, which trains adapters alone"
        if question.job.recipe.checkpoint is None:
            note += ", and needs --checkpoint DIR to run"
        adapted = adapted_to(question, method)
        asked = msgspec.structs.replace(adapted, both_methods=False, notes=(*question.notes, note))
        try:
            other = recommend(asked, top, constraints, front=front)
        except PlannerError:
            continue
        if other.best is not None:
            return other
    return found


def adapted_to(question: Question, method: Method) -> Question:
    """The question about adapters on a frozen base."""
    job = tuned(with_adapters(question.model, question.job, method), question.given)
    return msgspec.structs.replace(question, job=job)


def seen_of(considered: int, unseen: int) -> str:
    """How much of a space was looked at."""
    return f"{considered - unseen:,} of {considered:,} layouts"


def _whole(question: Question) -> bool:
    """Whether the person fixed a layout, not only some of its dimensions."""
    pins = question.pins
    return pins.dp_shard is not None or pins.dp_replicate is not None


def engines_within(question: Question, constraints: Constraints) -> tuple[str, ...]:
    """Engines to look at; refuses when there is none."""
    if constraints.any_runtime:
        find_packaged()
    if constraints.any_runtime or (not question.launching and question.pins.runtime is not None):
        return proposed(question)
    engines = launchable_engines(question, constraints.backend)
    if not engines:
        rule = "launches none of the engines there are" if constraints.backend else "is missing: none is installed"
        raise PlannerError("backend", constraints.backend, rule, "Add --any-runtime to plan without one")
    return engines


def _of_one(question: Question, constraints: Constraints, front: int) -> Answer:
    """The one layout that was given, checked against every constraint."""
    layout = _launched(question, constraints) or exact_layout(question)
    check_strategy(question, layout)
    case = case_of(question, layout)
    check(case, engine_of(layout.engine).rules)
    if constraints.backend is not None and case.runtime.backend != constraints.backend:
        rule = f"launches no such layout (runtime {case.runtime.name})"
        free = _launched(question, msgspec.structs.replace(constraints, backend=None))
        other = case.runtime.backend if free is None else case_of(question, free).runtime.backend
        raise PlannerError(
            "backend", constraints.backend, rule, f"Use {other}" if other else "Plan it with --any-runtime alone"
        )
    one = estimate(question, strategy_name(layout), layout)
    run_s = run_seconds(question, constraints, [one])
    in_time = run_s is None or constraints.deadline_s is None or run_s <= constraints.deadline_s
    good = one.fits and in_time and (one.launchable or constraints.any_runtime)
    points = []
    if front and one.fits and one.time.step_s is not None:
        points = [Candidate(layout, seconds_of(one), one.memory.device_bytes, serial_seconds_of(one))]
    return Answer(
        question=question,
        estimates=(one,),
        recommended=0 if good else None,
        constraints=constraints,
        considered=1,
        evaluated=1,
        front=tuple(points),
        run_s=run_s,
    )


def _launched(question: Question, constraints: Constraints) -> Layout | None:
    """The given sizes under the engine that they usually mean, or else under the first that can be launched; where none
    can, under one that has a backend, whose rule then says why. None where a person named the engine, or none has."""
    pins = question.pins
    if constraints.any_runtime or pins.runtime is not None or question.asked_strategy is not None:
        return None
    runtimes = [question.runtime(engine) for engine in engines_within(question, constraints)]
    told = None
    for tried in (pins, *(msgspec.structs.replace(pins, runtime=runtime) for runtime in runtimes)):
        try:
            layout = exact_layout(msgspec.structs.replace(question, pins=tried))
            case = case_of(question, layout)
            check(case, engine_of(layout.engine).rules)
        except PlannerError:
            continue
        if constraints.backend not in (None, case.runtime.backend):
            continue
        if launch_refusal(case) is None:
            return layout
        told = told or (layout if case.runtime.backend is not None else None)
    return told


def run_seconds(question: Question, constraints: Constraints, shown: Iterable[Estimate]) -> float | None:
    """Seconds of the whole run at the first layout; None without a deadline, or where no time is known."""
    sequences, first = constraints.sequences(question), next(iter(shown), None)
    if constraints.deadline_s is None or sequences is None or first is None or first.time.step_s is None:
        return None
    return float(first.time.step_s) / first.case.layout.global_batch_size * sequences


def thinned(front: tuple[Candidate, ...], most: int) -> tuple[Candidate, ...]:
    """At most `most` points of a front, fastest first: the ends, and between them steps of equal ratio in memory."""
    if len(front) <= most or most < 2:
        return front[:most]
    largest, smallest = front[0].device_bytes, front[-1].device_bytes
    kept = [front[0]]
    for step in range(1, most):
        allowed = largest * (smallest / largest) ** (step / (most - 1))
        # The fastest that needs no more; the last step asks for the smallest, whatever rounding makes of it.
        one = next((one for one in front if one.device_bytes <= allowed), front[-1])
        if one is not kept[-1]:
            kept.append(one)
    return tuple(kept)


def differences(first: Layout, other: Layout) -> dict[str, Any]:
    """Fields of a layout that are not as in the first."""
    return {
        name: getattr(other, name)
        for name in Layout.__struct_fields__
        if getattr(other, name) != getattr(first, name)
    }  # fmt: skip


# -- recommend/1 ---------------------------------------------------------------------------------------------------


def as_json_object(found: Answer) -> dict[str, Any]:
    """estimate/1's keys, the star first, what differs in the others, and why the rest is not there."""
    whole = answer_dict(found) | {"schema": SCHEMA}
    for one in whole["estimates"]:
        one["differs"] = differences(found.estimates[0].case.layout, Layout(**one["layout"]))
    limits = found.constraints
    return whole | {
        "considered": found.considered,
        "evaluated": found.evaluated,
        "pruned": found.pruned,
        "rejected": found.rejected,
        "constraints": {"backend": limits.backend, "any_runtime": limits.any_runtime},
        "unseen": found.unseen,
        "interrupted": found.interrupted,
        "unlaunched": found.unlaunched,
        "stray": found.stray,
        "deadline": None
        if limits.deadline_s is None
        else {
            "deadline_s": limits.deadline_s,
            "sequences": limits.sequences(found.question),
            "run_s": found.run_s,
            "missed": found.missed,
        },
        "pareto": [
            {"layout": one.layout, "seconds_per_sequence": one.seconds_per_sequence, "device_bytes": one.device_bytes}
            for one in found.front
        ],
    }
