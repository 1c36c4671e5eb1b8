"""What an answer concludes, a sentence each: the star, or why there is none, and how far the figures can be trusted.

Not here: the star's rule (planner/decide/star.py), or the reasons for a layout (planner/decide/reasons.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from planner.basics.display import ITEM, Element, as_text, sentence
from planner.basics.quantities import format_bytes, format_duration, format_volume
from planner.decide.advice import advice
from planner.decide.answers import Answer, Estimate, serial_seconds_of
from planner.decide.levers import Lever
from planner.decide.reasons import reasons_of
from planner.decide.star import TIE, parts_of
from planner.figures.passes import coefficients
from planner.spec.calibration import Calibration
from planner.views import software_text
from planner.views.phase import typed
from planner.views.render import (
    assumed_text,
    batch_text,
    changes,
    headline,
    host_text,
    layout_text,
    layouts_table,
)

if TYPE_CHECKING:
    from planner.studies.fit import FitLimit

LEAST_SHOWN = 0.0005
"""Share of a step that is printed as more than nothing."""
SHOWN_REASONS = 2
"""On a terminal, where --why does not ask for all."""
VERDICTS = {
    "likely": "Likely: should fit; the top of the band does not.",
    "close": "Close: only the bottom of the band fits.",
}
"""What the words mean that are neither yes nor no."""


def verdicts_text(shown: Iterable[Estimate]) -> list[str]:
    """The words between yes and no that are there, each with what it means."""
    words = {one.verdict for one in shown}
    told = [about for word, about in VERDICTS.items() if word in words]
    return [" ".join(["Band: 90 % of measured runs.", *told])] if told else []


def trust_text(known: Calibration, shown: Iterable[Estimate]) -> str:
    """How far the times that are shown may be off, and the coefficients they use, where any is known; and the software
    that the figures describe."""
    every = list(shown)
    found = [coefficients(one.case, known).bands for one in every if one.time.step_s is not None]
    software = software_text(one.case.runtime for one in every)
    if not found:
        return software
    low, high = min(one.time_low for one in found), max(one.time_high for one in found)
    told = f"Real steps took {low:.2g} to {high:.2g} times as long as predicted (calibration {known.name})."
    return f"{told} {software}"


def verdict_text(found: Answer, fitted: FitLimit | None = None) -> list[str]:
    """The recommended layout with what it costs, or why there is none; `fitted` is what an objective found."""
    trust = trust_text(found.question.calibration, [found.best] if found.best else found.estimates[:1])
    why_none = failure_text(found, fitted)
    if why_none is not None or found.best is None:
        return [f"{sentence(why_none or '')} {trust}".rstrip()]
    one = found.best
    later = "" if one.launchable else " (plan only: nothing here launches it)"
    run = "" if found.run_s is None else f" The run takes {format_duration(found.run_s)} of the "
    run += "" if found.run_s is None else f"{format_duration(found.constraints.deadline_s)} allowed."
    told = f"* recommended: {one.name}, {layout_text(one.case.layout)}{later}.{only_offloaded(found)}{run}"
    return [f"{told} {trust}".rstrip(), *star_text(found)]


def failure_text(found: Answer, fitted: FitLimit | None = None) -> str | None:
    """Why nothing is recommended, and the ways out where memory is the cause; None when something is."""
    told = trouble(found, fitted)
    if told is None or found.unlaunched or not found.estimates or any(one.fits for one in found.estimates):
        return told
    return f"{told} {sentence(way_out(found))}."


def trouble(found: Answer, fitted: FitLimit | None = None) -> str | None:
    """Why nothing is recommended, and the nearest layout to it; None when something is."""
    if found.recommended is not None and (fitted is None or fitted.value is not None):
        return None
    if not found.estimates:
        return "no layout is left to look at."
    one = nearest(found)
    named = f"{one.name}, {layout_text(one.case.layout)}"
    if found.missed:
        allowed, taken = format_duration(found.constraints.deadline_s), format_duration(found.run_s)
        return f"the deadline of {allowed} is missed: the fastest takes {taken} ({named})."
    if found.unlaunched or (one.fits and not one.launchable):
        return f"nothing launches it: {one.refusal} ({named}); planner recommend --any-runtime plans without a launch."
    if found.stray:
        layout, domain = one.case.layout, one.case.cluster.fast_domain.name
        return f"nothing fits whose tensor parallel groups stay inside a {domain}; --tp {layout.tp} plans {named}."
    if one.fits:
        return f"nothing is left within the constraints; the nearest is {named}."
    even = ", not even with states in host memory" if found.offload_tried else ""
    needs = f"{format_bytes(one.memory.device_bytes)} on the card"
    if one.memory.host_node_bytes:
        needs += f" and {host_text(one)} of a node's host memory"
    return f"{what_fits_not(found)}{even}; nearest to it is {named} with {needs}."


def nearest(found: Answer) -> Estimate:
    """The first layout that fits, else the one that needs least memory on the card."""
    fitting = (one for one in found.estimates if one.fits)
    return next(fitting, None) or min(found.estimates, key=lambda one: one.memory.device_bytes)


def star_text(found: Answer) -> list[str]:
    """Why the star is not the fastest, and what it costs where nothing overlaps, a sentence each."""
    star, fastest, tie = found.best, found.fastest, found.constraints.tie
    if star is None:
        return []
    if star.time.step_s is None:
        return ["The time to compute is not known here: layouts were compared by their communication alone."]
    told = []
    if fastest is not None:
        gain = f"{found.slower:.1%} faster" if found.slower >= LEAST_SHOWN else "as fast"
        alike = parts_of(star.case.layout, 1) == parts_of(fastest.case.layout, 1)
        better = "the layout that needs less memory" if alike else "the simpler layout"
        sent = format_volume(fastest.comm.wire_bytes_per_rank)
        overlaps = serial_seconds_of(fastest) > serial_seconds_of(star) and found.slower >= LEAST_SHOWN
        told.append(
            f"{apart_text(star, fastest)} is {gain}{f' if all its {sent} overlap' if overlaps else ''}, within the "
            f"{tie:.0%} that predictions cannot tell apart, so {better} is recommended (--tie 0: the fastest)."
        )
    safest = min(
        (one for one in found.estimates if one.fits and one.case.job.method == star.case.job.method),
        key=serial_seconds_of,
        default=star,
    )
    if serial_seconds_of(safest) * (1 + TIE) < serial_seconds_of(star):
        more = serial_seconds_of(star) / serial_seconds_of(safest) - 1
        told.append(f"If nothing overlapped, {apart_text(star, safest)} would be {more:.0%} faster.")
    return told


def apart_text(first: Estimate, other: Estimate) -> str:
    """Another layout by its name, with what the name does not say of how it differs from a first one."""
    layout, batch = other.case.layout, batch_text(other.case.layout)
    if other.name != first.name:
        return f"{other.name} ({batch})"
    return f"{other.name} ({', '.join([*changes(first.case.layout, layout), batch])})"


def only_offloaded(found: Answer) -> str:
    """Said where a layout fits only with states in host memory."""
    plain = any(one.fits and not one.memory.host_node_bytes for one in found.estimates)
    needed = found.offload_tried and not plain
    return " Nothing fits without offload: states wait in host memory." if needed else ""


def what_fits_not(found: Answer) -> str:
    """What no layout was found for: all that was asked, or full training, beside which adapters were not looked at."""
    methods = {one.case.job.method for one in found.estimates}
    others = found.question.both_methods and not found.question.pins.exact and methods == {"full"}
    if found.question.uncounted.may_fit:
        return "nothing is known to fit"
    return "full training does not fit" if others else "nothing fits"


def way_out(found: Answer) -> str:
    """What would need less memory, or give more, each asked again; the one that saves most first."""
    short = [one.memory.host_node_bytes for one in found.estimates if one.memory.host_fits is False]
    hosts = [f"hosts with {format_bytes(min(short))} (--host-memory) would hold it"] if short else []
    levers = advice(found)
    told = [f"{typed(lever)} saves {_saved(lever)}" for lever in levers]
    if short and levers:
        whole = levers[0].saved_bytes + levers[0].device_bytes
        told[0] = f"with nothing offloaded it needs {format_bytes(whole)} on the card, of which {told[0]}"
    return "; ".join([*hosts, *told]) or "no option saves a twentieth of it: use a smaller model"


def _saved(lever: Lever) -> str:
    fits = "which fits" if lever.fits else "which does not fit alone"
    other = "" if lever.same_training else ", and is another training"
    return f"{format_bytes(lever.saved_bytes)}: {format_bytes(lever.device_bytes)} on the card, {fits}{other}"


# -- An answer whole ---------------------------------------------------------------------------------------------------


def answer_text(found: Answer, width: int | None = None, *, why: bool = True) -> str:
    """`planner estimate` as text."""
    return as_text(answer_view(found, why=why), width)


def answer_view(found: Answer, *, why: bool = True) -> list[Element]:
    """The table of strategies, why some do not fit or are not there, the reasons, and last the recommendation."""
    return [headline(found.question), "", *answer_body(found), *why_text(found, why=why), "", *verdict_text(found)]


def answer_body(found: Answer) -> list[Element]:
    """The table of strategies, and why some do not fit or are not there."""
    parts: list[Element] = [layouts_table(found.estimates, found.recommended), ""] if found.estimates else []
    notes = []
    for one in found.estimates:
        launched = one.launchable or not found.question.launching
        notes += [(one, note) for note in (*one.reasons, *([] if launched else [f"cannot be launched: {one.refusal}"]))]
    parts += notes_text(notes, found.estimates)
    parts += [f"{name}: not available: {reason}." for name, reason in found.unavailable.items()]
    return [*parts, *assumed_text(found.question, found.estimates), *verdicts_text(found.estimates)]


def notes_text(notes: Iterable[tuple[Estimate, str]], shown: Sequence[Estimate]) -> list[str]:
    """What there is to say of layouts that are shown, after the name of each; once for all where it holds of all."""
    notes = list(notes)
    every = len(shown) > 1 and {note for _, note in notes}.intersection(
        *({note for one, note in notes if one is each} for each in shown)
    )
    return list(dict.fromkeys(f"{'all' if every and note in every else one.name}: {note}." for one, note in notes))


def why_text(found: Answer, *, why: bool = True) -> list[str]:
    """The reasons, one a line; without `why` the first of them, and how the others are shown."""
    told = [f"{ITEM}{one.text}" for one in reasons_of(found)]
    if not why and len(told) > SHOWN_REASONS:
        more = len(told) - SHOWN_REASONS
        told[SHOWN_REASONS:] = [f"{more} more reason{'s' * (more > 1)}: --why."]
    return ["", *told] if told else []
