"""Claims about help: every command's first page fits on a screen, `--help-all` has every option once, and every option
says which section it belongs to.

Not here: what commands and options do, or the words of their help (test_wording.py).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator

import click
import pytest

from executor.cli import executor
from planner.basics.help_page import FIRST_PAGE_LINES, HELP_ALL, SECTIONS, Paged, PagedCommand, SectionedOption
from planner.cli import planner

GROUPS: dict[str, click.Group] = {"planner": planner, "executor": executor}
OF_CLICK = {"--version", "--help"}


def contexts() -> Iterator[click.Context]:
    """The two programs, and each of their commands."""
    for name, group in GROUPS.items():
        context = group.make_context(name, [], resilient_parsing=True)
        yield context
        for one in group.list_commands(context):
            command = group.get_command(context, one)
            assert command is not None
            yield command.make_context(one, [], parent=context, resilient_parsing=True)


PAGES = {context.command_path: context for context in contexts()}
COMMANDS = {path: context for path, context in PAGES.items() if path not in GROUPS}


@pytest.fixture(autouse=True)
def _eighty_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def paged(path: str) -> Paged:
    command = PAGES[path].command
    assert isinstance(command, Paged)
    return command


def listed(text: str) -> list[str]:
    """The names of options that begin a line under a heading."""
    under = re.split(r"^\w+:$", text, maxsplit=1, flags=re.MULTILINE)[-1]
    rows = re.findall(r"^  (-[\w-]+(?:(?:, | / )-[\w-]+)*)", under, re.MULTILINE)
    return [name for row in rows for name in re.split(", | / ", row)]


def names(path: str) -> list[str]:
    return [name for one in paged(path).options(PAGES[path]) for name in (*one.opts, *one.secondary_opts)]


@pytest.mark.parametrize("path", PAGES)
def test_the_first_page_is_one_screen(path: str) -> None:
    lines = paged(path).get_help(PAGES[path]).split("\n")

    assert len(lines) <= FIRST_PAGE_LINES
    assert [line for line in lines if len(line) > 80] == []
    assert lines[0].startswith(f"Usage: {path} ")


@pytest.mark.parametrize("path", PAGES)
def test_the_whole_help_has_every_option_once(path: str) -> None:
    text = paged(path).whole_help(PAGES[path])

    assert sorted(listed(text)) == sorted(names(path))
    assert [line for line in text.split("\n") if len(line) > 80] == []


@pytest.mark.parametrize("path", PAGES)
def test_a_page_without_every_option_says_how_they_are_shown(path: str) -> None:
    command, context = paged(path), PAGES[path]
    page = command.get_help(context)

    whole = page == command.whole_help(context)
    assert whole or (f"{path} {HELP_ALL}" in page.split("\n")[-1] and set(listed(page)) < set(names(path)))


@pytest.mark.parametrize("path", COMMANDS)
def test_every_option_has_a_section(path: str) -> None:
    for one in paged(path).options(PAGES[path]):
        assert isinstance(one, SectionedOption) or set(one.opts) & OF_CLICK, one.opts
        assert getattr(one, "section", SECTIONS[-1]) in SECTIONS, one.opts


@pytest.mark.parametrize("path", COMMANDS)
def test_a_summary_is_whole_on_every_page(path: str) -> None:
    command, context = paged(path), PAGES[path]
    summary = command.get_short_help_str(limit=1000)
    assert context.parent is not None and isinstance(context.parent.command, Paged)

    assert summary.endswith(".") and not summary.endswith("..")
    assert f"\n  {summary}\n" in command.first_page(context)
    assert re.search(rf"^  {context.info_name} +{re.escape(summary)}$", context.parent.get_help(), re.MULTILINE)


@pytest.mark.parametrize("path", COMMANDS)
def test_the_example_is_taken_by_the_command(path: str) -> None:
    command, context = COMMANDS[path].command, COMMANDS[path]
    assert isinstance(command, PagedCommand)

    words = shlex.split(command.example)
    assert words[:2] == path.split()
    assert command.make_context(context.info_name, words[2:], parent=context.parent).params
    assert f"  Example: {command.example}\n" in command.get_help(context)


def test_help_all_is_an_option_of_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        planner.main(["estimate", HELP_ALL], prog_name="planner")

    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{paged('planner estimate').whole_help(PAGES['planner estimate'])}\n"
