"""Claims about every answer, over questions that `make same` draws: the word, the band and the probability of a layout
agree, each piece of advice saves what it says, and all faces print one figure for one thing.

Eight questions in the quick tests, 200 in the long ones. Not here: sentences of reasons (test_reasons_asked_again.py).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from itertools import islice
from random import Random
from typing import Any

import pytest

from planner.ask.fits import FITS_FROM
from planner.ask.options import question
from planner.basics.errors import PlannerError
from planner.basics.quantities import format_byte_range, format_bytes
from planner.cli import planner
from planner.decide.advice import WORTH, advice
from planner.decide.answers import Answer, Constraints, Estimate
from planner.decide.estimate_json import answer_dict
from planner.decide.planning import plan_of
from planner.decide.recommendation import recommend
from planner.decide.strategies import answer
from planner.spec.options import OPTIONS
from planner.studies.compare import compare
from planner.studies.objectives import Reached
from planner.views.compare import compare_text
from planner.views.ranking import ranking_text
from planner.views.scene.map import picture_of
from planner.views.svg.map import svg_of
from planner.views.verdict import answer_text
from scripts.same_questions import KINDS
from tui.state import exact_words

Given = dict[str, Any]


def given_of(words: list[str]) -> Given:
    """Options as the command line gives them."""
    params = planner.commands["estimate"].make_context("estimate", list(words)).params
    return {name: value for name, value in params.items() if name in OPTIONS}


def drawn(seed: int) -> Iterator[tuple[Given, Answer]]:
    """Questions that have an answer, of one layout and of all strategies, every other one too large for its card."""
    chance = Random(seed)
    while True:
        words = shlex.split(KINDS[chance.choice(("estimate", "compared"))](chance))[1:]
        given = given_of([word for word in words if word != "--json"])
        if chance.random() < 0.5:
            given["micro_batch_size"], given["global_batch_size"] = chance.choice(("16", "64")), None
        try:
            found = answer(question(given))
        except PlannerError:
            continue
        if found.estimates:
            yield given, found


def word_of(probability: float) -> str:
    return next(word for word, least in (("yes", 0.95), ("likely", FITS_FROM), ("close", 0.05), ("no", -1))
                if probability >= least)  # fmt: skip


def disagreements(found: Answer) -> list[str]:
    """What text and JSON say of an estimate that its word, band or probability does not."""
    whole, text, wrong = answer_dict(found), answer_text(found), []
    for one, told in zip(found.estimates, whole["estimates"], strict=True):
        memory = told["memory"]
        if one.case.cluster.gpu.memory_bytes is None or one.memory.host_fits is not True:
            continue
        bands = found.question.coefficients(one.case.runtime).bands
        margin = 0 if found.question.headroom is None else found.question.headroom
        probability, word = told["fits_probability"], told["verdict"]
        edge = min(abs(probability - least) for least in (0.95, FITS_FROM, 0.05)) < 1e-9
        narrow = bands.memory_high == bands.memory_low or bands.memory_high <= 1 or margin != 0
        if not (edge or narrow or word_of(probability) == word):
            wrong.append(f"{one.name}: {word} beside a probability of {probability}")
        capacity = memory["capacity_bytes"]
        if (word == "yes" and memory["high_bytes"] > capacity) or (word == "no" and memory["low_bytes"] <= capacity):
            wrong.append(f"{one.name}: {word} beside {memory['low_bytes']}-{memory['high_bytes']} of {capacity}")
        row = f"{format_bytes(memory['device_bytes'])} {format_byte_range(memory['low_bytes'], memory['high_bytes'])}"
        if not any(row in " ".join(line.split()) and f" {word} " in f"{line} " for line in text.splitlines()):
            wrong.append(f"{one.name}: no row of {row} and {word}")
    return wrong


def again(given: Given, one: Estimate, options: dict[str, str]) -> Estimate:
    """The estimate of exactly one layout with other options."""
    exact = given_of(exact_words(given, one))
    for name, value in options.items():
        exact[name] = value == "true" if OPTIONS[name].kind in ("switch", "flag") else value
    exact["nodes"] = None if "gpus" in options else exact["nodes"]
    return answer(question(exact)).estimates[0]


def broken_advice(given: Given, found: Answer) -> list[str]:
    """Pieces of advice that do not save what they say, or do not fit as they say."""
    if not (told := advice(found)):
        return []
    one, wrong = min(found.estimates, key=lambda estimate: estimate.memory.device_bytes), []
    if one.memory.host_fits is False:
        stays = dict.fromkeys(("offload_optimizer", "offload_params", "offload_activations"), "false")
        one = again(given, one, stays)
    before = one.memory.device_bytes
    for lever in told:
        then = again(given, one, lever.options)
        saved = before - then.memory.device_bytes
        if abs(saved - lever.saved_bytes) > 0.01 * saved or then.fits != lever.fits or saved < WORTH * before * 0.99:
            wrong.append(f"{lever}: saves {saved}, fits {then.fits}")
    return wrong


def differing_faces(given: Given, found: Answer) -> list[str]:
    """Faces on which the first layout's memory is another figure than `estimate` prints."""
    one = found.estimates[0]
    card, live = format_bytes(one.memory.device_bytes), format_bytes(one.memory.peak.total)
    plan = plan_of(one)
    ranked = recommend(question(given_of(exact_words(given, one))), 1, Constraints(any_runtime=True))
    drawing = " ".join(svg_of(plan).decode().split())
    faces = {
        "estimate": card in answer_text(found),
        "recommend": card in ranking_text(Reached("fastest", ranked)),
        "show": f"{card} on the card of a GPU, of which {live} live" in picture_of(plan).subtitle,
        "svg": card in drawing and live in drawing,
        "compare": all(size in compare_text(compare([("a", plan), ("b", plan)])) for size in (card, live)),
        "json": format_bytes(answer_dict(found)["estimates"][0]["memory"]["live_bytes"]) == live,
    }
    return [name for name, same in faces.items() if not same]


@pytest.mark.slow
@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.long)])
def test_every_drawn_answer_says_one_thing_once(count: int) -> None:
    """Where fewer than a sixth of the answers need advice, the draw shows nothing of it."""
    advised, wrong = 0, []
    for given, found in islice(drawn(2027), count):
        told = [*disagreements(found), *broken_advice(given, found), *differing_faces(given, found)]
        advised += bool(advice(found))
        wrong += [f"{ {name: value for name, value in given.items() if value} }: {one}" for one in told]

    assert wrong == []
    assert advised > count / 6


@pytest.mark.parametrize("given", [
    {"model": "llama-3-70b", "gpus": "8", "precision": "pure-bf16", "micro_batch_size": "16"},  # 1 micro-batch
    {"model": "llama-3-8b", "gpus": "64", "method": "full", "runtime": "nanotron", "cluster": "gb200-nvl72"},  # ZeRO-0
])  # fmt: skip
def test_the_words_of_a_layout_ask_for_it_and_for_no_other(given: dict[str, str]) -> None:
    found = answer(question(given))

    for one in found.estimates:
        assert again(given | {"nodes": None}, one, {}).case.layout == one.case.layout
