"""Answers of the commands that ask many times, as text for people: one file an answer.

Not here: any figure, or the tables of one answer (render.py).
"""

from __future__ import annotations

from planner.decide.answers import Estimate


def strategy_text(one: Estimate) -> str:
    """The strategy's name; an adapter method stands before it, as in the table of strategies."""
    method = one.case.job.method
    return one.strategy if method == "full" else f"{method} ({one.strategy})"
