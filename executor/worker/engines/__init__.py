"""One adapter a framework, chosen by the plan's layout."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from executor.backends.launched import LAUNCHED

if TYPE_CHECKING:
    from executor.worker.engines.base import RankEngine
    from planner.spec.plan import Plan


_KEPT: list[RankEngine] = []
"""This rank's engines, until the process ends. A process group that loses its last reference joins gloo's threads while
it holds the interpreter's lock, for which one of them may wait: ranks were seen to hang so after their last step."""


def start_engine(plan: Plan, folder: str) -> RankEngine:
    """Start the framework the layout names; only that one is imported."""
    module, _, name = LAUNCHED[plan.layout.engine].worker.partition(":")
    _KEPT.append(getattr(import_module(module), name)(plan, folder))
    return _KEPT[-1]
