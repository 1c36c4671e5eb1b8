"""A stream that is closed, full or no longer read, a folder that is gone and a name that is not UTF-8: each command of
planner and executor ends in one line, with the right exit code and nothing half-written."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import click
import pytest

from executor.cli import executor
from planner.basics import command
from planner.cli import planner
from scripts import apart

ROOT = Path(apart.__file__).parents[1]
RUN = str(ROOT / "tests" / "executor" / "old" / "run")
PLAN = f"{RUN}/plan.json"
GROUPS: dict[str, click.Group] = {"planner": planner, "executor": executor}
CASES = {
    "planner estimate": ["estimate", "--model", "gpt2", "--gpu", "h100", "--gpus", "2"],
    "planner estimate --json": ["estimate", "--model", "gpt2", "--gpu", "h100", "--gpus", "2", "--json"],
    "planner presets": ["presets", "models"],
    "planner groups": ["groups", PLAN],
    "executor status": ["status", RUN],
    "executor report": ["report", RUN],
    "executor": ["--help"],
} | {
    f"{name} {one} --help": [one, "--help"]
    for name, group in GROUPS.items()
    for one in group.list_commands(click.Context(group))
}
ENDS = {"files": (0, 0), "stdout closed": (2, 1), "stdout full": (2, 1), "folder gone": (2, 1), "stderr closed": (0, 0),
        "stderr full": (0, 0), "reader gone": (0, 0), "all closed": (2, 0), "all full": (2, 0)}  # fmt: skip
"""The exit code of a call that is right otherwise, and how many error lines can be read."""


@pytest.fixture(scope="module", autouse=True)
def imported() -> Iterator[None]:
    """Everything that the calls import is imported once, before the forks."""
    with pytest.MonkeyPatch.context() as patch, open(os.devnull, "w") as nothing:
        patch.setattr(sys, "stdout", nothing)
        patch.setattr(sys, "stderr", nothing)
        for case, arguments in CASES.items():
            command.exit_code(GROUPS[case.split()[0]], arguments)
    yield


@pytest.mark.parametrize("case", CASES)
def test_every_command_ends_in_a_line_whatever_its_streams_are(case: str, tmp_path: Path) -> None:
    name = case.split()[0]
    few = case.endswith("--help") and " " in case.removesuffix("--help").strip()
    for streams in ("stdout closed", "stdout full", "folder gone") if few else apart.STREAMS:
        with chdir(tmp_path):
            end = apart.run(GROUPS[name], name, CASES[case], streams)
        lines = [line for line in end.err.splitlines() if line.startswith("error:")]
        assert (end.code, len(lines)) == ENDS[streams], (streams, end)
        assert "internal" not in end.err and "Traceback" not in end.err and all(len(line) <= 300 for line in lines)
        assert streams in ("files", "stderr closed", "stderr full") or not end.out
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("streams", ["stdout full", "stdout closed", "stderr full", "all full", "reader gone"])
def test_a_file_that_is_written_is_whole_or_not_there(streams: str, tmp_path: Path) -> None:
    words = ["recommend", "--model", "mini-llama", "--cluster", "cpu", "--gpus", "2", "-o", "plan.json"]
    with chdir(tmp_path):
        end = apart.run(planner, "planner", words, streams)
        assert end.code == ENDS[streams][0]
        assert [path.name for path in tmp_path.iterdir()] == (["plan.json"] if streams != "stdout closed" else [])
        if streams != "stdout closed":
            assert apart.run(planner, "planner", ["groups", "plan.json"]).code == 0


@pytest.mark.parametrize("case", [case for case in CASES if any(word in (PLAN, RUN) for word in CASES[case])])
def test_a_name_that_is_not_utf8_is_refused_in_one_line(case: str, tmp_path: Path) -> None:
    name, odd = case.split()[0], os.fsdecode(os.fsencode(tmp_path / "b") + b"\xff")
    os.symlink(RUN, odd)
    words = [word.replace(RUN, odd) for word in CASES[case]]
    end = apart.run(GROUPS[name], name, words)
    assert (end.code, end.out, end.err.count("\n")) == (2, "", 1) and "is not UTF-8" in end.err
    Path(f"{odd}-folder").mkdir()
    with chdir(f"{odd}-folder"):
        end = apart.run(GROUPS[name], name, CASES[case])
        assert (end.code, end.out, end.err.count("\n")) == (2, "", 1) and "working folder" in end.err
        assert not list(Path().iterdir())


def test_a_terminal_that_knows_ascii_alone_gets_the_answer() -> None:
    words = [sys.executable, "-m", "planner", *CASES["planner estimate"]]
    done = subprocess.run(words, capture_output=True, env=os.environ | {"PYTHONIOENCODING": "ascii"}, check=False)
    assert done.returncode == 0 and done.stdout.isascii() and len(done.stdout.splitlines()) > 5


def test_as_a_shell_closes_and_fills_them() -> None:
    for words, code in ((">&-", 2), (">/dev/full", 2), ("2>&-", 0), ("2>/dev/full", 0), (">&- 2>&- <&-", 2)):
        line = f"{sys.executable} -m planner presets gpus {words}"
        done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
        assert (done.returncode, len(done.stderr.splitlines())) == (code, int(code == 2 and "2>" not in words)), words
