"""Claims about the installed wheel: a user's rows are replayed and fitted without the clone.

Built and installed for real, beside the packages of the environment that runs the tests. Not here: what is predicted.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from planner.calibrate.rows import append_rows
from tests.truth.published.reader import by_value, each

PROJECT = Path(__file__).resolve().parents[1]
PAGE = PROJECT / "docs" / "adding-a-measurement.md"
OWN = PROJECT / "tests" / "truth" / "own_cpu.jsonl"
OLD = PROJECT / "tests" / "executor" / "old"


def done(*command: object, cwd: Path) -> str:
    """What a command prints, which must end well; nothing of this environment is handed on."""
    ran = subprocess.run(
        [str(word) for word in command], cwd=cwd, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True,
        timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    done(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=PROJECT)
    return next(folder.glob("*.whl"))


def environment(wheel: Path, name: str) -> tuple[Path, Path]:
    """(a fresh environment that has the wheel alone, its folder of packages)."""
    fresh = wheel.parent / name
    venv.create(fresh, with_pip=False, symlinks=True)
    python = fresh / "bin" / "python"
    done(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", "--no-index", wheel, cwd=fresh)
    (packages,) = fresh.glob("lib/python*/site-packages")
    return fresh, packages


@pytest.fixture(scope="module")
def installed(wheel: Path) -> Path:
    """A fresh environment's folder of commands; packages but ours are those of this environment."""
    fresh, packages = environment(wheel, "fresh")
    python = fresh / "bin" / "python"
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    where = done(python, "-c", "import planner; print(planner.__file__)", cwd=fresh)
    assert where.startswith(str(fresh)), where
    return fresh / "bin"


@pytest.fixture(scope="module")
def bare(wheel: Path) -> Path:
    """A fresh environment's folder of commands, with the packages that the wheel itself depends on and no other."""
    fresh, packages = environment(wheel, "bare")
    for name in dependencies("meshwright"):
        for file in distribution(name).files or ():
            top = file.parts[0]
            if top != ".." and not (packages / top).exists():
                (packages / top).symlink_to(distribution(name).locate_file(top))
    return fresh / "bin"


def dependencies(name: str) -> set[str]:
    """What a distribution needs without extras, all the way down."""
    found: set[str] = set()
    todo = [name]
    while todo:
        for line in distribution(todo.pop()).requires or ():
            needed = Requirement(line)
            if (needed.marker is None or needed.marker.evaluate({"extra": ""})) and needed.name not in found:
                found.add(needed.name)
                todo.append(needed.name)
    return found


def test_without_torch_the_planner_answers_draws_and_writes_pages(bare: Path, tmp_path: Path):
    """In an environment of the wheel's own dependencies: whatever imported more would fail."""
    assert not {"torch", "textual", "transformers", "PyYAML"} & dependencies("meshwright")
    question = ["--model", "7b", "--gpus", "16"]
    planner = bare / "planner"
    assert "* recommended: fsdp" in done(planner, "estimate", *question, "--save", "page.html", cwd=tmp_path)
    done(planner, "recommend", *question, "-o", "plan.json", cwd=tmp_path)
    assert "node 1" in done(planner, "show", "plan.json", "--svg", "plan.svg", cwd=tmp_path)
    assert (tmp_path / "page.html").read_text().startswith("<!DOCTYPE html>")
    assert b"<svg" in (tmp_path / "plan.svg").read_bytes()
    assert "llama-2-7b" in done(planner, "presets", "models", cwd=tmp_path)
    assert json.loads(done(planner, "schema", "plan", cwd=tmp_path))["$schema"]
    told = "import planner; print(planner.estimate(model='7b', gpus=16).best.name)"
    assert done(bare / "python", "-c", told, cwd=tmp_path) == "fsdp\n"


def documented(folder: Path) -> Path:
    """The rows of the documentation as a file."""
    (example,) = re.findall(r"```json\n(.*?)```", PAGE.read_text(), re.DOTALL)
    path = folder / "rows.jsonl"
    path.write_text(example)
    return path


def test_the_wheel_holds_nothing_that_serves_published_rows_alone(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()

    assert {"planner/calibrate/rows.py", "planner/calibrate/predict.py", "planner/py.typed"} <= set(names)
    assert [name for name in names if re.search(r"tests/|scripts/|published/|truth/sources|\.jsonl", name)] == []


def test_rows_of_ones_own_are_replayed_by_the_installed_command(installed: Path, tmp_path: Path):
    files = [documented(tmp_path), OWN]
    answer = json.loads(done(installed / "planner", "replay", *files, "--json", cwd=tmp_path))

    assert [row["skipped"] for row in answer["rows"]] == [None] * 15
    assert sum(row["predicted"]["allocated_gib"] is not None for row in answer["rows"]) == 14


def test_rows_of_before_are_replayed_by_the_installed_command(installed: Path, tmp_path: Path):
    files = [OLD / "rows.jsonl", OLD / "rows-by-hand.jsonl"]
    answer = json.loads(done(installed / "planner", "replay", *files, "--json", cwd=tmp_path))

    assert [row["skipped"] for row in answer["rows"]] == [None] * 14


def test_rows_of_ones_own_are_a_calibration_that_the_installed_command_estimates_with(installed: Path, tmp_path: Path):
    published = tmp_path / "simumax.jsonl"  # one's own are too few for a fit: these have their plans by value too
    append_rows(published, map(by_value, each([PROJECT / "tests" / "truth" / "simumax_b200.jsonl"])))
    files = [documented(tmp_path), OWN, published]
    told = done(installed / "planner", "calibrate", *files, "-o", "mine.toml", cwd=tmp_path)
    asked = ["estimate", "--model", "tiny-llama", "--cluster", "localhost", "--gpus", "2", "--calibration", "mine.toml"]

    assert "of 54 measurements of training steps, 1 of collectives" in told
    assert "calibration mine" in done(installed / "planner", *asked, cwd=tmp_path)


def test_the_wheel_has_numbers_fitted_to_others_figures_and_the_notice_of_those(wheel: Path):
    with zipfile.ZipFile(wheel) as packed:
        names = packed.namelist()
        (notice,) = (name for name in names if name.endswith("/NOTICE"))
        told = packed.read(notice).decode()

    assert "planner/presets/kernel_times/h100-sxm-80gb.toml" in names
    assert "aiconfigurator" in told
    assert "SimuMax" in told
