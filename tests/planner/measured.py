"""What real modules and optimizers held on a CPU: quick tests compare predictions with it, and the tests that import
torch measure it again.

`pytest tests/planner/test_inventory.py tests/planner/test_real_*.py --keep-measured` writes them anew.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("measured.json")
MEASURED: dict[str, dict[str, float]] = json.loads(FILE.read_text())


def keep(config: pytest.Config, name: str, found: dict[str, float]) -> None:
    """Compare with what is kept; with --keep-measured, keep it."""
    if config.getoption("--keep-measured"):
        MEASURED[name] = found
        FILE.write_text(json.dumps(dict(sorted(MEASURED.items())), indent=1) + "\n")
    assert found == pytest.approx(MEASURED[name], rel=1e-3)
