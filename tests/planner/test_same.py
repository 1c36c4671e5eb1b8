"""An eighth of the questions of `make same` about one engine, and a twentieth of the others, answered byte for byte as
stored.

Not here: whether an answer is right (figures by hand stand in the tests of each formula), or the other questions.
"""

from __future__ import annotations

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

    changed = [number for number in DRAWN[part] if same.hashed(questions[number - 1][1]) != questions[number - 1][0]]

    assert not changed, f"python scripts/same.py --show N prints an answer; changed: {changed}"
