"""Why a named layout is not the recommended one, in one sentence: a rule, memory, a backend's refusal, or time.

What is not named is as in the best layout; where that cannot be, it is the best that has what is named, by any engine
that could. Not here: the search that finds either (search.py, recommendation.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from planner.ask.launchable import launch_rules
from planner.ask.question import Question, case_of, checked_runtime
from planner.basics.errors import PlannerError, did_you_mean
from planner.basics.progress import Cancelled
from planner.basics.quantities import format_bytes, format_duration, whole
from planner.decide.answers import Answer, Constraints, Estimate
from planner.decide.contradictions import refuse_empty
from planner.decide.estimation import estimate
from planner.decide.recommendation import engines_within, run_seconds
from planner.decide.search import rank
from planner.decide.space import proposed
from planner.engines import engine_of
from planner.parallelism.rule import Rule, broken, check
from planner.spec import Layout
from planner.spec.engines import ENGINES
from planner.spec.layout import strategy_name
from planner.spec.options import OPTIONS, reads

ON, OFF = ("true", "yes", "on", "1"), ("false", "no", "off", "0")
SAME = 1e-9
"""Relative difference of two times, or sizes, that is none."""


class WhyNot(msgspec.Struct, frozen=True):
    """`kind` is fixed, rule, memory, backend, deadline, slower, tie, larger, batch, equal or best; `layout` what was
    looked at, whole."""

    layout: Layout
    kind: str
    sentence: str


def why_not(found: Answer, text: str) -> WhyNot:
    """What excludes the layout that `text` names ("dp_shard=8,tp=4"); fields it leaves out are as in the best one.

    Data-parallel sizes that are left out fill the GPUs, accumulation the global batch. Where the best one's fields
    break a rule beside those named, the best layout that has those named is looked at instead.
    """
    question = found.question
    named = _parsed(text)
    for name, value in named.items():
        pinned = question.pins.given(name) if name in OPTIONS else None
        if pinned is not None and pinned != value:
            return WhyNot(_base(found), "fixed", f"{name}={pinned} was asked for, not {name}={value}.")
    layout = _layout(question, _base(found), named)
    rule = _broken(question, layout)
    if rule is not None and (rule.field not in named or "engine" not in named):
        layout, rule = _searched(question, found.constraints, named) or (layout, rule)
    if rule is not None:
        return WhyNot(layout, "rule", _blamed(question, found.constraints, named, layout, rule))
    kind, sentence = _judged(found, estimate(question, strategy_name(layout), layout))
    return WhyNot(layout, kind, sentence)


def _broken(question: Question, layout: Layout) -> Rule | None:
    """The first rule of its engine that a layout breaks."""
    case = case_of(question, layout)
    return broken(case, engine_of(layout.engine).rules)


def _searched(question: Question, limits: Constraints, named: dict[str, Any]) -> tuple[Layout, None] | None:
    """The best layout that has what is named, of what is launched before all else; None where there is none, or where
    something named is in no space of layouts."""
    asked = _pinned(question, named)
    if asked is None:
        return None
    able = tuple(engine for engine in proposed(asked) if all(reads(engine, name) for name in named))
    launched = tuple(engine for engine in engines_within(question, limits) if engine in able)
    for engines, rules in ((launched, None if limits.any_runtime else launch_rules), (able, None)):
        ranking = rank(asked, 1, engines=engines, more_rules=rules, tie=limits.tie)
        layout = ranking.star.layout if ranking.star else ranking.smallest
        if layout is not None:
            return layout, None
        if ranking.interrupted:
            raise Cancelled
    return None


def _pinned(question: Question, named: dict[str, Any]) -> Question | None:
    """The question with what is named fixed; None for a field that cannot be."""
    if not set(named) <= {"engine", *OPTIONS}:
        return None
    pins = question.pins.fixing(**{name: value for name, value in named.items() if name != "engine"})
    if "engine" in named:
        own = question.pins.runtime
        same = own is not None and own.engine == named["engine"]
        folders = tuple(map(str, question.folders))
        pins = msgspec.structs.replace(pins, runtime=own if same else checked_runtime(named["engine"], folders))
    return msgspec.structs.replace(question, pins=pins)


def _blamed(question: Question, limits: Constraints, named: dict[str, Any], layout: Layout, rule: Rule) -> str:
    """Why no layout has what is named: the rule that it breaks in the engine named, or the value that leaves none."""
    asked = None if "engine" in named and rule.field in named else _pinned(question, named)
    if asked is not None:
        try:
            refuse_empty(asked, tuple(ENGINES) if limits.any_runtime else engines_within(question, limits))
        except PlannerError as error:
            if error.field in named or error.field == "runtime":
                return error.sentence
    try:
        check(case_of(question, layout), (rule,))
    except PlannerError as error:
        return error.sentence
    raise AssertionError("the rule is broken")


def _base(found: Answer) -> Layout:
    """The recommended layout, or the nearest to one."""
    if not found.estimates:
        raise PlannerError(
            "why_not", None, "has no layout to be compared with: nothing is legal", "Change the question"
        )
    return found.estimates[0].case.layout


def _parsed(text: str) -> dict[str, Any]:
    """Field -> value of "name=value,name=value"."""
    found: dict[str, Any] = {}
    for part in text.split(","):
        name, equals, value = (piece.strip() for piece in part.partition("="))
        name = name.replace("-", "_")
        if not equals or not value:
            raise PlannerError("why_not", part, "is not name=value", "Write --why-not dp_shard=8,tp=4")
        if name not in Layout.__struct_fields__:
            raise PlannerError(
                "why_not", name, "is not a field of a layout", did_you_mean(name, Layout.__struct_fields__)
            )
        if name in found:
            raise PlannerError("why_not", name, "is named twice", "Name each field once")
        found[name] = _value(name, value)
    return found


def _value(name: str, text: str) -> Any:
    """One field's value, of the type that the layout has there."""
    if name == "stage_layers":
        raise PlannerError("why_not", name, "is a list, which has no place here", "Fix it with --stage-layers")
    default = getattr(Layout(engine="ddp"), name)
    raw: Any = text
    if isinstance(default, bool):
        raw = True if text.lower() in ON else False if text.lower() in OFF else text
    elif isinstance(default, int):
        raw = whole(f"why_not: {name}", text, int(default == 1), 10**12)  # of what there is one, there is never none
    try:
        return getattr(msgspec.convert({"engine": "ddp", name: raw}, Layout), name)
    except msgspec.ValidationError as error:
        fix = did_you_mean(text, ENGINES) if name == "engine" else f"As in {name}={default}"
        raise PlannerError(f"why_not: {name}", text, str(error).partition(" - at")[0].lower(), fix) from None


