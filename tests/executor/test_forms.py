"""Data as people have them: each form gives the examples written, and the planner knows it by its first bytes.

Not here: training on them (tests/cluster/test_forms_trained.py), or what a row must hold (test_datacheck.py).
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from forms import CALL, FORMS, written
from test_datacheck import plan, refused

from executor.preflight.datacheck import check_inputs
from executor.preflight.examples import ALPACA, Chat, Pair, Text, read_examples
from executor.worker.data import lengths as counting
from executor.worker.data.data import open_rows
from executor.worker.data.tokenizer import ByteTokenizer
from planner.ask.options import question
from planner.basics.errors import PlannerError
from planner.spec.datafile import CONVERTED, SUFFIXES, form_of

PAIRS = [("a", "2020-01-01"), ("b", "2021-03-04 05:06:07"), ("Ω \u2028 c", "3"), ("d", '"quoted"\n')]
HERE = {"model": "tiny-llama", "cluster": "localhost", "gpus": "1", "seq_len": "64"}


def expected(form: str, prompt: str, answer: str) -> Any:
    if form == "texts":
        return Text(f"{prompt}\n{answer}")
    if form == "alpaca":
        return Pair(ALPACA.format(paired="", instruction=prompt) + "### Response:", answer)
    first, last = {"role": "user", "content": prompt}, {"role": "assistant", "content": answer}
    if form != "tools":
        return Chat([first, last])
    called = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]}
    more = [{"role": "user", "content": "look"}, called, {"role": "tool", "content": "blue", "name": "look"}]
    tools = [{"type": "function", "function": {"name": "look"}}]
    return Chat([first, last, *more, {"role": "assistant", "content": "blue"}], tools)


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_examples_that_were_written_in_their_order(form: str, tmp_path: Path) -> None:
    """Answers that look like dates too, of which some readers make times."""
    pairs = sorted(PAIRS) if form != "texts" else PAIRS[:1]
    path = written(tmp_path, form, pairs)
    assert [example for _, example in read_examples(path, "recipe.data")] == [expected(form, *one) for one in pairs]


@pytest.mark.parametrize(("form", "packing"), [(form, ("padded", "packed")[at % 2]) for at, form in enumerate(FORMS)])
def test_every_form_is_checked_counted_and_opened_alike(form: str, packing: Any, tmp_path: Path) -> None:
    path = written(tmp_path, form, PAIRS)
    made = plan(seq_len=400, data=str(path))
    made = msgspec.structs.replace(made, job=msgspec.structs.replace(made.job, packing=packing))
    check_inputs(made)
    stream = form == "texts" and packing == "padded"
    assert len(open_rows(made, str(path))) == counting.count(path, 400, None, "stream" if stream else packing)["rows"]


@pytest.mark.parametrize("form", ["sharegpt", "folder of lines"])
def test_the_planner_counts_what_a_rank_will_read(form: str, tmp_path: Path) -> None:
    found = question({**HERE, "seq_len": "400", "data": str(written(tmp_path, form, PAIRS))})
    assert (found.job.recipe.examples, found.job.recipe.rows) == (len(PAIRS), len(PAIRS))


@pytest.mark.parametrize("form", ["parquet", "dataset", "folder of parquet"])
def test_without_datasets_its_forms_are_planned_with_the_reason_and_not_launched(form, tmp_path, monkeypatch) -> None:
    path = str(written(tmp_path, form, PAIRS))
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "datasets" else find(name))

    assert any("datasets is not installed" in note for note in question({**HERE, "data": path}).notes)
    with pytest.raises(PlannerError, match="read by the package datasets") as caught:
        check_inputs(plan(seq_len=64, data=path))
    assert caught.value.exit_code == 3


def test_reading_reaches_no_hub_and_leaves_nothing_at_home(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    path = written(tmp_path, "parquet", PAIRS)
    before = set(tmp_path.rglob("*"))
    assert len(list(read_examples(path, "recipe.data"))) == len(PAIRS)
    assert os.environ["HF_HUB_OFFLINE"] == os.environ["HF_DATASETS_OFFLINE"] == "1"
    assert set(tmp_path.rglob("*")) == before


def test_a_name_with_a_pattern_in_it_is_that_file(tmp_path: Path) -> None:
    for name, pairs in (("[ab]*", PAIRS), ("a", PAIRS[:1])):
        written(tmp_path, "parquet", pairs).rename(tmp_path / f"{name}.parquet")
    assert len(list(read_examples(tmp_path / "[ab]*.parquet", "recipe.data"))) == len(PAIRS)


# -- what no run would take -------------------------------------------------------------------------------------------

MAGIC = {"gzip": b"\x1f\x8b\x08", "zip": b"PK\x03\x04", "parquet": b"PAR1", "image": b"\x89PNG\r\n"}


@pytest.mark.parametrize("begins", MAGIC)
@pytest.mark.parametrize("suffix", sorted({*SUFFIXES, *CONVERTED, ".md", ""}))
def test_a_file_that_is_not_what_its_name_says_is_refused_when_it_is_planned(suffix, begins, tmp_path) -> None:
    path = tmp_path / f"d{suffix}"
    path.write_bytes(MAGIC[begins] * 500)
    known = SUFFIXES.get(suffix)
    if known == "tokens" or (known == "text" and begins == "image"):
        return  # ids may be any bytes; that a text is UTF-8 is known when it is read
    with pytest.raises(PlannerError) as caught:
        question({**HERE, "data": str(path)})
    assert "\n" not in caught.value.sentence and caught.value.value == path
    assert refused(plan(seq_len=64, data=str(path)))


@pytest.mark.parametrize("suffix", CONVERTED)
def test_the_line_that_converts_is_told_whether_the_file_is_here_or_not(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"d{suffix}"
    for _ in range(2):
        with pytest.raises(PlannerError, match="Convert it: ") as caught:
            question({**HERE, "data": str(path)})
        assert str(path) in caught.value.fix
        path.write_text("a,b\n")


def test_a_table_is_converted_by_the_line_that_is_told(tmp_path: Path) -> None:
    import shlex
    import subprocess
    import sys

    path = tmp_path / "d.csv"
    path.write_text("prompt,response\na,b\nc,d\n")
    with pytest.raises(PlannerError) as caught:
        form_of(path, "data")
    words = shlex.split(caught.value.fix.removeprefix("Convert it: "))
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    subprocess.run([sys.executable, *words[1:]], check=True, env=environment, capture_output=True)
    made = [example for _, example in read_examples(tmp_path / "d.csv.jsonl", "data")]
    assert made == [Pair("a", "b"), Pair("c", "d")]


@pytest.mark.parametrize(
    ("names", "rule"),
    [
        (("a.jsonl", "b.parquet"), "holds a.jsonl and b.parquet, of which only one kind would be read"),
        (("a.jsonl", "notes.txt"), "holds .txt files and a.jsonl, of which only one kind would be read"),
        (("chats-test.jsonl", "chats-train.jsonl"), "holds the splits test, train"),
        (("more/a.jsonl",), "is a folder without .txt, .json, .jsonl or .parquet files"),
    ],
)
def test_a_folder_of_several_kinds_or_splits_is_refused(names: tuple[str, ...], rule: str, tmp_path: Path) -> None:
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("PAR1" if name.endswith("parquet") else '{"text": "a"}\n')
    with pytest.raises(PlannerError) as caught:
        question({**HERE, "data": str(tmp_path)})
    assert caught.value.rule.startswith(rule)
    assert "splits" not in rule or caught.value.fix == f"Name one of them: {tmp_path}/chats-train.jsonl"
    assert refused(plan(seq_len=64, data=str(tmp_path)))


def test_planner_and_trainer_read_a_folder_as_its_files_joined(tmp_path: Path) -> None:
    """The same examples in the same order as of one file, and as many in the plan as are trained on."""
    one, folder = written(tmp_path, "lines", PAIRS), written(tmp_path, "folder of lines", PAIRS)
    (folder / "README.md").write_text("About these chats.")
    made = [plan(seq_len=400, data=str(path)) for path in (one, folder)]
    joined, rows = (open_rows(each, each.job.recipe.data) for each in made)

    assert len(rows) == question({**HERE, "seq_len": "400", "data": str(folder)}).job.recipe.rows == len(PAIRS)
    order = list(range(len(PAIRS)))
    assert torch.equal(rows.batch(order).inputs, joined.batch(order).inputs)


@pytest.mark.parametrize("special", ["fifo", "device", "empty folder", "splits"])
def test_what_is_no_data_is_refused_and_not_read(special: str, tmp_path: Path) -> None:
    path = tmp_path / "d.jsonl"
    if special == "fifo":
        os.mkfifo(path)
    elif special == "device":
        path = Path("/dev/zero")
    else:
        path.mkdir()
    if special == "splits":
        (path / "dataset_dict.json").write_text("{}")
        (path / "test").mkdir()
        (path / "test" / "state.json").write_text("{}")
    with pytest.raises(PlannerError) as caught:
        question({**HERE, "data": str(path)})
    assert special != "splits" or caught.value.fix == f"Name one of them: {path}/test"
    assert refused(plan(seq_len=64, data=str(path)))


# -- turns ------------------------------------------------------------------------------------------------------------

ANSWER = {"role": "assistant", "content": "x"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "url": "u"}]}, ANSWER]}, 'part of type "image"'),
        ({"messages": [{"role": "user", "content": 3}, ANSWER]}, 'no "content" that is a string'),
        ({"messages": [{"role": "user", "content": [3]}, ANSWER]}, 'no "content" that is a string'),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}]}, "without a function's"),
        ({"conversations": [{"from": "robot", "value": "v"}]}, 'from the unknown "robot"'),
        ({"conversations": [{"from": "gpt", "value": 3}]}, '"from" or "value" that is not a string'),
        ({"conversations": [{"from": "human", "value": "v"}]}, "no assistant message"),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, 'has a "history"'),
        ({"prompt": "a", "response": "b", "system": "c"}, 'has a "system"'),
    ],
)
def test_a_turn_that_cannot_be_trained_on_is_named_by_planner_and_launcher(row, words, tmp_path: Path) -> None:
    for name, text in (("d.jsonl", json.dumps(row)), ("d.json", json.dumps([row], indent=2))):
        path = tmp_path / name
        path.write_text(text)
        assert words in refused(plan(seq_len=64, data=str(path)))
        with pytest.raises(PlannerError, match=r"line 1|example 1"):
            question({**HERE, "data": str(path)})


def test_sharegpts_system_its_calls_and_what_they_found_are_turns_of_a_chat(tmp_path: Path) -> None:
    said = [
        {"from": "human", "value": "q"},
        {"from": "function_call", "value": json.dumps({"name": "f", "arguments": '{"x": 1}'})},
        {"from": "observation", "value": "o"},
        {"from": "gpt", "value": "a"},
    ]
    path = tmp_path / "d.jsonl"
    path.write_text(json.dumps({"conversations": said, "system": "s", "tools": '[{"name": "f"}]'}))
    ((_, chat),) = read_examples(path, "data")
    assert isinstance(chat, Chat) and chat.tools == [{"name": "f"}]
    assert [one["role"] for one in chat.messages] == ["system", "user", "assistant", "tool", "assistant"]
    assert chat.messages[2]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]
    ids, answers = ByteTokenizer().marked(chat, "")
    trained = bytes(one for one, is_answer in zip(ids, answers, strict=True) if is_answer and one < 256).decode()
    assert '"name": "f"' in trained and trained.endswith("a") and "o" not in trained.replace("function", "")[-2:-1]
