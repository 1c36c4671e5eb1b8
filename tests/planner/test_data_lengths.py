"""Lengths of a data file's examples when a plan is made: rows as wide as the data make them, and what is told of it.

Not here: that the counts are the trainer's own (tests/executor/test_lengths.py).
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.ask.options import question
from planner.ask.question import Question
from planner.basics import command
from planner.basics.errors import PlannerError
from planner.cli import planner
from planner.spec import lengths


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Prompts with responses whose byte tokens are 3 + 2 n: a beginning, a prompt, its answer and an end."""
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps({"prompt": "p" * n, "response": "r" * n}) + "\n" for n in (10, 20, 90)))
    return path


def asked(data: Path, **more: str) -> Question:
    given = {"model": "tiny-llama", "cluster": "localhost", "gpus": "2", "data": str(data), "seq_len": "512", **more}
    return question(given)


def test_padded_rows_are_as_wide_as_the_longest_example_rounded_as_the_trainer_rounds(chats):
    found = asked(chats)

    # The last id is a target alone: 2 n + 1 inputs.
    assert (found.job.seq_len, found.job.mean_seq_len) == (192, round((21 + 41 + 181) / 3))
    (note,) = found.notes
    assert "3 examples: 81 tokens in the mean, at most 181" in note and "192 tokens and not 512" in note


def test_packed_rows_stay_full_and_their_documents_mean_is_known(chats):
    found = asked(chats, packing="packed")

    assert (found.job.seq_len, found.job.mean_seq_len) == (512, 81)
    assert "tokens and not" not in found.notes[0]


def test_an_example_beyond_the_sequence_leaves_the_rows_as_they_were_asked_for(chats):
    found = asked(chats, seq_len="100")

    assert (found.job.seq_len, found.job.mean_seq_len) == (100, round((21 + 41 + 100) / 3))


@pytest.mark.parametrize("given", [{"mean_seq_len": "50"}, {"data": "stream.jsonl"}, {"data": "absent.jsonl"},
                                   {"data": "text.txt"}])  # fmt: skip
def test_what_was_given_what_is_a_stream_and_what_is_not_here_stay_as_they_are(chats, given, monkeypatch):
    monkeypatch.chdir(chats.parent)
    (chats.parent / "text.txt").write_text("words " * 99)
    (chats.parent / "stream.jsonl").write_text('{"text": "a stream"}\n')
    found = asked(given.pop("data", chats), **given)

    assert found.job.seq_len == 512 and found.notes == ()
    assert found.job.mean_seq_len == (50 if given else None)


def test_a_plan_made_without_the_package_that_counts_says_so(chats, monkeypatch):
    lengths._read.cache_clear()
    monkeypatch.setattr(lengths, "READER", "executor_that_is_not_here")
    found = asked(chats)

    assert found.job.seq_len == 512 and found.job.mean_seq_len is None
    assert "executor_that_is_not_here is not installed" in found.notes[0]
    assert "rows are planned as 512 tokens" in found.notes[0]


def test_a_file_is_counted_once_for_many_questions_and_again_when_it_changes(chats, monkeypatch):
    from executor.preflight import lengths as reader

    lengths._read.cache_clear()
    calls: list[str] = []
    count = reader.read
    monkeypatch.setattr(reader, "read", lambda *given, **more: calls.append(given[0]) or count(*given, **more))
    assert asked(chats).job == asked(chats).job and len(calls) == 1
    with chats.open("a") as lines:
        lines.write(json.dumps({"prompt": "p" * 100, "response": "r" * 100}) + "\n")
    assert asked(chats).job.seq_len == 256 and len(calls) == 2


def test_data_that_no_run_would_take_is_refused_when_it_is_planned_for(chats):
    with chats.open("a") as lines:
        lines.write('{"prompt": "no answer", "response": ""}\n')
    with pytest.raises(PlannerError, match=r"pairs\.jsonl line 4: has an empty \"response\""):
        asked(chats)


def test_the_answer_tells_of_it_in_json_and_beside_the_table(chats, capsys):
    words = [
        "--model",
        "tiny-llama",
        "--cluster",
        "localhost",
        "--gpus",
        "2",
        "--data",
        str(chats),
        "--strategy",
        "ddp",
    ]
    assert command.exit_code(planner, ["estimate", *words, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["notes"] == [one.removeprefix("note: ").removesuffix(".") for one in err.splitlines()]
    assert "20 steps = 107 epochs of 3 examples; learning rate 0.0003" in err
    assert json.loads(out)["job"]["seq_len"] == 192
    for command_name in ("recommend", "explain"):
        assert command.exit_code(planner, [command_name, *words]) == 0
        assert "note: pairs.jsonl has 3 examples" in capsys.readouterr().err
