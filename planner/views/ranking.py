"""`planner recommend` as text: the best layout whole, the next by what differs, and why the rest is not there.

Not here: any figure (planner.decide.recommendation, planner.studies.objectives, planner.decide.whynot).
"""

from __future__ import annotations

from planner.basics.display import Element, Table, as_text
from planner.basics.quantities import format_bytes
from planner.decide.answers import Answer, Estimate
from planner.decide.candidates import Candidate
from planner.decide.walker import FRONT_SPAN, TOO_LARGE, TOO_LARGE_FOR_HOSTS, TOO_SLOW
from planner.decide.whynot import WhyNot
from planner.figures.saving import advice, advice_text
from planner.spec import Layout
from planner.studies.objectives import Reached
from planner.views import plan_only
from planner.views.fit import NAMES, limit_text
from planner.views.phase import ON_CARD
from planner.views.render import (
    assumed_text,
    batch_text,
    changes,
    headline,
    layout_text,
    layouts_table,
    seconds_text,
)
from planner.views.verdict import notes_text, verdict_text, verdicts_text, why_text


def ranking_text(
    reached: Reached, why_not: WhyNot | None = None, *, verbose: bool = False, why: bool = True,
    width: int | None = None,
) -> str:  # fmt: skip
    """`planner recommend` as text."""
    return as_text(ranking_view(reached, why_not, verbose=verbose, why=why), width)


def ranking_view(
    reached: Reached, why_not: WhyNot | None = None, *, verbose: bool = False, why: bool = True
) -> list[Element]:  # fmt: skip
    """What `ranking_body` has, the reasons, the named layout, and last the verdict."""
    found = reached.found
    parts = [headline(found.question), *ranking_body(reached, verbose=verbose), *why_text(found, why=why)]
    if why_not is not None:
        parts += ["", f"Why not {layout_text(why_not.layout)} ({_batch(why_not.layout)})? {why_not.sentence}"]
    return [*parts, "", *verdict_text(found, reached.fitted)]


def ranking_body(reached: Reached, *, verbose: bool = False) -> list[Element]:
    """Objective, table, notes, counts and Pareto front; `verbose` also counts what each rule turned away."""
    found = reached.found
    shown = found.estimates
    parts: list[Element] = [*_objective(reached), ""]
    if shown:
        first = shown[0].case.layout
        texts = [layout_text(first), *(", ".join(changes(first, one.case.layout)) or "same sizes" for one in shown[1:])]
        head = "layout" if len(shown) == 1 else "layout, then what differs"
        parts += [layouts_table(shown, found.recommended, texts, head), ""]
    parts += notes_text(((one, note) for one in shown for note in _notes(one, found)), shown)
    parts += [*assumed_text(found.question, shown), *verdicts_text(shown)]
    if shown:
        case = shown[0].case
        told = advice_text(advice(case.model, case.job, case.cluster))
        parts.append(f"{told[0].upper()}{told[1:]}.")
    parts += counts_text(found, verbose=verbose)
    if found.front:
        parts += ["", *_front(found)]
    return parts


def _objective(reached: Reached) -> list[str]:
    fitted = reached.fitted
    if fitted is None:
        return []
    value = "nothing fits" if fitted.value is None else f"{fitted.value:,}"
    return [f"{NAMES[fitted.quantity]}: {value}; {limit_text(fitted)}"]


def _batch(layout: Layout) -> str:
    return f"{layout.engine}, micro-batch {batch_text(layout)}"


def _notes(one: Estimate, found: Answer) -> list[str]:
    if found.constraints.any_runtime:
        return [*one.reasons, *([] if one.launchable else [plan_only(one)])]
    return [*one.reasons, *([] if one.launchable else [f"cannot be launched: {one.refusal}"])]


def counts_text(found: Answer, *, verbose: bool) -> list[str]:
    """How many layouts there are and why they are not shown; `verbose` names each rule."""
    if found.interrupted and not found.considered:
        return ["The search was interrupted."]
    known = found.rejected
    counts = {
        "not looked at": found.unseen,
        "need too much memory": sum(known.get(name, 0) for name in (TOO_LARGE, TOO_LARGE_FOR_HOSTS)),
        "miss the deadline": known.get(TOO_SLOW, 0),
        "ruled out": sum(known.values())
        - sum(known.get(name, 0) for name in (TOO_LARGE, TOO_LARGE_FOR_HOSTS, TOO_SLOW)),
        "slower by their bounds": found.pruned,
        "evaluated one by one": found.evaluated,
    }
    told = ", ".join(f"{count:,} {what}" for what, count in counts.items() if count)
    text = [f"{found.considered:,} layouts: {told}{'' if verbose or not known else ' (--verbose names the rules)'}."]
    if found.interrupted:
        text.insert(0, "The search was interrupted.")
    if verbose:
        rules = [f"  {count:,} {name}" for name, count in sorted(known.items(), key=lambda pair: -pair[1])]
        text += ["Turned away:", *rules] if rules else ["Turned away: none."]
    return text


def _front(found: Answer) -> list[Element]:
    first = found.front[0]
    rows = tuple(_point(one, first) for one in found.front)
    head = ("engine", "layout", "micro x accum", ON_CARD, "time/sequence", "slower by")
    return [
        f"PARETO FRONT up to {FRONT_SPAN:g} times as slow: no layout is both faster and smaller",
        Table(head, rows, left=2),
    ]


def _point(one: Candidate, first: Candidate) -> tuple[str, ...]:
    layout = one.layout
    return (
        layout.engine,
        layout_text(layout),
        batch_text(layout),
        format_bytes(one.device_bytes),
        seconds_text(one.seconds_per_sequence),
        f"{one.seconds_per_sequence / first.seconds_per_sequence - 1:.1%}",
    )
