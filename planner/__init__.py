"""Plan distributed training: will it fit, how to split it, how fast will it be.

What is named here is the library (docs/library.md). It is imported when it is first asked for, since start time counts.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.studies.api import Answer as Answer
    from planner.studies.api import Estimate as Estimate
    from planner.studies.api import Explanation as Explanation
    from planner.studies.api import Plan as Plan
    from planner.studies.api import PlannerError as PlannerError
    from planner.studies.api import estimate as estimate
    from planner.studies.api import explain as explain
    from planner.studies.api import plan_of as plan_of
    from planner.studies.api import read_plan as read_plan
    from planner.studies.api import recommend as recommend
    from planner.studies.api import write_plan as write_plan

__version__ = "0.1.0"
__all__ = [
    "Answer", "Estimate", "Explanation", "Plan", "PlannerError", "estimate", "explain", "plan_of",
    "read_plan", "recommend", "write_plan",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """A name of the library, from planner/studies/api.py."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("planner.studies.api"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
