"""One figure for one thing: what each face prints of memory says whether it is on the card or live, and is the same.

Not here: whether the figure is right (tests/truth, tests/cluster), or the word beside it (test_verdict.py).
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from executor.cli import output
from planner.basics.quantities import format_bytes
from planner.cli import planner
from planner.spec.plan import read_plan
from tui import inputs, state

GIVEN = {"model": "1b", "gpus": "16", "seq_len": "4096", "global_batch_size": "64"}
WORDS = [word for name, value in GIVEN.items() for word in (f"--{name.replace('_', '-')}", value)]
SIZE = re.compile(r"\d(?:[\d.,]*\d)? (?:[KMG]iB)")
SAID = re.compile(r"on the card|on a card|live|host|checkpoint|may be used|\d+ x \d+ \S+ \(", re.IGNORECASE)
"""What says which memory a size is of; the last is the card of the headline, with what it has."""


def run(*words: str) -> str:
    result = CliRunner().invoke(planner, list(words), catch_exceptions=False)
    assert result.exit_code in (0, 3), result.output
    return result.stdout


def unsaid(text: str) -> list[str]:
    """Sentences with a size of memory that do not say which; a table's columns have their heads."""
    text = text.partition("\nFORMULAS")[0]  # which name what they add up
    sentences = re.split(r"(?<=[.:]) (?=[A-Z-])|\n(?=- |[A-Z]|\* rec)|\n\n", text)
    return [one for one in sentences if SIZE.search(one) and not SAID.search(" ".join(one.split()))]


def test_a_size_that_does_not_say_of_which_memory_it_is_is_found() -> None:
    assert unsaid("DDP fits, 3.00 GiB of it. It takes 2.00 GiB live.") == ["DDP fits, 3.00 GiB of it."]


@pytest.mark.parametrize(
    "words",
    [
        ("estimate", *WORDS),
        ("estimate", "--model", "70b", "--gpus", "8"),
        ("estimate", "--model", "7b", "--gpus", "32", "--recompute", "full", "--dp-shard", "32"),
        ("recommend", *WORDS, "--pareto", "3"),
        ("recommend", "--model", "70b", "--gpu", "4090", "--gpus", "8"),
        ("fit", "--model", "1b", "--gpus", "8", "--what", "micro-batch"),
        ("explain", "--model", "1b", "--gpus", "8", "--phase", "peak"),
    ],
    ids=lambda words: " ".join(words[:3]),
)
def test_every_size_of_memory_says_whether_it_is_on_the_card_or_live(words: tuple[str, ...]) -> None:
    text = run(*words)
    assert "on the card" in text
    assert unsaid(text) == []


def test_all_faces_print_one_figure_for_the_card_and_one_for_what_is_live(tmp_path: Path) -> None:
    """estimate and recommend said 60.66 GiB (card), show, its picture and compare "peak 50.76" (live)."""
    path, picture = tmp_path / "plan.json", tmp_path / "plan.svg"
    text = run("recommend", *WORDS, "-o", str(path))
    found = json.loads(run("recommend", *WORDS, "--json"))["estimates"][0]
    memory = found["memory"]
    card, live = format_bytes(memory["device_bytes"]), format_bytes(memory["live_bytes"])
    assert card != live and memory["low_bytes"] < memory["device_bytes"] < memory["high_bytes"]
    assert re.search(rf"^\* .* {re.escape(card)} ", text, re.MULTILINE)

    shown = run("show", str(path), "--svg", str(picture))
    for drawn in (shown, re.sub(r"<[^>]*>", " ", picture.read_text())):
        assert f"{card} on the card of a GPU, of which {live} live" in " ".join(drawn.split())
    compared = run("compare", str(path), str(path))
    assert re.search(rf"memory on the card +{re.escape(card)} ", compared)
    assert re.search(rf"peak memory, live +{re.escape(live)} ", compared)
    side = json.loads(run("compare", str(path), str(path), "--json"))["plans"][0]["memory"]
    assert (format_bytes(side["device_bytes"]), format_bytes(side["live_bytes"])) == (card, live)

    explored = state.plan(state.ask(inputs.typed(GIVEN))).shown.strategies
    assert any(one.memory == card and one.reasons[0].count(f"{card} on a card of") for one in explored)
    assert f"{format_bytes(output.shown_by(read_plan(path)))}" == card
