"""Why a question leaves no layout at all: the given value that empties the space, the rule, and the nearest legal one.

Asked only when a search came back with nothing to look at. Not here: the rules themselves (rules.py, engines/), or
layouts that are legal and too large (search.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from planner.ask.launchable import launchable_engines
from planner.ask.question import Pins, Question, case_of, check_batch
from planner.basics.errors import PlannerError
from planner.decide.blocks import Block, blocks_of
from planner.decide.space import proposed
from planner.engines import engine_of
from planner.parallelism.rule import broken, check, one_of
from planner.parallelism.rules import AXES, nearest
from planner.spec.engines import ENGINES
from planner.spec.options import TABLE

ORDER = tuple(option.name for option in sorted(TABLE, key=lambda option: option.trust) if option.trust)
"""What a person may fix, in the order in which they are taken on trust: the first that leaves nothing is blamed."""


def refuse_empty(question: Question, engines: tuple[str, ...]) -> None:
    """Refuse a question whose space over these engines is empty, or holds no legal layout (PlannerError)."""
    if _any(question, engines):
        if question.job.global_batch_size is not None:
            _refuse_batch(question, _without(question, ["global_batch_size"]), engines)
        _refuse_rule(question, engines)
        return
    given = [name for name in ORDER if _value(question, name) is not None]
    trusted = _without(question, given)
    if not _any(trusted, engines):
        rule = "is a number that no engine looked at can split over"
        raise PlannerError("gpus", question.cluster.gpus, rule, _more_engines(trusted, engines) or "Try another number")
    for place, name in enumerate(given):
        narrower = _without(question, given[place + 1 :])
        if not _any(narrower, engines):
            _blame(trusted, narrower, name, given[:place], engines)
        trusted = narrower


def _blame(trusted: Question, narrower: Question, name: str, kept: list[str], engines: tuple[str, ...]) -> None:
    if name == "global_batch_size":
        _refuse_batch(narrower, trusted, engines)
    value: Any = _value(narrower, name)
    if name in AXES:  # whose size the rules of the engines that split them judge
        _refuse_axis(trusted, name, value)
    value = value.name if name == "runtime" else value
    groups = [f"method={narrower.job.method}"] if narrower.job.adapters is not None else []
    groups += [f"{one}={_value(narrower, one)}" for one in kept if one != "runtime"]
    rule = f"no layout of {narrower.cluster.gpus} GPUs has it{' with ' + ', '.join(groups) if groups else ''}"
    more = _more_engines(narrower, engines)
    if more:
        raise PlannerError(name, value, "no engine that can be launched from here has it", more)
    legal = sorted(_values(trusted, engines, name), key=str)
    numbers = [one for one in legal if isinstance(one, int) and not isinstance(one, bool)]
    best = nearest(value, numbers) if numbers and isinstance(value, int) else legal[0] if legal else None
    raise PlannerError(name, value, rule, "Leave it out" if best is None else f"Use {name}={best}")


def _refuse_batch(question: Question, freed: Question, engines: tuple[str, ...]) -> None:
    """Refuse a global batch that is not a multiple even of the fewest data-parallel ranks of a legal layout when the
    batch is `freed`."""
    fewest = [ranks for block in _some(freed, engines) if (ranks := _fewest_ranks(freed, block)) is not None]
    if fewest:
        check_batch(question, min(fewest))


def _fewest_ranks(question: Question, block: Block) -> int | None:
    """The fewest data-parallel ranks of a block's layouts that break no rule; None when all do."""
    ranks = block.rows["dp_replicate"] * block.rows["dp_shard"]
    rules = engine_of(block.template.engine).rules
    for row in ranks.argsort():
        case = case_of(question, block.layout(int(row)))
        if broken(case, rules) is None:
            return int(ranks[row])
    return None


def _refuse_axis(question: Question, name: str, value: int) -> None:
    """The rule that the value breaks in an engine that splits the axis, if it is about the value itself."""
    for facts in ENGINES.values():
        block = next(_some(question, (facts.name,)), None) if name in facts.splits else None
        if block is None:
            continue
        widest = int((block.rows["dp_shard"] * block.rows["cp"] * block.rows["tp"]).argmax())  # experts span these
        case = case_of(question, msgspec.structs.replace(block.layout(widest), **{name: value}))
        check(case, [rule for rule in engine_of(facts.name).rules if rule.field == name])


def _refuse_rule(question: Question, engines: tuple[str, ...]) -> None:
    """The rule that turns most layouts away, in its own words about one of them."""
    turned: dict[str, tuple[int, Any]] = {}
    for block in _some(question, engines):
        rules = engine_of(block.template.engine).rules
        for row in (0, block.size // 2, block.size - 1):
            case = case_of(question, block.layout(row))
            if (rule := broken(case, rules)) is not None:
                times, first = turned.get(rule.name, (0, (case, rules)))
                turned[rule.name] = (times + block.size, first)
    if turned:
        case, rules = max(turned.values(), key=lambda pair: pair[0])[1]
        check(case, rules)


def _more_engines(question: Question, engines: tuple[str, ...]) -> str:
    """The way out when engines that nothing launches from here would do."""
    others = tuple(engine for engine in proposed(question) if engine not in engines)
    able = [engine for engine in others if _any(question, (engine,))]
    launched = [engine for engine in able if engine in launchable_engines(question)]
    if launched:  # a backend was asked for, which --any-runtime would contradict
        return f"Without --backend there is {one_of(launched)}"
    return f"Add --any-runtime to look at {', '.join(able)} too" if able else ""


def _some(question: Question, engines: tuple[str, ...]) -> Iterator[Block]:
    return (block for block in blocks_of(question, engines) if block.size)


def _any(question: Question, engines: tuple[str, ...]) -> bool:
    return next(_some(question, engines), None) is not None


def _value(question: Question, name: str) -> Any:
    if name == "strategy":
        return question.strategy
    return question.job.global_batch_size if name == "global_batch_size" else getattr(question.pins, name)


def _without(question: Question, names: list[str]) -> Question:
    """The same question with these left free."""
    pins = {name: None for name in names if name in Pins.__struct_fields__}
    job = (
        msgspec.structs.replace(question.job, global_batch_size=None) if "global_batch_size" in names else question.job
    )
    return msgspec.structs.replace(
        question,
        job=job,
        pins=question.pins.fixing(**pins),
        strategy=None if "strategy" in names else question.strategy,
    )


def _values(question: Question, engines: tuple[str, ...], name: str) -> set[Any]:
    """What the space has for a field."""
    found: set[Any] = set()
    for block in _some(question, engines):
        if name in block.rows:
            found.update(int(one) for one in set(block.rows[name].tolist()))
        elif hasattr(block.template, name):
            found.add(getattr(block.template, name))
    return found
