"""Claims about a terminal's width: no line of an answer is longer, no cell and no word is broken, a pipe gets it whole.

Questions are drawn: a few in the quick tests, 200 in the long ones. Not here: what the sentences say (test_verdict.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from screens import COLUMNS, FOLDER, LINES, SCREENS, in_terminal, prepare
from screens import drawn as drawn_screen
from test_one_star import Given, asked, drawn

import planner as library
from planner.basics.display import INDENT, Element, Table, as_text, elements_of

WIDTHS = (80, 100, 120)


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


@pytest.mark.parametrize("count", [2, pytest.param(200, marks=pytest.mark.long)])
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare(tmp_path_factory.mktemp("screens"))


@pytest.mark.parametrize("command", [
    *(one for one in SCREENS.values() if one != SCREENS["schema"]),  # JSON in the lines of its file
    "planner recommend --model 70b --gpus 64 --pareto 4 --why-not tp=4 --verbose",
    "planner explain all --model 7b --gpus 8",
    "planner presets models 7b",
    "planner estimate --help-all",
    "executor run --help-all",
    "executor measure --list",
])  # fmt: skip
def test_no_command_prints_a_line_wider_than_the_terminal(command: str, folder: Path) -> None:
    assert [line for line in in_terminal(command, COLUMNS, folder).split("\n") if len(line) > COLUMNS] == []


@pytest.mark.parametrize("command", ["planner backends", "planner presets"])
def test_a_list_of_all_there_is_fits_one_screen(command: str, folder: Path) -> None:
    lines = in_terminal(command, COLUMNS, folder).split("\n")
    assert len(lines) <= LINES  # the last is the shell's


def test_a_dry_run_has_no_line_wider_than_the_terminal_but_a_path_alone(folder: Path) -> None:
    lines = in_terminal("executor run 8.json --dry-run", COLUMNS, folder).split("\n")
    assert "executor join " in "\n".join(lines)
    assert [line for line in lines if len(line) > COLUMNS and len(line.strip("# \\").split()) > 1] == []


def test_a_terminal_shows_formulas_of_a_phase_only_where_they_are_asked_for(folder: Path) -> None:
    command = SCREENS["explain-phase"]
    short, whole = (in_terminal(one, COLUMNS, folder) for one in (command, f"{command} --verbose"))
    assert "comes from" not in short and "FORMULAS" not in short and "--verbose lists them" in short
    assert whole.index("WHAT WOULD MAKE IT SMALLER") < whole.index("FORMULAS") and "comes from" in whole


@pytest.mark.parametrize("name", SCREENS)
def test_the_first_screen_is_as_drawn(name: str, folder: Path) -> None:
    """After a change that is meant: python tests/planner/screens.py."""
    assert drawn_screen(name, folder) == (FOLDER / f"{name}.txt").read_text()


def test_there_is_a_screen_for_each_name() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == sorted(SCREENS)


@pytest.mark.parametrize("count", [4, pytest.param(100, marks=pytest.mark.long)])
def test_the_answer_is_the_first_or_the_last_paragraph(count: int) -> None:
    """Of estimate and recommend the last; of fit and sweep the table that follows one headline."""
    seen = 0
    for given in islice(drawn(2030), count):
        for face in (library.estimate, library.recommend):
            found = asked(lambda face=face, given=given: face(**given))
            if found is None or not found.estimates:
                continue
            last = as_text(elements_of(found), 80).rstrip().split("\n\n")[-1]
            begun = "* recommended: " if found.best is not None else ("Nothing", "Full training", "What", "The ", "No ")
            assert last.startswith(begun), last
            seen += 1
        limits = asked(lambda given=given: library.fit(what="gpus", **given))
        if limits is not None:
            tables = [place for place, one in enumerate(elements_of(limits)) if isinstance(one, Table)]
            assert tables and tables[0] <= 2
    assert seen > count
