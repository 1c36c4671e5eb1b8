"""`planner explain`: where every byte and second of one layout comes from, or every byte of one phase.

Loaded when it is called. Parses, asks, prints. Not here: the derivations (decide/explanation.py, decide/phases.py).
"""

from __future__ import annotations

from typing import Any

import click
import msgspec

from planner.ask import options
from planner.basics.command import OneOf
from planner.basics.display import Element, as_text
from planner.basics.help_page import option
from planner.basics.saying import say, tells_all, terminal_width
from planner.basics.waiting import searching
from planner.cli import JSON_OPTION, QuestionCommand, tell, with_options
from planner.decide import estimate_json, estimation, explanation, phases, strategies
from planner.decide.answers import Answer
from planner.views import phase as phase_view
from planner.views import render, software_text

TREES = {"memory": "memory", "time": "time", "bytes": "communication"}
TOPICS = tuple(TREES)
PHASE_OPTION = option(
    "question",
    "--phase",
    often=True,
    metavar="NAME",
    help="One phase alone, such as peak, the fullest. Of load, forward, backward, optimizer and peak: every byte by "
    "term, unit and formula, and the options that would make it smaller.",
)
VERBOSE_OPTION = option("output", "--verbose", is_flag=True, help="Also the formulas, each with its source.")


@click.command(cls=QuestionCommand, example="planner explain memory --model 7b --gpus 32")
@click.argument("topic", type=OneOf((*TOPICS, "all")), required=False)
@with_options(PHASE_OPTION, VERBOSE_OPTION, JSON_OPTION)
def explain(topic: str | None, phase: str | None, verbose: bool, as_json: bool, **given: Any) -> int:
    """Where every byte and second of a layout comes from. The layout is the recommended one, or the one given. A
    TOPIC, memory, time or bytes (on the wire), adds its formulas, each with its source; all adds those of all three."""
    if topic is not None and phase is not None:
        raise click.UsageError("give a TOPIC or --phase, which has the formulas of one phase")
    question = options.question(given)
    with searching() as waiting:
        found = strategies.answer(question)
    tell(found.question.notes)
    topic = "all" if verbose and topic is None else topic
    whole, view = _of_layout(found, topic) if phase is None else _of_phase(found, phase, verbose=tells_all(verbose))
    whole |= {"estimate": estimate_json.estimate_dict(explanation.chosen(found)), "interrupted": found.interrupted}
    say(msgspec.json.encode(whole) if as_json else as_text([*_heading(found), *view], terminal_width()))
    return waiting.code(0)


def _of_layout(found: Answer, topic: str | None) -> tuple[dict[str, Any], list[Element]]:
    explained = explanation.explain(found)
    one = explained.estimate
    view = render.explain_view(one)
    view += [f"\n{told[0].upper()}{told[1:]}." for told in estimation.loading_told(one.case, one.memory)]
    asked = TOPICS if topic == "all" else (topic,) if topic else ()
    if "memory" in asked:
        told = explanation.origins_text(one.case, explained.bytes)
        view += ["", "BYTES at the fullest moment of each phase", told]
    view += [f"\n{explanation.tree_text(explained.formulas[TREES[one]])}" for one in asked]
    if not asked:
        count = sum(len(explanation.folded(tree.steps)) for tree in explained.formulas.values())
        view.append(f"\n{count} formulas are behind these figures: explain {', '.join(TOPICS)} or all lists them.")
    return explanation.as_json_object(explained), view


def _of_phase(found: Answer, phase: str, *, verbose: bool) -> tuple[dict[str, Any], list[Element]]:
    explained = phases.explain_phase(found.question, explanation.chosen(found).case, phase)
    return phases.as_json_object(explained), phase_view.phase_view(explained, verbose=verbose)


def _heading(found: Answer) -> tuple[str, ...]:
    one = explanation.chosen(found)
    layout = f"{one.strategy}: {render.layout_text(one.case.layout)}. {software_text([one.case.runtime])}"
    return render.headline(found.question), layout, ""
