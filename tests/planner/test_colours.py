"""Claims about colours: heads and verdicts alone have them, on a terminal alone, and they change no character.

Not here: how wide lines are (test_widths.py).
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from screens import OLD, raw

from planner.basics.display import ColourColumns, Table, as_text

COLOURS = re.compile(r"\x1b\[[0-9;]*m")
TABLE = Table(
    ("strategy", "layout", "fits", "step"),
    (("* ddp", "no reshard", "yes", "1 s"), ("fsdp", "", "likely", "2 s"), ("tp", "", "close", "3 s"),
     ("pp", "yes", "no", "4 s")),
    left=2,
)  # fmt: skip
GREEN, YELLOW, RED, BOLD, END = "\x1b[32m", "\x1b[33m", "\x1b[31m", "\x1b[1m", "\x1b[0m"
ESTIMATE = "planner estimate --model gpt2 --gpus 2"


@pytest.mark.parametrize("width", range(12, 60))
def test_without_its_colours_a_text_is_the_one_that_has_none(width: int) -> None:
    elements = ["a sentence that is longer than a line", TABLE]

    coloured = as_text(elements, ColourColumns(width))
    assert COLOURS.sub("", coloured) == as_text(elements, width) != coloured


def test_heads_are_bold_and_verdicts_have_their_colours() -> None:
    head, *rows = as_text([TABLE], ColourColumns(80)).split("\n")

    assert head.startswith(BOLD) and head.endswith(END)
    assert [COLOURS.findall(row) for row in rows] == [[GREEN, END], [GREEN, END], [YELLOW, END], [RED, END]]
    assert [re.findall(r"m(\w+)\x1b", row) for row in rows] == [["yes"], ["likely"], ["close"], ["no"]]


def test_a_table_without_verdicts_has_a_head_in_bold_alone() -> None:
    head, *rows = as_text([Table(("yes", "tied"), (("yes", "no"), (" no", "yes")))], ColourColumns(80)).split("\n")

    assert COLOURS.findall(head) == [BOLD, END] and not any(map(COLOURS.search, rows))


def test_what_others_wrote_has_no_colour_of_its_own() -> None:
    text = as_text([f"{RED}red\x1b[2J", Table(("a",), ((f"{GREEN}b{END}",),))], ColourColumns(80))

    assert COLOURS.findall(text) == [BOLD, END] and "\x1b[2J" not in text


def plain(command: str, folder: Path, **variables: str) -> str:
    return re.sub(r"[^\n]*\r(?!\n)|\x1b\[K", "", raw(command, folder, **variables))


@pytest.mark.parametrize(
    "command", [ESTIMATE, f"executor report {OLD / 'run'}", f"planner show {OLD / 'run'}/plan.json"]
)
@pytest.mark.parametrize("off", [{"NO_COLOR": "1"}, {"TERM": "dumb"}], ids=str)
def test_a_terminal_has_colours_until_they_are_turned_off(command: str, off: dict[str, str], tmp_path: Path) -> None:
    on, without = plain(command, tmp_path), plain(command, tmp_path, **off)

    assert "\x1b[1m" in on and "\x1b" not in without
    assert COLOURS.sub("", on) == without


def test_an_empty_no_color_turns_nothing_off(tmp_path: Path) -> None:
    assert "\x1b[1m" in plain(ESTIMATE, tmp_path, NO_COLOR="")


def test_a_pipe_has_no_colours(tmp_path: Path) -> None:
    words = [sys.executable, "-m", *ESTIMATE.split()]
    assert "\x1b" not in subprocess.run(words, cwd=Path(__file__).parents[2], capture_output=True, text=True).stdout
