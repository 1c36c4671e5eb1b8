"""Each strategy of data parallelism side by side, with the star: what `planner estimate` answers.

The star is that of `planner recommend` (recommendation.py). Not here: one layout's estimate (estimation.py), or which
layouts a strategy has (space.py).
"""

from __future__ import annotations

import msgspec

from planner.ask.launchable import launch_rules, launchable_engines, ways_out
from planner.ask.question import Question, case_of, check_batch, check_switches, exact_layout, single_device
from planner.basics.errors import PlannerError
from planner.basics.progress import Cancelled
from planner.decide import singles
from planner.decide.answers import FREE, Answer, Constraints, Estimate, seconds_of
from planner.decide.candidates import LayoutFigures
from planner.decide.estimation import check_job, check_strategy, estimate
from planner.decide.recommendation import ADAPTED, adapted_to, recommend
from planner.decide.search import rank
from planner.decide.space import by_batch, spaces
from planner.engines import engine_of
from planner.parallelism.rule import broken, check
from planner.spec.layout import STRATEGIES, Strategy, strategy_name
from planner.spec.options import OF_AXIS


def answer(question: Question) -> Answer:
    """The best layout of each strategy, and the star; or exactly the layout whose sizes are given."""
    if question.pins.exact:
        return _of_one(question)
    check_question(question)
    if _other_runtime(question):
        return _of_runtime(question)
    _check_choices(question)
    figures = LayoutFigures(question)
    try:
        found = recommend(question, 1, figures=figures)
    except PlannerError:  # no layout is launched from here; the strategies say why
        found = Answer(question=question, estimates=(), recommended=None)
    try:
        return _side_by_side(found, figures)
    except Cancelled:
        raise Cancelled("the strategies had not all been looked at") from None


def _of_one(question: Question) -> Answer:
    """The layout whose sizes are given, or which nothing but the question's defaults leaves."""
    layout = exact_layout(question)
    check_strategy(question, layout)
    check(case_of(question, layout), engine_of(layout.engine).rules)
    one = estimate(question, strategy_name(layout), layout)
    good = one.fits and (one.launchable or not question.launching)
    return Answer(question=question, estimates=(one,), recommended=0 if good else None)


def _of_runtime(question: Question) -> Answer:
    """The star of the pinned runtime, which has no named strategies; where no backend here launches it, its best layout
    without a star."""
    runtime = question.pins.runtime
    if next(singles.blocks_of(question), None) is None:
        return _of_one(question)
    launched = runtime is not None and runtime.engine in launchable_engines(question)
    found = recommend(question, 1, Constraints(any_runtime=not launched))
    if launched or not question.launching:
        return found
    return msgspec.structs.replace(found, recommended=None, fastest=None, constraints=FREE)


def _side_by_side(found: Answer, figures: LayoutFigures) -> Answer:
    """Each strategy's best layout, with the star in its strategy's place or behind them."""
    question, star = found.question, found.best
    if found.interrupted:
        raise Cancelled
    shown: list[Estimate] = []
    unavailable: dict[str, str] = {}
    for strategy in strategies_of(question):
        if star is not None and star.strategy == strategy.name and not found.offload_tried:
            shown.append(star)
            continue
        one = _best_of(question, strategy, figures)
        if one is None:
            unavailable[strategy.name] = _why_none(question, strategy)
        else:
            shown.append(one)
    if star is not None and star not in shown:
        shown.append(star)
    if question.both_methods and question.strategy is None:
        for method in ADAPTED:
            adapted = adapted_to(question, method)
            if star is None:
                found, one = _adapted_star(found, adapted)
                star = found.best
            else:
                one = _best_adapted(adapted)
            if one is not None:
                shown.append(msgspec.structs.replace(one, strategy=method, sharding=one.strategy))
            else:
                suited = [_broken_rule(adapted, strategy) for strategy in strategies_of(adapted)]
                told = next((one for one in suited if one), "no sharding that suits it is left by the options given")
                unavailable[method] = told
    tried = star is None and _add_offloaded(question, shown)
    place = next((place for place, one in enumerate(shown) if star is not None and one.case is star.case), None)
    return msgspec.structs.replace(
        found,
        estimates=tuple(shown),
        recommended=place,
        unavailable=unavailable,
        offload_tried=found.offload_tried or tried,
    )


def _best_of(question: Question, strategy: Strategy, figures: LayoutFigures) -> Estimate | None:
    """A strategy's own star, else the layout that needs least memory."""
    asked = LayoutFigures(msgspec.structs.replace(question, strategy=strategy.name), figures)
    ranking = rank(asked.question, figures=asked)
    if ranking.interrupted:
        raise Cancelled
    layout = ranking.star.layout if ranking.star else ranking.smallest
    return None if layout is None else estimate(question, strategy.name, layout, considered=ranking.considered)


def _adapted_star(found: Answer, adapted: Question) -> tuple[Answer, Estimate | None]:
    """The answer where adapters have the star, since full training does not fit, and their best or nearest layout."""
    try:
        other = recommend(adapted, 1)
    except PlannerError:
        return found, None
    one = other.estimates[0]
    if other.best is None:
        return found, one
    return msgspec.structs.replace(found, recommended=0, estimates=(one,), fastest=other.fastest), one


def _best_adapted(adapted: Question) -> Estimate | None:
    """The star of adapters among the strategies, else the layout that needs least memory."""
    engines = tuple(dict.fromkeys(strategy.engine for strategy in strategies_of(adapted)))
    ranking = rank(adapted, engines=engines, more_rules=launch_rules if adapted.launching else None)
    if ranking.interrupted:
        raise Cancelled
    layout = ranking.star.layout if ranking.star else ranking.smallest
    return None if layout is None else estimate(adapted, strategy_name(layout), layout, considered=ranking.considered)


def _add_offloaded(question: Question, shown: list[Estimate]) -> bool:
    """Each strategy's fastest layout that fits with states in host memory; whether there was any to look at."""
    looked = False
    ways = [LayoutFigures(way) for way in ways_out(question)]
    for strategy in strategies_of(question) if ways else ():
        found = [one for way in ways if (one := _best_of(way.question, strategy, way)) is not None]
        looked = looked or bool(found)
        if fitting := [one for one in found if one.fits]:
            shown.append(min(fitting, key=seconds_of))
    return looked


def _broken_rule(question: Question, strategy: Strategy) -> str | None:
    """Why no layout of a strategy runs; None where one does, or there is none."""
    asked = msgspec.structs.replace(question, strategy=strategy.name)
    layouts = (layout for facts in spaces(asked) for layout, _ in by_batch(asked, facts))
    if (layout := next(layouts, None)) is None:
        return None
    case = case_of(question, layout)
    rule = broken(case, engine_of(strategy.engine).rules)
    return None if rule is None else rule.sentence(case)


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
    if refusal := _broken_rule(question, strategy):
        return refusal
    if strategy.shards == "one device" and gpus > 1:
        return f"it runs on 1 GPU, not {gpus}"
    if strategy.shards in ("nothing", "all ranks") and gpus == 1:
        return f"it needs 2 GPUs or more, not 1{': use strategy single' if strategy.shards == 'nothing' else ''}"
    if strategy.shards == "some ranks":
        return f"it needs a GPU count with two factors above 1, not {gpus}"
    return "the options given leave no layout"
