"""make mutants on a project of one module: a change that its tests notice, and one that they do not.

Not here: the changes of this project.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from planner.inventory.tape import Tape
from planner.inventory.tensors import Size
from scripts import mutations

SCRIPTS = Path(__file__).parents[1] / "scripts"
BOUND = '''"""A bound."""
from functools import cache

MOST = 3

@cache
def fits(size: int) -> bool:
    """Whether it does."""
    return size <= MOST

def room(size: int) -> int:
    """Called by nothing."""
    return MOST - size
'''
WATCHED = """from planner.bound import fits, room

def test_three_fit_and_four_do_not():
    assert fits(3) and not fits(4)
    assert room(1) == 2
"""
BLIND = """from planner.bound import fits

def test_one_fits():
    assert fits(1)
"""


def mutants(folder: Path, test: str, *words: str) -> subprocess.CompletedProcess[str]:
    """The answer of scripts/mutants.py in a project of its own."""
    for name, text in {
        "planner/__init__.py": "",
        "planner/bound.py": BOUND,
        "tests/planner/test_bound.py": test,
        "pyproject.toml": '[tool.pytest.ini_options]\npythonpath = ["."]\n',
    }.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    shutil.copytree(
        SCRIPTS,
        folder / "scripts",
        dirs_exist_ok=True,
        ignore=lambda _, names: [n for n in names if "mutat" not in n and "mutan" not in n],
    )
    script = [sys.executable, str(folder / "scripts" / "mutants.py"), *words]
    return subprocess.run(script, capture_output=True, text=True, timeout=300, check=False)


@pytest.mark.slow
def test_a_change_lives_where_no_test_looks_and_is_named(tmp_path: Path) -> None:
    watched = mutants(tmp_path / "watched", WATCHED)
    blind = mutants(tmp_path / "blind", BLIND)

    assert watched.stdout.startswith("4 of 4 changes noticed; 1 quick tests take"), watched
    assert watched.returncode == 0
    assert "lives after 1 tests: planner/bound.py:9 fits: size <= MOST  ->  size < MOST" in blind.stdout, blind
    assert "lives after 1 tests: planner/bound.py:4 (module): 3  ->  4" in blind.stdout
    assert "lives after 0 tests: planner/bound.py:13 room: MOST - size  ->  MOST + size" in blind.stdout
    assert "\n1 of 4 changes noticed" in blind.stdout
    assert blind.returncode == 1


@pytest.mark.slow
def test_only_the_tests_that_are_named_are_asked_and_a_record_of_them_serves_no_others(tmp_path: Path) -> None:
    (tmp_path / "tests" / "executor").mkdir(parents=True)
    (tmp_path / "tests" / "executor" / "test_blind.py").write_text(BLIND)
    record = str(tmp_path / "record")

    asked = mutants(tmp_path, WATCHED, "--tests", "tests/executor", "--record", record)
    others = mutants(tmp_path, WATCHED, "--record", record)
    none = mutants(tmp_path, WATCHED, "--tests", "tests/nowhere")

    assert "\n1 of 4 changes noticed; 1 quick tests" in asked.stdout, asked
    assert "is of tests/executor: name another file" in others.stderr, others
    assert "there are no tests in tests/nowhere" in none.stderr, none


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("a < b", ["a <= b"]),
        ("a == b", ["a != b"]),
        ("a + b * c", ["a - b * c", "a + b / c"]),
        ("a and not b", ["a or not b", "a and b"]),
        ("max(a, 2)", ["min(a, 2)", "max(a, 3)"]),
        ("share(a, b)", ["share(b, a)"]),
        ("where(a, b, c)", ["where(a, c, b)"]),
        ("0.5", ["1.0"]),
        ("'text' + f'{a + 1}'", []),
        ("max(a, a)", ["min(a, a)"]),
        ("share(a, a)", []),
        ("a + 0.0", ["a + 1.0"]),
        ("a + 0.5", ["a - 0.5", "a + 1.0"]),
        ("tape.drop(a, b)", []),
        ("True", []),
    ],
)
def test_an_expression_has_these_changes_and_no_others(before: str, after: list[str], tmp_path: Path) -> None:
    (tmp_path / "planner").mkdir()
    (tmp_path / "planner" / "one.py").write_text(f"def one(a: Literal[1] | None) -> Number:\n    value = {before}\n")
    (change,) = [path.name for path in mutations.modules(tmp_path)]
    changes = list(mutations.changes_of(Path("planner") / change, tmp_path))

    made = [changed(tmp_path, one) for one in changes]

    assert sorted(made) == sorted(f"value = {text}" for text in after)


def test_in_which_order_a_tape_lets_go_of_tensors_means_the_same() -> None:
    """Why `drop` and `release` are among the calls of any order."""
    left = []
    for turned in (False, True):
        tape = Tape()
        one, other = tape.new(Size(per_token=3.0)), tape.new(Size(fixed=5.0))
        for each in (one, other):
            tape.hold(each)
        tape.drop(*((other, one) if turned else (one, other)))
        tape.release(*((other.storage, one.storage) if turned else (one.storage, other.storage)))
        left.append((dict(tape.live), tape.moments, one.storage.holders, other.storage.holders))
    assert left[0] == left[1]


def changed(root: Path, change: mutations.Change) -> str:
    return ast.unparse(mutations.changed_tree(change, root)).splitlines()[1].strip()


@pytest.mark.parametrize(
    "text",
    [
        "import click\nimport torch\nA = 1\n",
        "from subprocess import run\nA = 1\n",
        "def said(a: int) -> str:\n    return str(a + 1)\n",
        "def check(a: int) -> None:\n    raise ValueError(f'{a + 1}', a + 1)\n",
        '"""A 1."""\nA: Literal[1] | None\n',
    ],
)
def test_texts_frameworks_processes_and_messages_do_not_count(text: str, tmp_path: Path) -> None:
    (tmp_path / "planner").mkdir()
    (tmp_path / "planner" / "one.py").write_text(text)

    assert mutations.every_change(tmp_path) == []
