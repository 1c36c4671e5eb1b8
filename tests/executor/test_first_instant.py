"""Ctrl-C in the first instant of a command, and numbers that are none: one line, whatever was being imported.

Not here: what later interruptions leave (tests/cluster/test_launch.py).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tomllib
from functools import partial
from pathlib import Path

import click
import pytest

from executor.cli import options
from planner.basics import command
from planner.basics.errors import PlannerError

PROJECT = Path(__file__).parents[2]
SCRIPTS = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["scripts"]
WAYS = {
    **{f"script {name}": ["-c", "import {0}; {0}.{1}()".format(*place.split(":"))] for name, place in SCRIPTS.items()},
    "python -m planner": ["-m", "planner"],
}
PRESSED = "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"


@pytest.mark.parametrize(
    ("way", "module"),
    [*((way, "click") for way in WAYS), *((way, "msgspec") for way in WAYS if "executor" in way)],
)
def test_ctrl_c_while_a_command_is_imported_is_one_line(tmp_path: Path, way: str, module: str) -> None:
    (tmp_path / f"{module}.py").write_text(PRESSED)  # imported in place of the real one, as the first of its name
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), str(PROJECT)])}
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)  # what starts the tests may have it ignored
    done = subprocess.run(
        [sys.executable, *WAYS[way], "--help"], env=env, capture_output=True, text=True, timeout=50, preexec_fn=heard
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "error: interrupted.\n")


NAMES = [name for name, option in vars(options).items() if name.isupper() and callable(option)]


@pytest.mark.parametrize("value", ["inf", "nan", "-inf"])
@pytest.mark.parametrize("name", NAMES)
def test_no_option_s_refusal_offers_none(name: str, value: str) -> None:
    @click.command()
    @getattr(options, name)
    def asked(**_: object) -> None:
        pass

    given = asked.params[0]
    if given.callback is not command.finite:
        return
    with pytest.raises((PlannerError, click.ClickException)) as refused:
        asked.main([f"{given.opts[-1]}={value}"], standalone_mode=False)
    assert not re.search(r"\bNone\b", str(refused.value)), str(refused.value)
