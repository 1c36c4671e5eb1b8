"""What software really does with a layout: one file an engine."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from planner.engines.base import Engine


@cache
def engine_of(name: str) -> Engine:
    """The engine of that name."""
    return cast("Engine", import_module(f"planner.engines.{name.replace('-', '_')}").ENGINE)
