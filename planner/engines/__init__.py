"""What software really does with a layout: one file an engine."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, cast

from planner.spec.engines import PACKAGED

if TYPE_CHECKING:
    from planner.engines.base import Engine


@cache
def engine_of(name: str) -> Engine:
    """The engine of that name."""
    place = PACKAGED[name].code if name in PACKAGED else f"planner.engines.{name.replace('-', '_')}:ENGINE"
    module, _, attribute = place.partition(":")
    return cast("Engine", getattr(import_module(module), attribute))
