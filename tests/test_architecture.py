"""Claims about the shape of the code: imports run one way, faces stay light, modules say what they are and stay small.

Not here: whether anything it computes is right.
"""

from __future__ import annotations

import ast
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[1]
PACKAGES = ("planner", "executor", "tui")
LONGEST = {"planner": 400, "executor": 400, "tui": 400, "tests": 600}
"""Lines of a file, by the folder it is in."""
MOST_ENTRIES = 15
HEAVY = ("torch", "numpy", "rich", "textual", "accelerate", "deepspeed", "transformers", "peft")


def modules(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (PROJECT / folder).rglob("*.py"))


def dotted(path: Path) -> str:
    parts = path.relative_to(PROJECT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PLANNER = [dotted(path) for path in modules("planner") if path.stem != "__main__"]  # importing that would run it
LIGHT_EXECUTOR = [dotted(path) for path in modules("executor") if "worker" not in path.parts]


def lint_imports(folder: Path) -> subprocess.CompletedProcess[str]:
    command = [
        str(Path(sys.executable).with_name("lint-imports")),
        "--no-cache",
        "--config",
        str(folder / "pyproject.toml"),
    ]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)


def heavy_modules_after(code: str, heavy: tuple[str, ...] = HEAVY) -> set[str]:
    """Which of `heavy` a fresh interpreter has loaded after `code`."""
    done = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint(*sys.modules)"],
        cwd=PROJECT, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(heavy) & set(done.stdout.split())


def shipped(file: str) -> bool:
    """Whether a file of the project is in the wheel: under a folder that the build includes, and not ignored by git."""
    build = tomllib.loads((PROJECT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    ignored = subprocess.run(["git", "check-ignore", "-q", file], cwd=PROJECT, check=False).returncode == 0
    return (PROJECT / file).is_file() and Path(file).parts[0] in build["only-include"] and not ignored


@pytest.mark.parametrize("package", PACKAGES)
def test_a_wheel_says_that_each_of_its_packages_is_typed(package):
    assert shipped(f"{package}/py.typed")


@pytest.mark.parametrize("file", ["planner/no-such-file", "planner/build/py.typed", "tests/conftest.py"])
def test_a_file_that_is_absent_or_ignored_or_elsewhere_is_not_shipped(file):
    assert not shipped(file)


def test_every_import_contract_is_kept():
    done = lint_imports(PROJECT)

    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("planner/basics/units.py", "import executor.folder.rundir", "tui, executor, planner"),
        ("planner/spec/model.py", "import planner.figures.memory", "inside planner"),
        ("planner/basics/arith.py", "import torch", "planner is pure"),
        ("executor/measure/report.py", "import torch", "frameworks under worker only"),
    ],
)
def test_a_wrong_import_breaks_its_contract(tmp_path, module, line, contract):
    shutil.copy(PROJECT / "pyproject.toml", tmp_path)
    for package in PACKAGES:
        shutil.copytree(PROJECT / package, tmp_path / package, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / module).write_text((tmp_path / module).read_text() + f"\n{line}\n")

    done = lint_imports(tmp_path)

    assert any(line.startswith(f"{contract} BROKEN") for line in done.stdout.splitlines())


def test_the_contract_for_light_modules_names_every_part_of_the_executor_but_the_worker():
    config = tomllib.loads((PROJECT / "pyproject.toml").read_text())
    contracts = config["tool"]["importlinter"]["contracts"]
    named = next(one["source_modules"] for one in contracts if "executor.worker" in one.get("forbidden_modules", ()))

    parts = {".".join(name.split(".")[:2]) for name in LIGHT_EXECUTOR} - {"executor"}

    assert sorted(named) == sorted(parts)


@pytest.mark.parametrize("module", ["planner", "planner.cli", "executor.cli"])
def test_a_face_starts_without_anything_heavy(module):
    assert heavy_modules_after(f"import {module}") == set()


def test_no_module_but_the_worker_s_loads_anything_heavy_when_imported():
    assert heavy_modules_after(f"import {', '.join([*PLANNER, *LIGHT_EXECUTOR])}") == set()


WRITING = ("json", "hashlib", "planner.basics.tomltext", "planner.spec.inputs")
"""What serves plans and presets that are written."""


def loaded_by_an_estimate(*options: str) -> set[str]:
    asked = ["estimate", "--model", "7b", "--gpus", "32", *options]
    code = f"from planner.cli import planner\nfrom planner.basics import command\ncommand.exit_code(planner, {asked})"
    return heavy_modules_after(code, (*HEAVY, *WRITING))


def test_an_estimate_loads_nothing_heavy_and_nothing_that_only_writing_needs():
    assert loaded_by_an_estimate() == set()


def test_what_writing_needs_is_seen_where_a_plan_is_written(tmp_path):
    assert {"hashlib", "planner.spec.inputs"} <= loaded_by_an_estimate("-o", str(tmp_path / "plan.json"))


def test_a_heavy_import_would_be_seen():
    assert heavy_modules_after("import planner, numpy") == {"numpy"}


def test_every_module_opens_with_a_docstring():
    silent = [
        str(path.relative_to(PROJECT))
        for path in modules(*PACKAGES, "tests", "bench", "scripts")
        if not ast.get_docstring(ast.parse(path.read_text()))
    ]

    assert silent == []


def test_every_module_can_be_read_in_one_sitting():
    lengths = {path: len(path.read_text().splitlines()) for path in modules(*LONGEST)}

    too_long = {str(path.relative_to(PROJECT)): lines for path, lines in lengths.items() if lines > longest(path)}
    assert too_long == {}


def longest(path: Path) -> int:
    return LONGEST[path.relative_to(PROJECT).parts[0]]


@pytest.mark.parametrize("package", ["planner", "executor"])
def test_a_package_s_listing_is_seen_at_a_glance(package):
    folder = PROJECT / package
    files = [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]
    entries = sorted({path.parts[0] for path in files if "__pycache__" not in path.parts})

    assert len(entries) <= MOST_ENTRIES, entries
