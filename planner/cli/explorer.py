"""The terminal explorer, asked for through a seam: the planner never imports the package that draws it.

Not here: anything that is drawn (tui/), or any figure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any

from planner.basics.errors import PlannerError
from planner.spec.engines import find_packaged

Explorer = Callable[[Mapping[str, Any], bool], int]
"""Given options, and whether to print JSON instead of drawing -> exit code."""


def find_explorer() -> Explorer:
    """The function that draws it (PlannerError where what it draws with is not installed). It offers every engine."""
    find_packaged()
    try:
        found: Explorer = import_module("tui.entry").explore
    except ModuleNotFoundError as error:
        raise not_installed((error.name or "tui").partition(".")[0]) from None
    return found


def not_installed(package: str) -> PlannerError:
    """What to install, in one line."""
    return PlannerError(
        "explore", None, f"the package {package} is not installed", "Install it with: pip install 'meshwright[tui]'"
    )
