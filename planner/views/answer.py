"""An answer whole, as `planner estimate` and the library show it: layouts side by side, the verdict, the reasons.

Not here: any figure, or the ranking of `planner recommend` (ranking.py).
"""

from __future__ import annotations

from planner.basics.display import Element, as_text
from planner.decide.answers import Answer
from planner.decide.reasons import reasons_of
from planner.views.render import REASON_COLUMNS, assumed_text, headline, layouts_table
from planner.views.verdict import verdict_text, verdicts_text


def answer_text(found: Answer) -> str:
    """`planner estimate` as text."""
    return as_text(answer_view(found))


def answer_view(found: Answer) -> list[Element]:
    """The table of strategies, why some do not fit or are not there, the recommendation, and the reasons for it."""
    parts: list[Element] = [headline(found.question), ""]
    if found.estimates:
        parts += [layouts_table(found.estimates, found.recommended), ""]
    for one in found.estimates:
        launched = one.launchable or not found.question.launching
        notes = [*one.reasons, *([] if launched else [f"cannot be launched: {one.refusal}"])]
        parts += [f"{one.name}: {note}." for note in notes]
    parts += [f"{name}: not available: {reason}." for name, reason in found.unavailable.items()]
    parts += [
        *assumed_text(found.question, found.estimates),
        *verdicts_text(found.estimates),
        *verdict_text(found),
        *why_text(found),
    ]
    return parts


def why_text(found: Answer) -> list[str]:
    """The reasons, one a line."""
    from textwrap import fill

    told = [  # an option's name stays whole
        fill(one.text, REASON_COLUMNS, initial_indent="- ", subsequent_indent="  ", break_on_hyphens=False)
        for one in reasons_of(found)
    ]
    return ["", *told] if told else []
