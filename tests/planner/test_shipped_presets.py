"""Each runtime and each kernels preset in the wheel is asked for by a question of a person's."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from planner.basics import command
from planner.cli import planner
from planner.spec import presets

FILES = sorted((Path(__file__).parents[2] / "presets").rglob("*.toml"))


def shipped(kind: str) -> list[str]:
    """Ids in the wheel alone, whatever engines other tests have brought."""
    return [path.stem for path in FILES if path.parent.name == kind]


def answered(capsys: pytest.CaptureFixture[str], model: str, gpus: int, runtime: str, *options: str) -> list[str]:
    """Runtimes of the layouts that a question by a runtime is answered with, each with its memory and time."""
    words = ("--model", model, "--gpu", "h100", "--gpus", str(gpus), "--runtime", runtime, *options, "--json")
    code = command.exit_code(planner, ("estimate", *words), name="planner")
    out, err = capsys.readouterr()
    assert code in (0, 3), err
    found = json.loads(out)["estimates"]
    assert all(one["memory"]["peak_bytes"] > 0 and one["time"]["step_s"] > 0 for one in found)
    return [one["runtime"] for one in found]


@pytest.mark.parametrize("name", shipped("runtimes"))
def test_a_question_by_each_runtime_is_answered(name: str, capsys: pytest.CaptureFixture[str]):
    alone = presets.runtime(name).engine == "single"

    assert set(answered(capsys, "1b", 1 if alone else 8, name)) == {name}


@pytest.mark.parametrize("name", shipped("kernels"))
def test_a_question_by_a_runtime_of_one_s_own_with_each_kernels_is_answered(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    file = tmp_path / "runtimes" / "mine.toml"
    file.parent.mkdir()
    file.write_text(f'engine = "single"\nkernels = "{name}"\n\n[sources]\nengine = "mine"\nkernels = "mine"\n')

    assert set(answered(capsys, "tiny-llama", 1, "mine", "--presets", str(tmp_path))) == {"mine"}
