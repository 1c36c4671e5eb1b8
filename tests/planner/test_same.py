"""Figures and words of an eighth of the questions of `make same` about one engine, and of a twentieth of the others.

Not here: whether an answer is right (figures by hand stand in the tests of each formula), or the other questions.
"""

from __future__ import annotations

import json
from collections import defaultdict

import pytest

from scripts import same

EVERY, OF_OTHERS = 8, 20


def drawn() -> dict[str, list[int]]:
    """Numbers of questions, from 1, by command and engine: those of one layout, which take 10 ms each; and by command
    alone: whole searches, studies, files and recorded runs, which take 100."""
    engines, others = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
    for number, (_, line) in enumerate(same.stored(), 1):
        command, *words = line.split()
        if "--runtime" in words and command in ("estimate", "explain"):
            engines[f"{command}-{words[words.index('--runtime') + 1]}"].append(number)
        elif command not in ("estimate", "explain"):
            others[command].append(number)
    return {part: numbers[::EVERY] for part, numbers in engines.items()} | {
        part: numbers[::OF_OTHERS] for part, numbers in others.items()
    }


DRAWN = drawn()


@pytest.mark.parametrize("part", DRAWN)
def test_a_question_is_answered_as_stored(part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(same.ROOT)
    questions = same.stored()

    now = {number: same.hashed(questions[number - 1][1]) for number in DRAWN[part]}
    figures, words = ([one for one, found in now.items() if found[at] != questions[one - 1][0][at]] for at in (0, 1))

    assert not figures, f"python scripts/same.py --show N prints an answer; other figures: {figures}"
    assert not words, f"python scripts/same.py --show N prints an answer; other words: {words}"


def test_another_wording_or_a_field_with_its_default_is_no_other_figure_and_another_figure_is() -> None:
    one = {
        "model": {"layers": 2},
        "estimates": [{"layout": {"engine": "ddp", "tp": 1}, "step_s": 0.5, "why": "As asked."}],
    }
    other = json.loads(json.dumps(one).replace("As asked.", "You asked for it.").replace('"tp": 1', '"tp": 1, "pp": 1'))

    assert list(same.figures(one)) == list(same.figures(other))
    for figure in ('"step_s": 0.6', '"step_s": 0.5, "fits": true', '"step_s": 0.5, "verdict": "yes"'):
        changed = json.loads(json.dumps(one).replace('"step_s": 0.5', figure))
        assert list(same.figures(one)) != list(same.figures(changed))
