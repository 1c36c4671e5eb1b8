"""AGENTS.md's plan of a small run, made and run for real: its commands, and the fields that it names of them.

Not here: the other commands of that page (tests/test_agents.py).
"""

from __future__ import annotations

import json
from pathlib import Path

from tests.test_agents import PAGE, commands, printed, starts_processes, unread

FOLDER = ("run.json", "metrics.jsonl", "logs")
"""What the page says is in a run folder."""


def test_a_small_run_goes_by_the_lines_of_the_page(tmp_path: Path) -> None:
    lines = [line for line in commands(PAGE) if "small.json" in line or "runs/small" in line]
    assert sum(map(starts_processes, lines)) == sum(map(starts_processes, commands(PAGE))) == 4

    answers = {}
    for line in lines:
        answers[line] = printed(line, tmp_path)
        assert answers[line].code == 0, f"{line}\n{answers[line].told}"
        assert unread(answers, line) == []

    run = tmp_path / "runs" / "small"
    assert [name for name in FOLDER if f"`{name}" not in PAGE.read_text() or not (run / name).exists()] == []
    assert "cause" in json.loads((run / "run.json").read_text())
