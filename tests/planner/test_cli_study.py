"""The commands that are imported late: they are all there, and the others do not wait for them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from planner.basics import command
from planner.cli import LATER, planner


@pytest.mark.slow
def test_an_estimate_does_not_load_the_other_commands():
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from planner.basics import command; from planner.cli import planner;"
            "code = command.exit_code(planner, ['estimate', '--model', 'tiny-llama', '--gpus', '2']);"
            "print(code, *sys.modules)",
        ],
        capture_output=True,
        text=True,
        timeout=60,
    )

    code, *modules = done.stdout.splitlines()[-1].split()
    assert code == "0"
    assert not {
        "planner.cli.study",
        "planner.studies.fit",
        "planner.studies.sweep",
        "planner.studies.cost",
        "planner.studies.compare",
    } & set(modules)


def test_help_lists_them_beside_the_others(capsys: pytest.CaptureFixture[str]):
    assert command.exit_code(planner, ["--help"], name="planner") == 0
    told = capsys.readouterr().out

    listed = [line.split()[0] for line in told.partition("Commands:\n")[2].splitlines() if line]
    assert set(LATER) <= set(listed)


@pytest.mark.parametrize("name", sorted(LATER))
def test_each_has_a_help_page_of_its_own(name: str, capsys: pytest.CaptureFixture[str]):
    assert command.exit_code(planner, [name, "--help"], name="planner") == 0
    assert f"Usage: planner {name}" in capsys.readouterr().out
