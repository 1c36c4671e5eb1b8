"""Claims about AGENTS.md: its commands run, the fields that it names are in what they print, its words are the code's.

Not here: the commands that start processes (tests/cluster/test_agents_run.py).
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple, get_args

import pytest

from planner.ask.fits import Verdict
from tests.test_docs import PROJECT, commands, section

pytestmark = pytest.mark.slow

PAGE = PROJECT / "AGENTS.md"
LINES = 60
PATIENCE_S = 300
SPAN = re.compile(r"`([^`]+)`")


class Printed(NamedTuple):
    """What a command gave: its exit code, its JSON (None where there is none), its words on stderr."""

    code: int
    answer: Any
    told: str


def printed(line: str, folder: Path) -> Printed:
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    words = shlex.split(line, comments=True)
    done = subprocess.run(
        words, cwd=folder, env=os.environ | {"PATH": path}, stdin=subprocess.DEVNULL, capture_output=True, text=True,
        timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    return Printed(done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr)


def starts_processes(line: str) -> bool:
    return line.startswith("executor ") and "--dry-run" not in line


def rows(text: str) -> list[tuple[list[str], list[str]]]:
    """(commands, fields) of each row of the page's table; a row without a command continues the one before."""
    found: list[tuple[list[str], list[str]]] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| ") and len(cells) == 3 and cells[0] != "command":
            found.append((SPAN.findall(cells[0]) or found[-1][0], SPAN.findall(cells[1])))
    return found


def is_of(line: str, command: str) -> bool:
    """Whether a line is a call of `command`, with each option that this has."""
    words, asked = shlex.split(line, comments=True), command.split()
    return words[:2] == asked[:2] and set(asked[2:]) <= set(words)


def missing(answer: Any, fields: Iterable[str]) -> list[str]:
    """Fields that an answer does not have; of `a[].b` each of the list a, which is not empty, has to have b."""
    return [field for field in fields if not has(answer, field.split("."))]


def has(answer: Any, path: list[str]) -> bool:
    if not path:
        return True
    name, *rest = path
    key = name.removesuffix("[]")
    if not isinstance(answer, dict) or key not in answer:
        return False
    if key == name:
        return has(answer[key], rest)
    return bool(answer[key]) and all(has(one, rest) for one in answer[key])


def unread(answers: dict[str, Printed], line: str) -> list[str]:
    """Fields that the page names for the command of a line, and that are not in what it printed."""
    named = [
        field for names, fields in rows(PAGE.read_text()) for name in names if is_of(line, name) for field in fields
    ]
    assert named, f"the page names no field of {line}"
    return missing(answers[line].answer, named)


QUICK = [line for line in commands(PAGE) if not starts_processes(line)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("agent")


@pytest.fixture(scope="module")
def answers(folder) -> dict[str, Printed]:
    """What each quick command of the page printed, one after the other in one folder."""
    return {line: printed(line, folder) for line in QUICK}


@pytest.mark.parametrize("line", QUICK)
def test_every_command_that_starts_nothing_runs_and_prints_one_object_with_its_schema(answers, line):
    found = answers[line]

    assert found.code == 0, found.told
    assert re.fullmatch(r"[a-z-]+/\d+", found.answer["schema"])


@pytest.mark.parametrize("line", QUICK)
def test_every_field_that_is_named_is_in_what_is_printed(answers, line):
    assert unread(answers, line) == []


def test_every_row_is_of_a_command_of_the_page():
    lines, found = list(commands(PAGE)), rows(PAGE.read_text())

    assert len(found) > 5
    assert [name for names, _ in found for name in names if not any(is_of(line, name) for line in lines)] == []


@pytest.mark.parametrize(
    "field", ["no_such", "estimates[].no_such", "estimates[].memory.no_such", "recommended.verdict"]
)
def test_a_field_that_does_not_exist_is_found(answers, field):
    line = next(line for line in QUICK if is_of(line, "planner estimate"))

    assert missing(answers[line].answer, [field]) == [field]


def test_the_verdicts_are_those_of_the_planner():
    told = next(line for line in PAGE.read_text().splitlines() if line.startswith("`verdict`:"))

    assert set(SPAN.findall(told)) == {"verdict", *get_args(Verdict)}


def test_what_fits_has_one_of_the_two_words_that_the_page_says(answers):
    found = [one for each in answers.values() for one in each.answer.get("estimates", [])]

    assert {one["fits"] for one in found} == {True, False}
    assert [one["verdict"] for one in found if one["fits"] != (one["verdict"] in ("yes", "likely"))] == []


def test_the_exit_codes_are_those_of_the_commands_contract():
    told = next(line for line in PAGE.read_text().splitlines() if line.startswith("Exit codes:"))
    contract = section(PROJECT / "docs" / "architecture.md", "## The commands' contract")
    codes = re.findall(r"\d+", " ".join(re.findall(r"^\| (\d[\d, ]*) \|", contract, re.MULTILINE)))

    assert len(codes) > 5
    assert re.findall(r"(?:[:,]|or) (\d+) ", told) == codes


@pytest.mark.parametrize("command", ["estimate", "recommend"])
def test_where_nothing_fits_the_json_is_printed_and_the_exit_code_is_3(command, tmp_path):
    found = printed(f"planner {command} --model 405b --gpus 8 --method full --json", tmp_path)

    assert (found.code, found.answer["recommended"]) == (3, None)
    assert {one["fits"] for one in found.answer["estimates"]} == {False}


def test_invalid_input_is_one_line_and_exit_code_2(tmp_path):
    found = printed("planner estimate --model 8b --gpus 12 --json", tmp_path)

    assert (found.code, found.answer, found.told.count("\n")) == (2, None, 1)


def test_a_plan_that_was_edited_is_refused_by_its_hash(answers, folder):
    plan = json.loads((folder / "small.json").read_text())
    plan["job"]["seq_len"] *= 2
    (folder / "edited.json").write_text(json.dumps(plan))

    found = printed("executor run edited.json --dry-run --json", folder)

    assert (found.code, found.answer) == (2, None)
    assert "content_hash" in found.told


def test_it_has_60_lines_at_most():
    assert len(PAGE.read_text().splitlines()) <= LINES
