"""The files a plan names: absolute paths, digests that tell one content from another, and what is said of a change."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import msgspec
import pytest

from planner.ask.options import question
from planner.basics import command, reading
from planner.basics.errors import PlannerError
from planner.basics.reading import Content, content_of
from planner.cli import planner
from planner.decide.planning import plan_of
from planner.decide.strategies import answer
from planner.spec import inputs
from planner.spec.plan import Input, Plan, decode_plan, encode_plan, hash_of, read_plan


def planned(**recipe: str) -> Plan:
    given = {"model": "tiny-llama", "cluster": "localhost", "gpus": "2", "strategy": "ddp", **recipe}
    return plan_of(answer(question(given)).estimates[0])


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "base").mkdir()
    (tmp_path / "chats.txt").write_text("some words " * 100)
    for name, text in {
        "config.json": "{}",
        "model.safetensors": "weights",
        "tokenizer.json": "{}",
        "README": "x",
    }.items():
        (tmp_path / "base" / name).write_text(text)
    return tmp_path


def test_a_plan_is_written_with_absolute_paths_and_what_was_in_them(files, monkeypatch, capsys):
    monkeypatch.chdir(files)
    words = (
        "recommend --model tiny-llama --cluster localhost --gpus 2 --data chats.txt --checkpoint base --tokenizer base"
    )
    assert command.exit_code(planner, [*words.split(), "--validation-data", "absent.txt", "-o", "p.json"]) == 0

    plan = read_plan("p.json")
    recipe = plan.job.recipe
    named = (recipe.data, recipe.checkpoint, recipe.tokenizer, recipe.validation_data)
    assert named == tuple(str(files / name) for name in ("chats.txt", "base", "base", "absent.txt"))
    assert [(one.field, one.path, one.bytes) for one in plan.inputs] == [
        ("data", str(files / "chats.txt"), 1100),
        ("tokenizer", str(files / "base"), 4),  # of a model's folder, what a tokenizer reads
        ("checkpoint", str(files / "base"), 9),
    ]
    assert "validation_data=" in (said := capsys.readouterr().err) and "the plan does not record its content" in said
    assert read_plan("p.json") == plan and decode_plan(encode_plan(plan)) == plan


def test_a_plan_without_digests_is_read_and_gets_them_when_it_is_resolved(files):
    raw = json.loads(encode_plan(planned(data=str(files / "chats.txt"))))
    del raw["inputs"]
    raw["content_hash"] = hash_of(raw)  # as an earlier version wrote it

    old = decode_plan(json.dumps(raw).encode())

    assert old.inputs == ()
    assert [one.field for one in inputs.resolved(old).inputs] == ["data"]


def input_of(path: Path, field: str) -> Input:
    found = content_of(path, field)
    assert found is not None
    return Input(field=field, path=str(path), digest=found.digest, bytes=found.bytes)


def test_an_input_that_is_the_same_passes_wherever_it_lies_and_whenever_it_was_written(files):
    data, base = input_of(files / "chats.txt", "data"), input_of(files / "base", "checkpoint")
    os.utime(files / "chats.txt", (0, 0))
    (files / "base" / "notes.txt").write_text("not a weight")
    moved = files / "elsewhere"
    (files / "base").rename(moved)

    inputs.check_content(data)
    inputs.check_content(msgspec.structs.replace(base, path=str(moved)))
    assert content_of(files / "chats.txt", "data") == Content(data.digest, data.bytes)
    assert re.fullmatch("sha256:[0-9a-f]{64}", data.digest)


@pytest.mark.parametrize(
    ("field", "name", "text", "words"),
    [
        ("data", "chats.txt", "other words", "--data"),
        ("data", "chats.txt", "some words " * 99 + "some w0rds ", "1,100 bytes;"),
        ("checkpoint", "base/model.safetensors", "weightz", "make the plan again"),
        ("checkpoint", "base/config.json", "{ }", "9 bytes then, 10 now"),
        ("tokenizer", "base/tokenizer.json", "[]", "make the plan again"),
        ("tokenizer", "base/chat_template.jinja", "new", "make the plan again"),
    ],
)
def test_a_changed_input_is_refused_by_name_with_the_way_out(files, field, name, text, words):
    known = input_of(files / ("chats.txt" if field == "data" else "base"), field)
    (files / name).write_text(text)

    with pytest.raises(PlannerError) as caught:
        inputs.check_content(known)

    assert (caught.value.exit_code, caught.value.field, caught.value.value) == (3, f"recipe.{field}", known.path)
    assert "is not what the plan was made with" in caught.value.sentence and words in caught.value.sentence


def test_a_large_input_is_sampled_in_all_its_parts(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "WHOLE_BYTES", 2**20)
    large = tmp_path / "tokens.bin"
    large.write_bytes(bytes(8 * 2**20))
    before = content_of(large, "data")
    assert before is not None and before.digest.startswith("sampled-sha256:")

    step = large.stat().st_size / reading.BLOCKS
    for place in (0, *(int(step * block) for block in range(reading.BLOCKS)), large.stat().st_size - 1):
        with large.open("r+b") as stream:  # any stretch that is longer than what lies between two blocks
            stream.seek(max(0, min(place, large.stat().st_size - int(step))))
            stream.write(b"x" * int(step))
        assert content_of(large, "data") != before
        large.write_bytes(bytes(8 * 2**20))
    large.write_bytes(bytes(8 * 2**20 + 1))
    assert content_of(large, "data") != before


def test_a_sharded_checkpoint_is_what_its_index_names(files):
    base = files / "base"
    (base / "model.safetensors").unlink()
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}
    (base / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("one", "two", "stray"):
        (base / f"{name}.safetensors").write_text(name)
    before = content_of(base, "checkpoint")

    (base / "stray.safetensors").write_text("another")
    assert content_of(base, "checkpoint") == before
    (base / "two.safetensors").write_text("owt")
    assert content_of(base, "checkpoint") != before


def test_a_file_that_shrank_or_went_is_told_and_one_that_grew_is_not(files):
    known = input_of(files / "chats.txt", "data")
    (files / "chats.txt").write_text("x" * 2000)
    assert inputs.shrunk([known]) == []
    (files / "chats.txt").write_text("x" * 20)
    assert "was cut short while the run read it, from 1,100 to 20 bytes" in inputs.shrunk([known])[0]
    (files / "chats.txt").unlink()
    assert "is gone" in inputs.shrunk([known])[0]
