"""Questions and plans side by side: what is recommended for each, what its run takes, which is cheapest and fastest.

Every figure is that of the recommendation and of the cost, asked alone. Not here: differences of plans (compare.py), or
how an option is read (views/library.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from planner.ask.question import Pins, Question, case_of, warnings
from planner.basics.display import Displayed
from planner.decide.answers import Answer, Constraints
from planner.decide.estimate_json import estimate_dict
from planner.decide.estimation import estimate
from planner.decide.planning import plan_of
from planner.decide.reasons import reasons_of
from planner.engines import engine_of
from planner.figures.steptime import scalar
from planner.parallelism.rule import check
from planner.spec.calibration import calibration
from planner.spec.layout import strategy_name
from planner.spec.plan import Plan
from planner.studies import compare, cost
from planner.studies.compare import Comparison
from planner.studies.cost import Cost
from planner.studies.reply import reply_of

SCHEMA = "decision/1"

Spread = tuple[float, float, float]
"""A figure with the ends of its range."""


class Choice(msgspec.Struct, frozen=True):
    """One argument, by the `name` it was given. `run` is None where no run was described, or nothing is recommended;
    `given` is the plan, where the argument is one."""

    name: str
    found: Answer
    run: Cost | None = None
    given: Plan | None = None

    @property
    def plan(self) -> Plan | None:
        """The plan that was given, or that of the recommended layout."""
        return self.given or (None if self.found.best is None else plan_of(self.found.best))


class Lead(msgspec.Struct, frozen=True):
    """Of the choices whose `figure` is `known`, the one at `place` has the least; the next has `ratio` times as much
    (None: the least is zero). `overlapping` are the places of the others whose range overlaps that of the first: of
    those the order is not certain."""

    figure: str
    known: tuple[int, ...]
    place: int
    next: int
    ratio: float | None
    overlapping: tuple[int, ...]


class Decision(Displayed, msgspec.Struct, frozen=True):
    """Two choices or more, in the order given. `cheapest` and `fastest` are None where fewer than two have the figure;
    the fastest is the first to end where all runs have a length, else the one of most tokens a second. `comparison`
    has what differs between the recommended plans."""

    choices: tuple[Choice, ...]
    cheapest: Lead | None
    fastest: Lead | None
    comparison: Comparison | None

    @property
    def fitting(self) -> tuple[int, ...]:
        """Places of the choices that have a recommended layout."""
        return tuple(place for place, one in enumerate(self.choices) if one.found.best is not None)


def decide(choices: Sequence[Choice]) -> Decision:
    """What separates the choices."""
    plans = [(one.name, plan) for one in choices if one.found.best is not None and (plan := one.plan) is not None]
    timed = all(one.run is not None and one.run.run_s is not None for one in choices if one.found.best is not None)
    return Decision(
        choices=tuple(choices),
        cheapest=_lead("money", choices, lambda one: _of_run(one, "money")),
        fastest=_lead("run_s", choices, lambda one: _of_run(one, "run_s"))
        if timed
        else _lead("seconds_per_token", choices, seconds_per_token),
        comparison=compare.compare(plans) if len(plans) > 1 else None,
    )


def answer_of_plan(plan: Plan) -> Answer:
    """The plan's layout as an answer, predicted anew; it is recommended where it fits, launched or not."""
    pins, known = Pins(runtime=plan.runtime), calibration()
    question = Question(plan.model, plan.cluster, plan.job, known, pins=pins, both_methods=False)
    check(case_of(question, plan.layout), engine_of(plan.layout.engine).rules)
    one = estimate(question, strategy_name(plan.layout), plan.layout)
    limits = Constraints(any_runtime=True)
    return Answer(question=question, estimates=(one,), recommended=0 if one.fits else None, constraints=limits)


def seconds_per_token(one: Choice) -> Spread | None:
    """Of the recommended layout, with its range."""
    best = one.found.best
    if best is None or not best.throughput.tokens_per_s or best.time.step_s is None:
        return None
    value, step_s = 1 / float(best.throughput.tokens_per_s), float(best.time.step_s)
    low, high = (scalar(each) for each in (best.time.low_s, best.time.high_s))
    return None if low is None or high is None else (value, value * low / step_s, value * high / step_s)


def _of_run(one: Choice, name: str) -> Spread | None:
    if one.run is None:
        return None
    value, low, high = (getattr(part, name) for part in (one.run, one.run.low, one.run.high))
    return None if value is None else (value, value if low is None else low, math.inf if high is None else high)


def _lead(figure: str, choices: Sequence[Choice], of: Callable[[Choice], Spread | None]) -> Lead | None:
    known = [(spread, place) for place, one in enumerate(choices) if (spread := of(one)) is not None]
    if len(known) < 2:
        return None
    (first, place), (second, after), *_ = sorted(known)
    overlapping = tuple(other for spread, other in known if other != place and spread[1] <= first[2])
    ratio = second[0] / first[0] if first[0] else None
    return Lead(figure, tuple(other for _, other in known), place, after, ratio, overlapping)


# -- decision/1 ----------------------------------------------------------------------------------------------------


def as_json(found: Decision) -> bytes:
    """One object: a choice an argument, as estimate/1 and cost/1 have its figures, then what separates them."""
    return msgspec.json.encode(
        {
            "schema": SCHEMA,
            "choices": list(map(_choice, found.choices)),
            "cheapest": found.cheapest,
            "fastest": found.fastest,
            "comparison": None if found.comparison is None else compare.as_json_object(found.comparison),
        }
    )


def _choice(one: Choice) -> dict[str, Any]:
    found = one.found
    best = found.best
    return {
        "name": one.name,
        "recommended": None if best is None else estimate_dict(best),
        "reason": reply_of(found).reason or None,
        "reasons": reasons_of(found),
        "cost": None if one.run is None else cost.as_json_object(one.run),
        "warnings": warnings(found.question),
        "notes": found.notes,
        "interrupted": found.interrupted,
    }
