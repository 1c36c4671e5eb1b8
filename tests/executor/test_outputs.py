"""Every name that a command of the executor writes to is checked alike, before anything is started or made.

Not here: files alone (tests/planner/test_bad_input.py), or what a command finds wrong with its own folder.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from test_rundir import make_plan

from executor.cli import executor
from planner.basics import command
from planner.spec import Layout, Recipe
from planner.spec.plan import encode_plan

COMMANDS = {
    "run": ("run", "plan.json", "--yes", "--run-dir"),
    "dry run": ("run", "plan.json", "--dry-run", "-o"),
    "probe": ("probe", "--quick", "-o"),
    "measure": ("measure", "-o"),
    "measure's runs": ("measure", "-o", "rows.jsonl", "--runs"),
}


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan, and names that are not folder and no file to write to."""
    monkeypatch.chdir(tmp_path)
    plan = make_plan(Layout(engine="ddp", dp_replicate=2))
    job = msgspec.structs.replace(plan.job, precision="fp32", seq_len=16, recipe=Recipe(steps=2))
    Path("plan.json").write_bytes(encode_plan(msgspec.structs.replace(plan, job=job)))
    Path("nothing").symlink_to("absent")
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert command.exit_code(executor, arguments, name="executor") == command.USAGE
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1, err
    return err


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("wrong", ["nothing", "", "-", "/dev/full"])
def test_what_cannot_be_written_to_is_refused_before_anything_starts(name, wrong, folder, capsys):
    before = sorted(folder.iterdir())
    told = refused(capsys, *COMMANDS[name], wrong)
    assert "Name " in told and "probing" not in told
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("words", [("run", "plan.json", "--meet-timeout"), ("export", "run", "model", "--shard-gb")])
def test_seconds_and_sizes_are_numbers(words, capsys):
    """nan is not below a least value, so a range lets it pass: a run waited by it."""
    for value in ("nan", "inf"):
        assert f"{words[-1]}={value}: is neither a size nor a time. Try " in refused(capsys, *words, value)
