"""Claims about a terminal's width: no line of an answer is longer, no cell and no word is broken, a pipe gets it whole.

Questions are drawn: a few in the quick tests, 200 in the long ones. Not here: what the sentences say (test_verdict.py).
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path

import pytest
from test_one_star import Given, asked, drawn

import planner as library
from planner.basics.display import INDENT, Element, Table, as_text, elements_of

WIDTHS = (80, 100, 120)
PROJECT = Path(__file__).parents[2]


def answers(given: Given) -> Iterator[list[Element]]:
    """What the commands draw of one question."""
    faces = (library.estimate, library.recommend, library.fit)
    for face in faces:
        found = asked(lambda face=face: face(**given))
        if found is not None:
            yield elements_of(found)
    spent = asked(lambda: library.cost(**given, tokens=10**9))
    if spent is not None:
        yield elements_of(spent)


def wrong(elements: list[Element], width: int) -> Iterator[str]:
    text = as_text(elements, width)
    lines = text.split("\n")
    yield from (f"{len(line)} characters: {line}" for line in lines if len(line) > width)
    words = set(text.split())
    for one in elements:
        if isinstance(one, Table):
            kept = [place for place, head in enumerate(one.head) if head not in one.drop]
            cells = {row[place].strip() for row in one.rows for place in kept}
            yield from (f"broken: {cell}" for cell in cells if len(cell) <= width - len(INDENT) and cell not in text)
        else:
            yield from (f"lost: {word}" for word in one.split() if word not in words)


@pytest.mark.parametrize("count", [4, pytest.param(200, marks=pytest.mark.long)])
def test_an_answer_fits_every_width_and_loses_no_word_and_no_cell(count: int) -> None:
    seen = 0
    for given in islice(drawn(2028), count):
        for elements in answers(given):
            seen += 1
            for width in WIDTHS:
                assert list(wrong(elements, width)) == [], (given, width)
    assert seen >= count


def test_without_a_width_a_table_is_whole_and_only_list_items_are_broken() -> None:
    table = Table(("name", "a", "b"), (("one two three", "1", "22"),), drop=("b",))
    sentence, item = "word " * 40, "- " + "word " * 40

    whole = as_text([table, sentence, item]).split("\n")
    assert whole[:3] == ["name           a   b", "one two three  1  22", sentence]
    assert whole[3].startswith("- word") and whole[4].startswith("  word") and len(whole) == 5


def test_a_table_drops_columns_in_their_order_and_then_gives_a_row_two_lines() -> None:
    table = Table(("name", "a", "b", "c"), (("one two three", "1", "22", "333"),), drop=("c", "a"))

    assert as_text([table], 20) == "name           a   b\none two three  1  22"
    assert as_text([table], 17) == "name            b\none two three  22"
    assert as_text([table], 16) == "name\n    a   b    c\none two three\n    1  22  333"
    assert as_text([table], 13) == "name\n    a   b\none two three\n    1  22"


@cache
def in_terminal(words: str, columns: int, folder: Path) -> str:
    """What a command shows in a real terminal of that width."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")} | {"TERM": "xterm"}
    command = [sys.executable, "-c", "from planner.cli import main; main()", *words.split()]
    started = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, env=env | {"PYTHONPATH": str(PROJECT)}
    )
    os.close(theirs)
    shown = b""
    while True:
        try:
            more = os.read(ours, 65536)
        except OSError:  # the other end is closed
            break
        if not more:
            break
        shown += more
    started.wait()
    os.close(ours)
    assert started.returncode == 0, shown.decode()
    return re.sub(r"[^\n]*\r(?!\n)|\x1b\[[0-9;?]*[a-zA-Z]", "", shown.decode().replace("\r\n", "\n"))


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans")
    for gpus in (8, 16):
        code = subprocess.run(
            [sys.executable, "-c", "from planner.cli import main; main()", "recommend", "--model", "7b", "--gpus",
             str(gpus), "-o", f"{gpus}.json"],
            cwd=folder, env=os.environ | {"PYTHONPATH": str(PROJECT)}, capture_output=True, check=False,
        )  # fmt: skip
        assert code.returncode == 0, code.stderr
    return folder


@pytest.mark.parametrize("words", [
    "estimate --model 7b --gpus 32",
    "recommend --model 70b --gpus 64 --pareto 4 --why-not tp=4 --verbose",
    "fit --model 7b --gpus 8",
    "sweep --model 7b --gpus 8..32",
    "cost --model 7b --gpus 32 --tokens 50B --price-per-gpu-hour 2",
    "compare 8.json 16.json",
    "show 8.json",
    "timeline 16.json",
    "explain --model 7b --gpus 8",
    "explain all --model 7b --gpus 8",
    "explain --model 7b --gpus 8 --phase peak",
    "groups 8.json",
    "backends",
    "presets",
    "presets models 7b",
    "--help",
    "estimate --help",
    "recommend --help",
])  # fmt: skip
def test_no_command_prints_a_line_wider_than_the_terminal(words: str, plans: Path) -> None:
    assert [line for line in in_terminal(words, 80, plans).split("\n") if len(line) > 80] == []


def test_each_command_s_summary_is_whole_at_80_columns(plans: Path) -> None:
    shown = in_terminal("--help", 80, plans).partition("Commands:")[2]

    assert "estimate" in shown and not [line for line in shown.split("\n") if line.endswith("...")]