def _layout(question: Question, base: Layout, named: dict[str, Any]) -> Layout:
    """The base with what was named, and what follows from it."""
    changed = dict(named)
    engine = named.get("engine", base.engine)
    if engine != base.engine and "zero_stage" not in named:
        changed["zero_stage"] = ENGINES[engine].usual_stage
    layout = _filled(msgspec.structs.replace(base, **changed), question.cluster.gpus, named)
    batch = question.job.global_batch_size
    if batch is not None and layout.global_batch_size != batch:
        for name in ("grad_accum", "micro_batch_size"):
            rest = layout.global_batch_size // getattr(layout, name)
            if name not in named and batch % rest == 0:
                return msgspec.structs.replace(layout, **{name: batch // rest})
    return layout


def _filled(layout: Layout, gpus: int, named: dict[str, Any]) -> Layout:
    """Data-parallel sizes that were not named take the GPUs that are left, where the engine would have them."""
    copies = layout.dp_replicate if "dp_replicate" in named else 1
    shards = layout.dp_shard if "dp_shard" in named else 1
    rest = gpus // (layout.world_size // layout.data_parallel * copies * shards)
    facts = layout.facts
    if "dp_shard" not in named and not facts.whole_copies:
        # Copies stay as they are if they can.
        if "dp_replicate" not in named and rest % layout.dp_replicate == 0 and facts.copies != "shards":
            copies, rest = layout.dp_replicate, rest // layout.dp_replicate
        shards = max(rest, 1)
    elif "dp_replicate" not in named:
        copies = max(rest, 1)
    return msgspec.structs.replace(layout, dp_replicate=copies, dp_shard=shards)


def _judged(found: Answer, one: Estimate) -> tuple[str, str]:
    """(kind, sentence) of a legal layout."""
    best = found.estimates[0]
    if not one.fits:
        return "memory", f"{one.reasons[0]}."
    if not one.launchable and not found.constraints.any_runtime:
        return "backend", f"cannot be launched: {one.refusal}."
    if one.case.layout == best.case.layout and found.recommended == 0:
        return "best", "It is the recommended layout."
    run_s, limit_s = run_seconds(found.question, found.constraints, [one]), found.constraints.deadline_s
    if run_s is not None and limit_s is not None and run_s > limit_s:
        return "deadline", f"The run would take {format_duration(run_s)}, the deadline is {format_duration(limit_s)}."
    if one.time.step_s is None or best.time.step_s is None:
        return "slower", f"No time is known for it: {'; '.join(why for why in one.reasons if 'time' in why)}."
    return _slower_or_larger(one, best, tie=found.constraints.tie)


def _slower_or_larger(one: Estimate, best: Estimate, *, tie: float = 0.0) -> tuple[str, str]:
    """(kind, sentence) of a layout that fits, launches and has a time."""
    mine, theirs = (float(each.time.step_s or 0.0) / each.case.layout.global_batch_size for each in (one, best))
    ratio = mine / theirs
    if ratio > 1 + SAME:
        longer = f"{ratio - 1:.2%} longer a sequence than" if ratio < 2 else f"{ratio:.3g} times as long a sequence as"
        return "slower", (
            f"It fits, but takes {longer} the best: "
            f"{one.throughput.tokens_per_s_per_gpu:,.0f} instead of {best.throughput.tokens_per_s_per_gpu:,.0f} "
            "tokens/s a GPU."
        )
    if ratio < 1 - SAME and ratio * (1 + tie) >= 1 - SAME:
        return "tie", (
            f"It ties with the best: it is predicted {1 / ratio - 1:.2%} faster, within {tie * 100:g} %, and the "
            "best is simpler. --tie 0 asks for the fastest."
        )
    batch, usual = one.case.layout.global_batch_size, best.case.layout.global_batch_size
    if ratio < 1 - SAME and batch != usual:
        return "batch", (
            f"It is faster, by {1 - ratio:.2%} a sequence, with a global batch of {batch} instead of {usual}: another "
            f"training, which --global-batch-size {batch} asks for."
        )
    needed, there = one.memory.device_bytes, best.memory.device_bytes
    if needed > there * (1 + SAME):
        return "larger", (
            f"It is as fast as the best, but needs {format_bytes(needed)} on the card instead of {format_bytes(there)}."
        )
    return "equal", "It is as fast as the best and needs no more memory: either will do."


def as_json_object(answer: WhyNot) -> dict[str, Any]:
    """Under "why_not" in recommend/1."""
    return msgspec.structs.asdict(answer)
