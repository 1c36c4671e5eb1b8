"""The terminal explorer, asked for through a seam: the planner never imports the package that draws it.

Not here: anything that is drawn (tui/), or any figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any, cast

from planner.basics.errors import PlannerError

ENTRY_POINTS = "meshwright.explorers"
OWN = "tui.entry:explore"
"""Ours, by name: it works from a checkout, and reading every installed package's entry points costs 20 ms."""

Explorer = Callable[[Mapping[str, Any], bool], int]
"""Given options, and whether to print JSON instead of drawing -> exit code."""


def find_explorer() -> Explorer:
    """Ours, else the first that another package offers (PlannerError when there is none)."""
    try:
        return _load(OWN)
    except ModuleNotFoundError as error:
        from importlib.metadata import entry_points

        for point in entry_points(group=ENTRY_POINTS):
            if point.value != OWN:
                return _load(point.value)
        raise not_installed((error.name or OWN).partition(".")[0]) from None


def not_installed(package: str) -> PlannerError:
    """What to install, in one line."""
    return PlannerError(
        "explore", None, f"the package {package} is not installed", "Install it with: pip install 'meshwright[tui]'"
    )


def _load(place: str) -> Explorer:
    module, _, attribute = place.partition(":")
    return cast(Explorer, getattr(import_module(module), attribute))
