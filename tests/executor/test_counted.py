"""The tokens of a file's examples, counted by hand: how long, of how many, which are left out; one id a byte.

Not here: a tokenizer of one's own, or the trainer's rows (test_lengths.py).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from executor.preflight import lengths
from executor.preflight.files import rows_of, size_of
from executor.worker.data import lengths as counting
from planner.basics.errors import PlannerError


def pairs(path: Path, *sizes: tuple[int, int]) -> Path:
    """Prompts and responses of so many bytes, with a blank line after the first."""
    lines = [json.dumps({"prompt": "p" * prompt, "response": "r" * response}) for prompt, response in sizes]
    path.write_text("\n".join([lines[0], "", *lines[1:]]) + "\n")
    return path


def test_an_example_is_as_long_as_its_tokens_but_the_last_and_no_longer_than_a_sequence(tmp_path: Path) -> None:
    # A begin, the prompt, the response, an end: what is trained on is all but the last, 1 + prompt + response.
    path = pairs(tmp_path / "a.jsonl", (3, 2), (5, 4), (30, 10))
    assert counting.count(path, 100, None) == {
        "rows": 3, "examples": 3, "read": 3, "longest": 41, "mean": 19.0, "left_out": 0}  # fmt: skip
    assert counting.count(path, 40, None) == {
        "rows": 3, "examples": 3, "read": 3, "longest": 40, "mean": 56 / 3, "left_out": 0}  # fmt: skip
    # Its first answer's token is the 32nd, which is a target within 31 and not within 30.
    assert counting.count(path, 31, None)["longest"] == 31
    assert counting.count(path, 30, None) == {
        "rows": 2, "examples": 3, "read": 3, "longest": 10, "mean": 8.0, "left_out": 1}  # fmt: skip


def test_a_file_none_of_whose_answers_is_in_reach_is_refused(tmp_path: Path) -> None:
    path = pairs(tmp_path / "a.jsonl", (30, 10))
    with pytest.raises(PlannerError, match="within 30 tokens"):
        counting.count(path, 30, None)
    assert counting.count(path, 31, None)["longest"] == 31


def test_lines_are_named_from_1_sized_by_their_bytes_and_blank_ones_are_none(tmp_path: Path) -> None:
    (path := tmp_path / "a.jsonl").write_text("{}\n\n  \n{ }\n")
    assert [(row[0], size_of(row)) for row in rows_of(path, "data")] == [("a.jsonl line 1", 3), ("a.jsonl line 4", 4)]


def test_of_many_lines_the_longest_and_a_sample_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("ALL", 10), ("LONGEST", 3), ("SAMPLED", 4)):
        monkeypatch.setattr(counting, name, value)
    lines = {number: 100 - number for number in range(1, 11)}
    assert counting.drawn(lines) == (list(lines), list(lines))
    more = lines | {11: 500}
    chosen, sample = counting.drawn(more)
    assert len(set(sample)) == 4 and set(sample) <= more.keys()
    assert set(chosen) == {1, 2, 11, *sample} and chosen == sorted(chosen)
    assert counting.drawn(more) == (chosen, sample)  # of the same file the same


def test_a_mean_is_that_of_the_sample_and_not_of_the_longest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pairs(tmp_path / "a.jsonl", *((size, 1) for size in range(10, 22)))
    monkeypatch.setattr(counting, "drawn", lambda lines: ([1, 2, 12], [1, 2]))
    assert counting.count(path, 100, None) == {
        "rows": 12, "examples": 12, "read": 3, "longest": 23, "mean": 12.5, "left_out": 0}  # fmt: skip
    # Where none of the sample has an answer in reach, those that were read are.
    monkeypatch.setattr(counting, "drawn", lambda lines: ([1, 12], [12]))
    assert counting.count(path, 12, None) == {
        "rows": 6, "examples": 12, "read": 2, "longest": 12, "mean": 12.0, "left_out": 1}  # fmt: skip


def test_the_process_prints_lengths_or_what_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = pairs(tmp_path / "a.jsonl", (3, 2))
    assert counting.main([str(path), "100", "padded"]) == 0
    assert json.loads(capsys.readouterr().out)["longest"] == 6
    assert counting.main([str(path), "3", "padded"]) == 0
    said = json.loads(capsys.readouterr().out)["refused"]
    assert said[:2] == ["recipe.data", str(path)] and "within 3 tokens" in said[2]


def test_the_planner_asks_for_lengths_of_examples_and_of_texts_that_are_packed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, ...]] = []

    def answer_of(*words: str) -> tuple[Any, str]:
        asked.append(words)
        return {"longest": 6}, ""

    monkeypatch.setattr(lengths, "answer_of", answer_of)
    path = str(pairs(tmp_path / "a.jsonl", (3, 2)))
    assert lengths.read(path, None, 64, packed=False) == {"longest": 6}
    assert asked == [("data.lengths", path, "64", "padded")]
    (texts := tmp_path / "b.jsonl").write_text('{"text": "words"}\n')
    assert lengths.read(str(texts), None, 64, packed=False) is None and len(asked) == 1
    assert lengths.read(str(texts), None, 64, packed=False, whole=True) == {"longest": 6} and asked[-1][3] == "stream"
    assert lengths.read(str(texts), None, 64, packed=True) == {"longest": 6} and asked[-1][3] == "packed"
    monkeypatch.setattr(lengths, "answer_of", lambda *words: ({}, "broke"))
    assert lengths.read(path, None, 64, packed=True) == "broke"

    monkeypatch.setattr(lengths, "check_tokenizer_folder", lambda folder: None)
    monkeypatch.setattr(lengths.importlib.util, "find_spec", lambda name: None)
    assert lengths.read(path, "here", 64, packed=False) == "transformers is not installed"
    monkeypatch.setattr(lengths.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(lengths, "answer_of", answer_of)
    assert lengths.read(path, "here", 64, packed=False) == {"longest": 6} and asked[-1][2:] == ("64", "padded", "here")
