"""How a command of the planner ended. Not here: the fixture that runs one (conftest.py)."""

from __future__ import annotations

from typing import NamedTuple


class Ended(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str
