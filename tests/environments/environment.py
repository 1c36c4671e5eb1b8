"""Environments of tools whose pins collide with ours, as `make environments` makes them in .venvs/, and what their own
parsers make of folders of files.

Not here: the parsers (parse_*.py), or any claim.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
VENVS = HERE.parents[1] / ".venvs"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "DS_ACCELERATOR": "cpu"}


def program(word: str, name: str) -> Path:
    """A program of a tool's environment."""
    return VENVS / word / "bin" / name


def needs(word: str) -> pytest.MarkDecorator:
    """Skipped without the environment, with the command that makes it."""
    made = (VENVS / word / "installed.stamp").exists()
    return pytest.mark.skipif(not made, reason=f"{word} has no environment here: make environments")


def parsed(word: str, folder: Path) -> dict[str, dict[str, Any]]:
    """What a tool makes of each folder in a folder."""
    done = subprocess.run(
        [program(word, "python"), HERE / f"parse_{word}.py", folder],
        env=os.environ | OFFLINE, capture_output=True, text=True, timeout=1800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, dict[str, Any]] = json.loads((folder / "parsed.json").read_text())
    return found
