"""`planner explain`: where every byte and second of one layout comes from, or every byte of one phase.

Loaded when it is called. Parses, asks, prints. Not here: the derivations (decide/explanation.py, decide/phases.py).
"""

from __future__ import annotations

from typing import Any

import click
import msgspec

from planner.ask import options
from planner.basics.saying import say
from planner.basics.waiting import searching
from planner.cli import JSON_OPTION, QuestionCommand, tell, with_options
from planner.decide import estimate_json, estimation, explanation, phases, strategies
from planner.decide.answers import Answer
from planner.views import phase as phase_view
from planner.views import render

PHASE_OPTION = click.option(
    "--phase",
    metavar="NAME",
    help="One phase alone (load, forward, backward, optimizer, or peak, the fullest): every byte by term, unit and "
    "formula, and the options that would make it smaller.",
)


@click.command(cls=QuestionCommand)
@with_options(PHASE_OPTION, JSON_OPTION)
def explain(phase: str | None, as_json: bool, **given: Any) -> int:
    """Where every byte and second of a layout comes from. The layout is the recommended one, or the one given."""
    question = options.question(given)
    with searching() as waiting:
        found = strategies.answer(question)
    tell(found.question.notes)
    if phase is not None:
        whole, text = _of_phase(found, phase)
    else:
        whole, text = _of_all(found)
    say(msgspec.json.encode(whole | {"interrupted": found.interrupted}) if as_json else text)
    return waiting.code(0)


def _of_all(found: Answer) -> tuple[dict[str, Any], str]:
    explained = explanation.explain(found)
    one = explained.estimate
    figures = estimate_json.estimate_dict(one)
    parts = [
        *_heading(found),
        render.explain_text(one),
        *(f"\n{told[0].upper()}{told[1:]}." for told in estimation.loading_told(one.case, one.memory)),
        "",
        "BYTES at the fullest moment of each phase",
        explanation.origins_text(one.case, explained.bytes),
        *(f"\n{explanation.tree_text(tree)}" for tree in explained.formulas.values()),
    ]
    return explanation.as_json_object(explained) | {"estimate": figures}, "\n".join(parts)


def _of_phase(found: Answer, phase: str) -> tuple[dict[str, Any], str]:
    one = explanation.chosen(found)
    explained = phases.explain_phase(found.question, one.case, phase)
    figures = estimate_json.estimate_dict(one)
    text = "\n".join([*_heading(found), phase_view.phase_text(explained)])
    return phases.as_json_object(explained) | {"estimate": figures}, text


def _heading(found: Answer) -> tuple[str, ...]:
    one = explanation.chosen(found)
    return render.headline(found.question), f"{one.strategy}: {render.layout_text(one.case.layout)}", ""
