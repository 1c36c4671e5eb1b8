"""What software really does with a layout: one file an engine."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import cast

from planner.engines.base import Engine


@cache
def engine_of(name: str) -> Engine:
    """The engine of that name: its module is the engine."""
    return cast(Engine, import_module(f"planner.engines.{name.replace('-', '_')}"))
