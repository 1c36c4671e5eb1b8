"""What tests of several files of the planner share. Not here: fixtures of one file."""

from __future__ import annotations

from pathlib import Path

import pytest

from planner.spec import importing


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A machine on which no model can be imported, and none was. The folder of its cache."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(importing, "find_spec", lambda name: None)
    return cache
