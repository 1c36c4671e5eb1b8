"""What the page of each command shows, and in which order: the verdict first, then pictures, tables and the derivation.

Not here: HTML (page.py), a picture (svg/), or a table that a terminal shows, too (verdict.py, cost.py, ...).
"""

from __future__ import annotations

from collections.abc import Sequence

from planner.basics.display import ITEM, Element
from planner.basics.quantities import format_bytes
from planner.decide.answers import Answer, Estimate
from planner.decide.explanation import derivation, origins, origins_text, tree_text
from planner.decide.planning import plan_of
from planner.figures.steptime import scalar
from planner.figures.timeline import Timeline, timeline
from planner.parallelism.case import Case
from planner.spec.calibration import Calibration
from planner.spec.plan import Plan, encode_plan
from planner.studies.compare import Comparison
from planner.studies.cost import Cost
from planner.studies.decision import Decision
from planner.studies.fit import FitLimits
from planner.studies.objectives import Reached
from planner.studies.sweep import Sweep
from planner.views.compare import compare_view, letters_of
from planner.views.cost import cost_view
from planner.views.decision import decision_view
from planner.views.fit import NAMES, fit_view
from planner.views.page import Fact, Section, page_of
from planner.views.ranking import ranking_body
from planner.views.render import band_text, count_text, headline, layout_text, percent_text, seconds_text
from planner.views.scene.difference import PARTS, difference_of
from planner.views.scene.memory import memory_of
from planner.views.scene.time import Axis, axis_of, chosen
from planner.views.scene.why import Why, why_of
from planner.views.shown import collectives_table, memory_table
from planner.views.svg import lanes, map, time
from planner.views.sweep import sweep_view
from planner.views.verdict import answer_body, verdict_text

Sides = Sequence[tuple[str, Estimate | Plan]]
LONG = ("memory.device_bytes", "memory.low_bytes", "memory.high_bytes", "time.step_s",
        "throughput.tokens_per_s_per_gpu", "throughput.mfu")  # fmt: skip
"""Keys of a layout's figures in estimate/1 and recommend/1."""
SHORT = ("device_bytes", "device_low_bytes", "device_high_bytes", "step_s", "tokens_per_s_per_gpu", "mfu")
"""The same where an answer has a layout beside other things: cost/1, fit/1, sweep/1."""
MOST_SIDES = 12


def answer_page(found: Answer, command: str) -> bytes:
    """The page of `planner estimate`."""
    return _answer(found, answer_body(found), verdict_text(found), command)


def ranking_page(reached: Reached, command: str) -> bytes:
    """The page of `planner recommend`."""
    found = reached.found
    return _answer(found, ranking_body(reached, verbose=True), verdict_text(found, reached.fitted), command)


def cost_page(found: Cost, command: str) -> bytes:
    """The page of `planner cost`."""
    one, known = found.best, found.question.calibration
    plan = plan_of(one)
    sections = [
        Section("What the run takes", cost_view(found)[3:]),
        *_layout(one, plan, known, "best", SHORT),
        *_derivation(one, plan, known),
    ]
    return page_of(headline(found.question), [f"{one.name}: {layout_text(one.case.layout)}."], sections, command)


def fit_page(found: FitLimits, command: str) -> bytes:
    """The page of `planner fit`."""
    best = [(f"{NAMES[one.quantity]}: {one.value:,}", one.best) for one in found.found if one.best and one.value]
    facts = [fact for place, one in enumerate(found.found) if one.best
             for fact in facts_of(one.best, f"answers.{place}.best", SHORT, f"{NAMES[one.quantity]}, ")]  # fmt: skip
    title = f"{headline(found.question)}: what fits"
    view = fit_view(found)
    sections = [Section("The edges", view[1:]), *_beside(best), Section("Figures", facts=facts, folded=True)]
    return page_of(title, (), sections, command)


def sweep_page(found: Sweep, command: str) -> bytes:
    """The page of `planner sweep`."""
    best = [(f"{one.gpus:,} GPUs", one.best) for one in found.points if one.best]
    facts = [fact for place, one in enumerate(found.points) if one.best
             for fact in facts_of(one.best, f"points.{place}.best", SHORT, f"{one.gpus:,} GPUs, ")]  # fmt: skip
    view = sweep_view(found)
    sections = [Section("Size by size", view[1:]), *_beside(best), Section("Figures", facts=facts, folded=True)]
    return page_of(str(view[0]), (), sections, command)


def compare_page(found: Comparison, command: str) -> bytes:
    """The page of `planner compare` of plans."""
    sides = [(side.name, side.plan) for side in found.sides]
    facts = [
        Fact(f"{side.name}, {name}", told, f"plans.{place}.{key}", value)
        for place, side in enumerate(found.sides)
        for name, told, key, value in (
            ("memory on the card", format_bytes(side.device_bytes), "memory.device_bytes", side.device_bytes),
            ("step", seconds_text(side.step_s), "step_s", side.step_s),
            ("tokens/s", count_text(side.tokens_per_s), "tokens_per_s", side.tokens_per_s),
        )
    ]
    sections = [
        Section("Figures", facts=facts),
        *_beside(sides),
        Section("What differs", compare_view(found)),
        *(Section(f"Where the ranks of {name} are", pictures=(map.svg_of(plan),), spare=True) for name, plan in sides),
    ]
    return page_of(" or ".join(side.name for side in found.sides), (), sections, command)


