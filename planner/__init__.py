"""Plan distributed training: will it fit, how to split it, how fast will it be.

What is named here is the library (docs/library.md). It is imported when it is first asked for, since start time counts.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.views.library import Answer as Answer
    from planner.views.library import Comparison as Comparison
    from planner.views.library import Cost as Cost
    from planner.views.library import Decision as Decision
    from planner.views.library import Estimate as Estimate
    from planner.views.library import Explanation as Explanation
    from planner.views.library import FitLimits as FitLimits
    from planner.views.library import Plan as Plan
    from planner.views.library import PlannerError as PlannerError
    from planner.views.library import Sweep as Sweep
    from planner.views.library import compare as compare
    from planner.views.library import cost as cost
    from planner.views.library import estimate as estimate
    from planner.views.library import explain as explain
    from planner.views.library import fit as fit
    from planner.views.library import plan_of as plan_of
    from planner.views.library import read_plan as read_plan
    from planner.views.library import recommend as recommend
    from planner.views.library import sweep as sweep
    from planner.views.library import write_plan as write_plan

__version__ = "0.1.0"
__all__ = [
    "Answer", "Comparison", "Cost", "Decision", "Estimate", "Explanation", "FitLimits", "Plan", "PlannerError", "Sweep",
    "compare", "cost", "estimate", "explain", "fit", "plan_of", "read_plan", "recommend", "sweep", "write_plan",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """A name of the library, from planner/views/library.py."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module("planner.views.library"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
