"""Claims about drawn questions: every command, the library and the explorer star the same layout, and further rows of a
ranking are other things.

A few questions in the quick tests, 300 in the long ones. Not here: the search itself (test_search.py), or the rule
(test_ties.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import Any

import pytest

import planner as library
from planner.ask.options import question
from planner.basics.errors import PlannerError
from planner.cli import planner
from planner.decide.answers import Answer
from planner.decide.candidates import thing_of
from planner.decide.recommendation import among_methods
from planner.decide.strategies import answer
from planner.spec import Layout
from planner.spec.options import OPTIONS
from scripts.same_questions import KINDS
from tui import inputs, state

Given = dict[str, Any]


def drawn(seed: int) -> Iterator[Given]:
    """Options of questions that leave the layout open."""
    chance = Random(seed)
    while True:
        kind = chance.choice(("compared", "compared", "compared", "estimate"))
        words = [word for word in shlex.split(KINDS[kind](chance))[1:] if word != "--json"]
        params = planner.commands["estimate"].make_context("estimate", words).params
        given = {name: value for name, value in params.items() if name in OPTIONS and value is not None}
        try:
            if question(given).pins.exact:
                continue
        except PlannerError:
            continue
        yield given


def star_of(found: Answer | None) -> Layout | None:
    return None if found is None or found.best is None else found.best.case.layout


def asked(face: Any) -> Any:
    """What a face answers; None where it refuses."""
    try:
        return face()
    except PlannerError:
        return None


def disagreements(given: Given) -> list[str]:
    shown, ranked = asked(lambda: answer(question(given))), asked(lambda: among_methods(question(given), 3))
    screen = asked(lambda: state.plan(state.ask(inputs.typed(given))))
    faces = {
        "recommend": star_of(ranked),
        "planner.estimate": star_of(asked(lambda: library.estimate(**given))),
        "planner.recommend": star_of(asked(lambda: library.recommend(**given))),
    }
    if screen is not None:
        place = screen.shown.recommended
        faces["explorer"] = None if place is None else screen.ranked[place].case.layout
    wrong = [f"{name} stars {layout}, estimate {star_of(shown)}" for name, layout in faces.items()
             if layout != star_of(shown)]  # fmt: skip
    for name, found in (("estimate", shown), ("recommend", ranked)):
        if found is not None and found.best is None and any(one.fits and one.launchable for one in found.estimates):
            wrong.append(f"{name} stars nothing where a row fits")
    if ranked is not None:
        things = [(one.case.job.method, thing_of(one.case.layout)) for one in ranked.estimates]
        wrong += [f"{thing} is ranked twice" for thing in set(things) if things.count(thing) > 1]
    return wrong


@pytest.mark.parametrize("count", [8, pytest.param(300, marks=pytest.mark.long)])
def test_every_face_stars_the_same_layout(count: int) -> None:
    wrong = {str(given): told for given in islice(drawn(2027), count) if (told := disagreements(given))}

    assert wrong == {}