def decision_page(found: Decision, command: str) -> bytes:
    """The page of `planner compare` of questions."""
    view = decision_view(found, verbose=True)
    letters = letters_of(found.choices)
    named = list(enumerate(zip(letters, found.choices, strict=True)))
    sides = [(f"{letter}: {one.found.best.name}", one.found.best) for _, (letter, one) in named if one.found.best]
    facts = [
        fact
        for place, (letter, one) in named
        if one.found.best is not None
        for fact in facts_of(one.found.best, f"choices.{place}.recommended", LONG, f"{letter}, ")
    ]
    sections = [
        Section("Question by question", view[2:]),
        *_beside(sides),
        Section("Figures", facts=facts, folded=True),
        *(
            Section(f"{letter}: where the ranks are", pictures=(map.svg_of(one.plan),), spare=True)
            for _, (letter, one) in named
            if one.plan is not None
        ),
    ]
    return page_of("Which is cheapest, and which is fastest?", [str(view[0])], sections, command)


def timeline_page(found: Timeline, axis: Axis, left_out: Sequence[int], command: str) -> bytes:
    """The page of `planner timeline`."""
    facts = [
        Fact("step", seconds_text(found.step_s), "time.step_s", float(found.step_s)),
        *(Fact(name, seconds_text(value), f"time.{key}", float(value))
          for key, name in PARTS.items() if (value := getattr(found.time, key)) is not None),
    ]  # fmt: skip
    picture = time.svg_of(axis, left_out)
    return page_of(axis.told[0], axis.told[1:], [Section("A step", facts=facts, pictures=(picture,))], command)


# -- parts ---------------------------------------------------------------------------------------------------------


def _answer(found: Answer, body: Sequence[Element], verdict: Sequence[str], command: str) -> bytes:
    known, one, place = found.question.calibration, found.best, found.recommended
    shown = [(other.name, other) for other in found.estimates[:MOST_SIDES]]
    sections = [_why(why_of(found)), Section("What else there is", body), *_beside(shown)]
    if one is not None and place is not None:
        plan = plan_of(one)
        layout = _layout(one, plan, known, f"estimates.{place}", LONG)
        sections = [*layout, *sections, *_derivation(one, plan, known)]
    lead = [sentence.removeprefix("* ") for sentence in verdict]
    return page_of(headline(found.question), lead, sections, command)


def _why(why: Why) -> Section:
    pictures = (lanes.ways_svg(why),) if why.ways else ()
    return Section("Why", [f"{ITEM}{reason}" for reason in why.reasons], pictures=pictures)


def _derivation(one: Estimate, plan: Plan, known: Calibration) -> list[Section]:
    """The plan of a layout, and where its figures come from, folded."""
    formulas = "\n\n".join(tree_text(tree) for tree in derivation(one.case, known).values())
    return [
        Section("The plan: save it as plan.json", source=encode_plan(plan).decode(), folded=True),
        Section("Where every byte comes from", source=origins_text(one.case, origins(one.case)), folded=True),
        Section("Every formula behind these figures, with its source", source=formulas, folded=True, spare=True),
    ]


def facts_of(one: Estimate, at: str, keys: Sequence[str], name: str = "") -> list[Fact]:
    """A layout's figures under the keys that `--json` has them by."""
    memory, done = one.memory, one.throughput
    rows: tuple[tuple[str, str, float | None], ...] = (
        ("memory on the card", format_bytes(memory.device_bytes), memory.device_bytes),
        ("90 % of runs from", format_bytes(one.low_bytes), one.low_bytes),
        ("90 % of runs to", format_bytes(one.high_bytes), one.high_bytes),
        ("step", seconds_text(one.time.step_s), scalar(one.time.step_s)),
        ("tokens/s a GPU", count_text(done.tokens_per_s_per_gpu), scalar(done.tokens_per_s_per_gpu)),
        ("MFU", percent_text(done.mfu), scalar(done.mfu)),
    )
    return [Fact(name + row, told, f"{at}.{key}", value) for key, (row, told, value) in zip(keys, rows, strict=True)]


def _layout(one: Estimate, plan: Plan, known: Calibration, at: str, keys: Sequence[str]) -> list[Section]:
    """One layout: its figures, memory, ranks and step."""
    told = f"{one.name}: {layout_text(one.case.layout)}. Band: {band_text(one)}, 90 % of measured runs."
    sent = [collectives_table(one)] if one.comm.engine else []
    return [
        Section("The layout", [told], facts_of(one, at, keys)),
        Section("Memory by phase", [memory_table(one.memory.phases)], pictures=(lanes.memory_svg(memory_of(one)),)),
        Section("Where the ranks are, and what they send", sent, pictures=(map.svg_of(plan),), spare=True),
        *_step(one.case, known),
    ]


def _step(case: Case, known: Calibration) -> list[Section]:
    """One step on an axis of time; nothing where no time is predicted."""
    picture = step_svg(case, known)
    return [] if picture is None else [Section("A step", pictures=(picture,), spare=True)]


def step_svg(case: Case, known: Calibration) -> bytes | None:
    """One step on an axis of time as a picture; None where no time is predicted."""
    found = timeline(case, known)
    return None if found is None else time.svg_of(*chosen(axis_of(case, found), None))


def _beside(sides: Sides) -> list[Section]:
    """Several layouts as bars on one scale."""
    found = difference_of(sides)
    pictures = [lanes.memory_difference_svg(found)] if found.memory else []
    pictures += [lanes.time_difference_svg(found)] if found.time else []
    return [Section("Side by side", pictures=pictures, spare=True)] if len(sides) > 1 and pictures else []
