"""`planner recommend` as text: the best layout whole, the next by what differs, and why the rest is not there.

Not here: any figure (planner.decide.recommendation, planner.studies.objectives, planner.decide.whynot).
"""

from __future__ import annotations

from planner.basics.tabletext import table
from planner.basics.units import format_bytes, format_duration
from planner.decide.answers import Answer, Estimate
from planner.decide.candidates import Candidate
from planner.decide.walker import FRONT_SPAN
from planner.decide.whynot import WhyNot
from planner.figures.saving import advice, advice_text
from planner.spec import Layout
from planner.studies.objectives import Reached
from planner.views.fit import NAMES, limit_text
from planner.views.phase import ON_CARD
from planner.views.render import (
    REASON_COLUMNS,
    assumed_text,
    batch_text,
    changes,
    headline,
    host_text,
    layout_text,
    layouts_table,
    only_offloaded,
    seconds_text,
    star_text,
    trust_text,
    verdicts_text,
    way_out,
    what_fits_not,
    why_text,
)


def ranking_text(reached: Reached, why_not: WhyNot | None = None) -> str:
    """Objective, table, notes, verdict, counts, Pareto front, the named layout, and the reasons."""
    found = reached.found
    shown = found.estimates
    parts = [headline(found.question), *_objective(reached), ""]
    if shown:
        first = shown[0].case.layout
        texts = [layout_text(first), *(", ".join(changes(first, one.case.layout)) or "same sizes" for one in shown[1:])]
        head = "layout" if len(shown) == 1 else "layout, then what differs"
        parts += [layouts_table(shown, found.recommended, texts, head), ""]
    parts += dict.fromkeys(f"{one.name}: {note}." for one in shown for note in _notes(one, found))
    parts += [*assumed_text(found.question, shown), *verdicts_text(shown), _verdict(reached)]
    if shown:
        case = shown[0].case
        told = advice_text(advice(case.model, case.job, case.cluster))
        parts.append(f"{told[0].upper()}{told[1:]}.")
    parts.append(counts_text(found))
    if found.front:
        parts += ["", *_front(found)]
    if why_not is not None:
        parts += ["", f"Why not {layout_text(why_not.layout)} ({_batch(why_not.layout)})? {why_not.sentence}"]
    return "\n".join([*parts, *why_text(found)])


def _objective(reached: Reached) -> list[str]:
    fitted = reached.fitted
    if fitted is None:
        return []
    value = "nothing fits" if fitted.value is None else f"{fitted.value:,}"
    return [f"{NAMES[fitted.quantity]}: {value}; {limit_text(fitted)}"]


def _batch(layout: Layout) -> str:
    return f"{layout.engine}, micro-batch {batch_text(layout)}"


def _notes(one: Estimate, found: Answer) -> list[str]:
    launch = [] if one.launchable else [one.refusal or ""]
    if found.constraints.any_runtime:
        return [*one.reasons, *(f"for later, cannot be launched from here: {why}" for why in launch)]
    return [*one.reasons, *(f"cannot be launched: {why}" for why in launch)]


def _verdict(reached: Reached) -> str:
    found = reached.found
    trust = trust_text(found.question.calibration, found.estimates[:1])
    told = failure_text(reached)
    if told is not None:
        return f"{told[0].upper()}{told[1:]} {trust}".rstrip()
    one = found.estimates[0]
    later = "" if one.launchable else " (for later: nothing launches it from here)"
    run = "" if found.run_s is None else f" The run takes {format_duration(found.run_s)} of the "
    run += "" if found.run_s is None else f"{format_duration(found.constraints.deadline_s)} allowed."
    told = f"* recommended: {one.name}, {layout_text(one.case.layout)}{later}.{only_offloaded(found)}{run}"
    return "\n".join([f"{told} {trust}".rstrip(), *star_text(found)])


def failure_text(reached: Reached) -> str | None:
    """Why nothing is recommended, and the ways out where memory is the cause; None when something is."""
    found, told = reached.found, trouble(reached)
    if told is None:
        return None
    too_large = not found.unlaunched and any(not one.fits for one in found.estimates[:1])
    way = way_out(found) if too_large else ""
    return f"{told} {way[0].upper()}{way[1:]}." if too_large else told


def trouble(reached: Reached) -> str | None:
    """Why nothing is recommended, and the best that can be had; None when something is."""
    found = reached.found
    fitted = reached.fitted
    if found.recommended is not None and (fitted is None or fitted.value is not None):
        return None
    shown = found.estimates
    nearest = f"{shown[0].name}, {layout_text(shown[0].case.layout)}" if shown else ""
    if found.missed:
        allowed, taken = format_duration(found.constraints.deadline_s), format_duration(found.run_s)
        return f"the deadline of {allowed} is missed: the fastest takes {taken} ({nearest})."
    if not shown:
        return "no layout is left to look at."
    if found.unlaunched or (shown[0].fits and not shown[0].launchable):
        return f"nothing launches it: {shown[0].refusal} ({nearest}); --any-runtime plans without a launch."
    if found.stray:
        layout, domain = shown[0].case.layout, shown[0].case.cluster.fast_domain.name
        return f"nothing fits whose tensor parallel groups stay inside a {domain}; --tp {layout.tp} plans {nearest}."
    if shown[0].fits:
        return f"nothing is left within the constraints; the nearest is {nearest}."
    even = ", not even with states in host memory" if found.offload_tried else ""
    needs = f"{format_bytes(shown[0].memory.device_bytes)} on the card"
    if shown[0].memory.host_node_bytes:
        needs += f" and {host_text(shown[0])} of a node's host memory"
    return f"{what_fits_not(found)}{even}; nearest to it is {nearest} with {needs}."


def counts_text(found: Answer) -> str:
    """How many layouts were looked at in which way, and why not."""
    from textwrap import fill  # takes milliseconds, and only text needs it

    told = sorted(found.rejected.items(), key=lambda pair: -pair[1])
    reasons = "; ".join(f"{name}: {count:,}" for name, count in told) or "none"
    if found.interrupted and not found.considered:
        return "The search was interrupted."
    unseen = f"The search was interrupted, {found.unseen:,} not looked at. " if found.interrupted else ""
    counts = (
        f"{unseen}{found.considered:,} layouts considered, {found.evaluated:,} evaluated one by one, "
        f"{found.pruned:,} pruned by their bounds."
    )
    return f"{counts}\n{fill(f'Rejected: {reasons}.', REASON_COLUMNS, subsequent_indent='  ')}"


def _front(found: Answer) -> list[str]:
    first = found.front[0]
    rows = [_point(one, first) for one in found.front]
    head = ("engine", "layout", "micro x accum", ON_CARD, "time/sequence", "slower by")
    return [
        f"PARETO FRONT up to {FRONT_SPAN:g} times as slow: no layout is both faster and smaller",
        table(head, rows, left=2),
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
