"""Claims about entering the explorer: on a real terminal, without torch, and one line when it cannot be."""

from __future__ import annotations

import fcntl
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from planner.basics.errors import PlannerError
from planner.cli import explorer

PROJECT = Path(__file__).resolve().parents[2]
PATIENCE_S = 180
AT_EXIT = "import atexit, sys; atexit.register(lambda: open({path!r}, 'w').write(' '.join(sys.modules)))"
ENTER = "sys.argv[1:] = ['explore', '--model', '7b', '--gpus', '64']; from planner import cli; cli.main()"


def on_a_terminal(code: str, *keys: tuple[bytes, bytes]) -> tuple[int, bytes]:
    """Run Python on a pseudo-terminal of 80x24; when the first of a pair is seen, the second is typed."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=PROJECT, stdin=theirs, stdout=theirs, stderr=theirs,
        env={**os.environ, "TERM": "xterm-256color"},
    )  # fmt: skip
    os.close(theirs)
    seen, left, end = b"", list(keys), time.monotonic() + PATIENCE_S
    try:
        while process.poll() is None and time.monotonic() < end:
            if select.select([ours], [], [], 0.05)[0]:
                try:
                    seen += os.read(ours, 65536)
                except OSError:  # the last process on the terminal is gone
                    break
            if left and left[0][0] in seen:
                os.write(ours, left.pop(0)[1])
        return process.wait(PATIENCE_S), seen
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def test_it_paints_answers_and_quits_on_a_real_terminal_without_torch(tmp_path):
    loaded = tmp_path / "modules"

    code, seen = on_a_terminal(f"{AT_EXIT.format(path=str(loaded))}\n{ENTER}", (b"yes", b"q"))

    modules = set(loaded.read_text().split())
    assert code == 0, seen[-2000:]
    assert "textual" in modules  # so that the list is what it seems
    assert not modules & {"torch", "accelerate", "deepspeed", "transformers", "peft"}


def test_the_fields_are_painted_before_the_cost_models_are_imported(tmp_path):
    """The first paint waits for no module of the planner that predicts anything."""
    loaded = tmp_path / "modules"
    code = (
        f"{AT_EXIT.format(path=str(loaded))}\n"
        "from tui.screens.main import MainScreen\n"
        "MainScreen.start = lambda self: self.app.exit()\n"  # what runs after the first paint
        f"{ENTER}"
    )

    status, seen = on_a_terminal(code)

    assert status == 0, seen[-2000:]
    assert b"more options" in seen
    modules = loaded.read_text().split()
    assert not {
        "planner.decide.estimation",
        "planner.decide.search",
        "planner.figures.memory",
        "tui.state",
        "numpy",
    } & set(modules)


def test_without_a_terminal_it_says_so_in_one_line():
    done = subprocess.run(
        [sys.executable, "-m", "planner", "explore"], cwd=PROJECT, capture_output=True, text=True, timeout=PATIENCE_S
    )

    assert done.returncode == 2
    assert done.stderr == ("error: explore: needs a terminal to draw on. Use planner recommend, or explore --json.\n")


@pytest.mark.parametrize("package", ["tui", "textual"])
def test_when_it_is_not_installed_one_line_says_what_to_install(package):
    # None in sys.modules is how Python itself marks a module that must not be found.
    hide = "import sys, importlib.util; find = importlib.util.find_spec\n"
    hide += f"importlib.util.find_spec = lambda name, *more: None if name == {package!r} else find(name, *more)\n"
    hide += f"sys.modules[{package!r}] = None\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{hide}{ENTER}"], cwd=PROJECT, capture_output=True, text=True, timeout=PATIENCE_S
    )

    assert done.returncode == 2
    assert done.stderr == (
        f"error: explore: the package {package} is not installed. Install it with: pip install 'meshwright[tui]'.\n"
    )


def test_an_unknown_option_is_refused_like_everywhere():
    from planner import cli
    from planner.basics import command

    assert command.exit_code(cli.planner, ["explore", "--no-such"], name="planner") == 2


def test_a_refusal_of_the_first_question_does_not_keep_the_screen_from_opening():
    code, seen = on_a_terminal(
        ENTER.replace("sys.argv", "import sys; sys.argv", 1).replace("'64'", "'63'"),
        (b"must be a multiple", b""),  # headline and field are painted one after the other
        (b"no answer yet", b"q"),
    )

    assert code == 0, seen[-2000:]
    assert b"no answer yet" in seen


def test_not_installed_names_the_extra():
    assert "meshwright[tui]" in explorer.not_installed("textual").sentence
    assert isinstance(explorer.not_installed("textual"), PlannerError)
