"""Every key of a file by itself: none is lost, and each is in the class that the estimate goes by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.ask import fromfile
from planner.ask.fromfile import merge
from planner.ask.fromfile.explained import explained
from planner.ask.fromfile.sheet import HARMLESS, Ignored, OptionLine, Understood
from planner.basics import command
from planner.cli import planner
from planner.views.keys import keys_text
from tests.planner.test_fromfile import CONFIGS, FILES, NAMES, said


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_every_key_is_explained_with_its_value(path: Path):
    found = fromfile.read(path)
    keys = explained(found)
    assert {one.key for one in keys if one.key} == set(said(found))
    for one in keys:
        assert (one.kind in ("option", "default")) == bool(one.option)
        assert (one.kind == "default") == (not one.key)
        assert one.option or one.why
    options = {one.option: one.becomes for one in keys if one.option}
    assert options.keys() == found.options.keys()
    ignored = {one.key: one for one in found.ignored}
    for one in keys:
        if one.kind in ("adds", "takes", "decides"):
            assert ignored[one.key].memory == {"adds": "more", "takes": "less", "decides": "decides"}[one.kind]


@pytest.mark.parametrize("path", FILES, ids=NAMES)
def test_lines_fit_eighty_columns_unless_one_word_does_not(path: Path):
    found = fromfile.read(path)
    lines = keys_text(found, explained(found), 80).splitlines()
    assert all(len(line) <= 80 or len(line.split()) <= 2 for line in lines[1:])


def test_a_key_that_decides_is_explained_and_not_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "dpo.yaml").write_text("base_model: x/y\nrl: dpo\nsequence_len: 2048\nmy_own: 1\nseed: null\n")
    words = ["estimate", "--from", str(tmp_path / "dpo.yaml"), "--explain-keys"]
    assert command.exit_code(planner, words) == 0
    text = capsys.readouterr().out
    assert "- rl: dpo (" in text.partition("Keys that decide")[2]
    assert "sequence_len: 2048 → seq_len 2048" in text
    assert (
        command.exit_code(planner, ["estimate", "--from", str(tmp_path / "dpo.yaml"), "--explain-keys", "--json"]) == 0
    )
    found = {one["key"]: one for one in json.loads(capsys.readouterr().out)["keys"]}
    assert found["rl"]["kind"] == "decides"
    assert found["my_own"]["kind"] == "unknown"


def test_values_of_a_named_file_are_those_of_that_file():
    keys = {one.key: one for one in explained(fromfile.read(CONFIGS / "axolotl-zero3.yaml"))}
    assert keys["deepspeed.zero_optimization.stage"].value == 3


def test_without_a_file_it_is_refused(capsys: pytest.CaptureFixture[str]):
    assert command.exit_code(planner, ["estimate", "--explain-keys"]) == 2
    assert "Add --from FILE" in capsys.readouterr().err


def test_many_keys_of_one_option_are_a_row_and_many_that_change_nothing_are_counted():
    keys = [f"key_{number}" for number in range(40)]
    line = OptionLine(tuple(f"model.sizes.{key}" for key in keys), "model", "mine")
    harmless = tuple(Ignored(key, 1, HARMLESS, "none") for key in keys)
    text = merge.as_text(merge.Merged({}, Understood("F", "f.yaml", (line,), harmless), ()))

    assert "model.sizes (40 keys)  model = mine" in text
    assert "key_0, " in text and " key_39" not in text
    assert f"and {40 - merge.MOST_HARMLESS} more (--explain-keys lists all)" in text
