"""Fixtures of several files: agents that are scripts, and hosts that answer in this process.

Not here: the script (scripted.py) or the hosts (answering.py) themselves.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from answering import Here, Said, Says, Written
from scripted import Agents

from executor.hosts import ssh
from planner.ask import launchable


@pytest.fixture
def agents(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Agents]:
    """Agents of this test's launches are the script."""
    monkeypatch.setitem(launchable.OWN, "plain", "scripted:Plain")
    made = Agents(tmp_path)
    monkeypatch.setattr(sys, "executable", str(made.script))
    yield made


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> Callable[[Says], list[tuple[int, Said]]]:
    """Has every host answer by a function; returns the launcher's messages, each with the place of its host."""

    def let(says: Says) -> list[tuple[int, Said]]:
        told: list[tuple[int, Said]] = []
        made = type("Made", (Written,), {"says": staticmethod(says), "told": told, "gone": set()})
        monkeypatch.setattr(ssh, "Session", made)
        return told

    return let


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[bool], None]:
    """Lets this process be the host of a run, which has the launcher's disk or has not."""
    monkeypatch.chdir(tmp_path)  # a node goes to its folder

    def let(sees: bool) -> None:
        monkeypatch.setattr(ssh, "Session", type("Seen", (Here,), {"sees": sees}))

    return let
