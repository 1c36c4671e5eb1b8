"""Answers of the commands that ask many times, as text for people: one file an answer.

Not here: any figure, or the tables of one answer (render.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.decide.answers import Estimate  # the explorer paints bars before it knows an estimate
    from planner.spec import Runtime


def software_text(runtimes: Iterable[Runtime]) -> str:
    """The versions that the figures of these runtimes describe; nothing without any."""
    found = dict.fromkeys(part for one in runtimes for part in one.described.split(", "))
    return f"As of {', '.join(found)}." if found else ""


def strategy_text(one: Estimate) -> str:
    """The strategy's name; an adapter method stands before it, as in the table of strategies."""
    method = one.case.job.method
    return one.strategy if method == "full" else f"{method} ({one.strategy})"


def plan_only(one: Estimate) -> str:
    """Why nothing here launches a layout, as a note of it."""
    return f"plan only: {one.refusal}"


def plan_only_text(shown: Iterable[Estimate]) -> list[str]:
    """A sentence for each layout that nothing here launches."""
    return list(dict.fromkeys(f"{strategy_text(one)}: {plan_only(one)}." for one in shown if not one.launchable))
