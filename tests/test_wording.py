"""Claims about words: no message, help text or page has a phrase that docs/style.md forbids.

Not here: whether names in pages exist (test_names.py, test_documented.py), or whether a page is current (test_docs.py).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from executor.cli import executor
from planner.cli import planner

PROJECT = Path(__file__).resolve().parents[1]
FORBIDDEN = re.compile(
    r"\b(?:is|are|was|were|be|been) told\b|\bholds? \w+(?: \w+)? against\b|\bheld against\b|\bof before\b"
    r"|\bso (?:many|often)\b(?! as\b| that\b)|\bnobody\b|\bsomebody\b|\bwhat (?:\w+ ){1,2}says?\b"
    r"|\bgoes? on (?:from|with)\b",
    re.IGNORECASE,
)
GENERATED = ("accuracy.md", "commands.md", "formulas.md", "log.md")
"""Pages made of code by scripts/docs.py, whose words are tested where they come from; and the log, which is history."""
PAGES = [
    *(PROJECT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *(path for path in sorted((PROJECT / "docs").glob("*.md")) if path.name not in (*GENERATED, "style.md")),
]
PACKAGES = ("planner", "executor", "tui")


def phrases(text: str) -> list[str]:
    return [found.group() for found in FORBIDDEN.finditer(re.sub(r"\s+", " ", text))]


def messages(code: str) -> Iterator[str]:
    """String literals of a module that are sentences: three words or more, and no docstring."""
    tree = ast.parse(code)
    own = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        match node:
            case ast.JoinedStr(values=values):
                text = "".join(str(part.value) if isinstance(part, ast.Constant) else "x" for part in values)
            case ast.Constant(value=str(text)) if id(node) not in own | inside:
                pass
            case _:
                continue
        if len(text.split()) > 2:
            yield text


def helps(group: click.Group) -> Iterator[tuple[str, str]]:
    """The help of each command and option, with its name."""
    with click.Context(group) as context:
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            yield f"{group.name} {name}", command.help or ""
            for option in command.get_params(context):
                if isinstance(option, click.Option):
                    yield f"{group.name} {name} {option.opts[0]}", option.help or ""


def test_no_message_has_a_forbidden_phrase() -> None:
    found = {}
    for path in (path for package in PACKAGES for path in sorted((PROJECT / package).rglob("*.py"))):
        if wrong := [phrase for text in messages(path.read_text()) for phrase in phrases(text)]:
            found[str(path.relative_to(PROJECT))] = wrong

    assert found == {}


def test_no_help_has_a_forbidden_phrase() -> None:
    found = {name: wrong for group in (planner, executor) for name, text in helps(group) if (wrong := phrases(text))}

    assert found == {}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_no_page_has_a_forbidden_phrase(page: Path) -> None:
    assert phrases(re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)) == []


@pytest.mark.parametrize(
    "text",
    [
        "a mistake is told at once", "predictions are held against runs", "It holds predictions against rows",
        "rows of before are read", "a group of so many ranks", "keep so many", "nobody answers", "What the file says",
        "what it says", "the run goes on from step 3", "Somebody has to look",
    ],
)  # fmt: skip
def test_a_forbidden_phrase_would_be_seen(text: str) -> None:
    assert phrases(text)
    assert [phrase for said in messages(f"raise Error(f'{text} {{x}}')") for phrase in phrases(said)]


@pytest.mark.parametrize("text", ["so many that it fails", "the list says", "the answer is held in memory"])
def test_plain_words_are_let_through(text: str) -> None:
    assert phrases(text) == []
