"""A copy of the project with a patch of tests/patches, asked in one process.

Not here: any claim.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parents[2]


def answers_of(patch: str, code: str, copy: Path) -> dict[str, Any]:
    """The JSON object that `code` prints where the patch is applied to a copy of the project's packages."""
    for package in ("planner", "executor", "tui", "presets", "scripts"):
        shutil.copytree(PROJECT / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    subprocess.run(["git", "apply", str(PROJECT / "tests/patches" / patch)], cwd=copy, check=True, timeout=60)
    there = os.environ | {"PYTHONPATH": str(copy), "COLUMNS": "110"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=copy, env=there, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
