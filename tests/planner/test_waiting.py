"""A person at a terminal during a search: a line that moves, and Ctrl-C, which keeps the best so far."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from planner.basics import command, waiting
from planner.cli import planner

MOE = ("--model", "qwen3-30b-a3b", "--cluster", "aws-g5")
LONG = ("recommend", *MOE, "--gpus", "32", "--any-runtime", "--objective", "largest-context")
ONE_B = ("--model", "llama-3.2-1b", "--gpu", "h100")
ASKED = {
    "recommend": ("recommend", *ONE_B, "--gpus", "4", "--any-runtime"),
    "largest micro-batch": ("recommend", *ONE_B, "--gpus", "2", "--objective", "largest-micro-batch"),
    "fit": ("fit", *ONE_B, "--gpus", "2", "--max-gpus", "4", "--what", "gpus,global-batch"),
    "sweep": ("sweep", *ONE_B, "--gpus", "1,2,4"),
    "cost": ("cost", "--model", "llama-3-70b", "--gpus", "64", "--tokens", "1B"),
    "estimate of an engine": ("estimate", *ONE_B, "--gpus", "4", "--runtime", "transformers-tp"),
    "explain": ("explain", *ONE_B, "--gpus", "4", "--runtime", "transformers-tp"),
}


def run(*arguments: str) -> int:
    return command.exit_code(planner, arguments, name="planner")


def looks(monkeypatch: pytest.MonkeyPatch, interrupt_at: int | None = None) -> list[tuple[int, int]]:
    """What searches tell the command line from here on; Ctrl-C at one of the calls."""
    calls: list[tuple[int, int]] = []
    watched = waiting.Waiting.__call__

    def look(self: waiting.Waiting, done: int, total: int) -> None:
        calls.append((done, total))
        if len(calls) == interrupt_at:
            signal.raise_signal(signal.SIGINT)
        watched(self, done, total)

    monkeypatch.setattr(waiting.Waiting, "__call__", look)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("name", ASKED)
def test_ctrl_c_keeps_the_best_so_far(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    calls = looks(monkeypatch)
    assert run(*ASKED[name], "--json") == 0
    whole = json.loads(capsys.readouterr().out)
    assert whole["interrupted"] is False

    looks(monkeypatch, interrupt_at=len(calls) - 1)
    assert run(*ASKED[name], "--json") == command.INTERRUPTED
    out, err = capsys.readouterr()
    part = json.loads(out)
    assert part["interrupted"] is True and part.keys() == whole.keys()
    assert re.search(r"note: interrupted: the best so far is shown \(.*looked at [\d,]+ of [\d,]+ layouts\)", err)
    assert "error" not in err


def test_ctrl_c_before_anything_fits_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    for asked in ASKED.values():
        looks(monkeypatch, interrupt_at=2)
        assert run(*asked) == command.INTERRUPTED
        out, err = capsys.readouterr()
        assert out == "" and re.fullmatch(r"error: interrupted: no layout that fits (had been|was) found.*\n", err)


@pytest.mark.slow
def test_what_was_found_is_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    calls = looks(monkeypatch)
    plan = tmp_path / "plan.json"
    assert run(*ASKED["recommend"]) == 0
    looks(monkeypatch, interrupt_at=len(calls) - 1)
    assert run(*ASKED["recommend"], "-o", str(plan)) == command.INTERRUPTED
    assert run("show", str(plan)) == 0


def test_the_second_ctrl_c_ends_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    def look(self: waiting.Waiting, done: int, total: int) -> None:
        self._looked = True
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(waiting.Waiting, "__call__", look)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    try:
        assert run(*ASKED["recommend"]) == command.INTERRUPTED
        assert capsys.readouterr().err.strip() == "error: interrupted."
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.slow
def test_a_long_search_shows_on_a_terminal_that_it_moves_and_ctrl_c_ends_it():
    def moving(shown: str) -> set[str]:
        return {
            line.removesuffix("^C")
            for line in shown.split(waiting.ERASE)
            if re.match(r"(search \d+.*)?looked at", line)
        }

    shown, code = on_a_terminal(LONG, until=lambda shown: "search " in shown and len(moving(shown)) > 3)

    assert code == command.INTERRUPTED
    assert len(moving(shown)) > 3 and all(len(line) < 80 for line in moving(shown))
    answer = shown.split(waiting.ERASE)[-1]  # the last line was erased before anything else was printed
    assert "looked at" in answer.rpartition("error: ")[2]
    assert "longest sequence: " in answer and "* recommended" in answer


def on_a_terminal(arguments: tuple[str, ...], until: Callable[[str], bool]) -> tuple[str, int]:
    """What a terminal of 80 columns shows, and the exit code; Ctrl-C is typed once `until` holds of what is shown."""
    child, terminal = pty.fork()
    if child == 0:
        os.execv(sys.executable, [sys.executable, "-m", "planner", *arguments])
    seen, typed = b"", False
    while True:
        ready, _, _ = select.select([terminal], [], [], 120)
        if not ready:
            os.kill(child, signal.SIGKILL)
        try:
            some = os.read(terminal, 65536)
        except OSError:  # closed by the child's end
            break
        seen += some
        if not typed and until(seen.decode(errors="replace")):  # it may end within a character
            typed = True
            os.write(terminal, b"\x03")
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    return seen.decode(), os.waitstatus_to_exitcode(status)


@pytest.mark.parametrize(("searches", "done", "seconds"), [(1, 9, 2), (4, 1_346_898, 7), (12, 13_468_980, 120)])
def test_a_line_says_how_to_end_a_search_however_many_came_before(
    searches: int, done: int, seconds: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(waiting, "columns", lambda: 80)
    one = waiting.Waiting()
    one._searches, one._done, one._total = searches, done, done

    one._draw(float(seconds))

    line = capsys.readouterr().err.removeprefix(waiting.ERASE)
    assert line.count(f"{done:,}") == 2
    assert "; Ctrl-C keeps the best" in line
    assert len(line) < 80
