"""What holds for every test: nothing is downloaded, processes stay small, and folders say what a test needs.

Not here: fixtures. They stand next to the tests that use them.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FOLDER_MARKS = ("cluster", "gpu")

# Before any test module imports a framework; the processes that tests start inherit it.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.pop("MESHWRIGHT_PRESETS", None)  # the packaged presets are what is tested


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--layouts docs/accuracy/layouts.json`: tests/cluster keeps the figures of its cases there (make layouts), and
    `--combinations docs/accuracy/combinations.json` those of combinations (make combinations)."""
    parser.addoption("--layouts", type=Path, metavar="FILE", help="keep the figures of the cases that are run in FILE")
    parser.addoption(
        "--keep-measured", action="store_true", help="keep what real modules hold (tests/planner/measured.py)"
    )
    parser.addoption("--combinations", type=Path, metavar="FILE", help="keep the peaks of combinations in FILE")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark tests by folder: tests/cluster starts several processes, tests/gpu needs a GPU."""
    for item in items:
        folder = item.path.relative_to(TESTS).parts[0]
        if folder in FOLDER_MARKS:
            item.add_marker(folder)
        if folder == "gpu":
            item.add_marker(pytest.mark.skipif(not _gpu_is_here(), reason="no GPU is here"))


def _gpu_is_here() -> bool:
    # Asking torch would import it in every run of the tests.
    return Path("/proc/driver/nvidia").is_dir() or Path("/dev/kfd").exists()
