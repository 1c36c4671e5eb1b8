"""What tests of several files of the planner share. Not here: fixtures of one file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from ended import Ended

from planner.basics import command
from planner.cli import planner
from planner.spec import importing


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A machine on which no model can be imported, and none was. The folder of its cache."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(importing, "find_spec", lambda name: None)
    return cache


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """The command, as a process would end."""

    def ended(*words: str) -> Ended:
        code = command.exit_code(planner, words)
        return Ended(code, *capsys.readouterr())

    return ended
