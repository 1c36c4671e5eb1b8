"""A name in backticks in the documentation, and a module named in a module's first words, exists in the tree.

Not here: links and commands of pages (test_docs.py).
"""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
CODE = ("planner", "executor", "tui", "scripts", "tests", "bench", "presets")
DATED = ("log.md", "decisions", "lab", "accuracy", "accuracy.md")
"""Pages of their day: what they name may be gone."""
PLACE = re.compile(r"(?:planner|executor|tui|scripts|tests|bench|presets|docs)/[\w./-]*\w/?")
CONSTANT = re.compile(r"_?[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*")
FUNCTION = re.compile(r"[a-z]\w*\(\)")
MODULE = re.compile(r"(?<![\w./-])([\w/]+\.py)\b")


@cache
def words() -> frozenset[str]:
    """Every name in the code, whatever it names."""
    found: set[str] = set()
    for folder in CODE:
        for path in (PROJECT / folder).rglob("*"):
            if path.suffix in (".py", ".toml") and path != Path(__file__):
                found.update(re.findall(r"\w+", path.read_text()))
    return frozenset(found)


@cache
def modules() -> tuple[str, ...]:
    return tuple(str(path.relative_to(PROJECT)) for folder in CODE for path in (PROJECT / folder).rglob("*.py"))


def absent(text: str) -> list[str]:
    """Names in backticks that are a place of this tree, a constant or a function, and are not there. A constant or
    function beside a module stands in that module."""
    found = []
    for line in re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL).splitlines():
        told = re.findall(r"`([^`]+)`", line)
        found += [name for name in told if PLACE.fullmatch(name) and not (PROJECT / name).exists()]
        named = [one for one in told if FUNCTION.fullmatch(one) or (CONSTANT.fullmatch(one) and len(one) > 2)]
        found += [name for name in named if name.rstrip("()") not in words()]
        for name, place in re.findall(r"`(_?[A-Z][A-Z0-9_]+)`[^`]{0,60} in `([\w/]+\.py)`", line):
            if (PROJECT / place).exists() and not re.search(rf"\b{name}\b", (PROJECT / place).read_text()):
                found.append(f"{name} in {place}")
    return found


PAGES = [
    path for path in (*sorted((PROJECT / "docs").rglob("*.md")), PROJECT / "README.md", PROJECT / "CONTRIBUTING.md")
    if not set(path.relative_to(PROJECT).parts) & set(DATED)
]  # fmt: skip


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_names_in_backticks_of_a_page_exist(page: Path) -> None:
    assert absent(page.read_text()) == []


def test_names_that_are_gone_are_found() -> None:
    text = (
        "`planner/gone.py`, `GONE_NAME`, `gone_for_good()`, and `ENGINES` in `planner/cli/__init__.py`; `planner/cli/`"
    )
    assert absent(text) == ["planner/gone.py", "GONE_NAME", "gone_for_good()", "ENGINES in planner/cli/__init__.py"]


def heads() -> list[tuple[str, str]]:
    found = []
    for name in modules():
        if name.startswith(("planner", "executor", "tui")):
            told = ast.get_docstring(ast.parse((PROJECT / name).read_text())) or ""
            found.append((name, told))
    return found


def test_modules_that_are_said_to_have_what_is_not_here_exist() -> None:
    """A path is of this tree, whole or from a package of it; a name alone is another module of the tree."""
    wrong = [
        f"{name}: {said}"
        for name, told in heads()
        for said in MODULE.findall(told.partition("Not here:")[2])
        if said == Path(name).name or not any(one == said or one.endswith(f"/{said}") for one in modules())
    ]
    assert wrong == []


def test_names_in_backticks_of_a_module_s_first_words_exist() -> None:
    """In the module itself, or anywhere in the tree as a place, a constant or a function."""
    wrong = []
    for name, told in heads():
        body = (PROJECT / name).read_text().replace(told, "", 1)
        named = re.findall(r"`([A-Za-z_]\w*)`", told)
        wrong += [f"{name}: {one}" for one in named if not re.search(rf"\b{one}\b", body) and one not in words()]
        wrong += [f"{name}: {said}" for said in absent(told)]
    assert wrong == []
