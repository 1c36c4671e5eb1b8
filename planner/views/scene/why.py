"""Why a layout is recommended or nothing is: sentences, and what would save memory as lanes of bytes.

Not here: the rules of either (decide/reasons.py, decide/advice.py), or the words of the verdict (verdict.py).
"""

from __future__ import annotations

import msgspec

from planner.decide.advice import advice
from planner.decide.answers import Answer
from planner.decide.levers import Lever
from planner.decide.reasons import reasons_of
from planner.views.phase import typed
from planner.views.scene import Lane, stacked
from planner.views.verdict import nearest

LEFT, SAVED = "on the card then", "saved"


class Why(msgspec.Struct, frozen=True):
    """`reasons` are sentences; `ways` is a lane for each option that saves memory where nothing fits,
    named as a command line takes it, with `levers` behind them in the same order."""

    reasons: tuple[str, ...]
    ways: tuple[Lane, ...]
    levers: tuple[Lever, ...]
    capacity_bytes: float | None


def why_of(found: Answer) -> Why:
    """Why the answer is as it is."""
    levers = () if found.best is not None or not found.estimates else advice(found)
    card = nearest(found).case.cluster.gpu.memory_bytes if found.estimates else None
    return Why(tuple(one.text for one in reasons_of(found)), tuple(map(_way, levers)), levers, card)


def _way(lever: Lever) -> Lane:
    key = "estimate.memory.device_bytes"
    return stacked(typed(lever), [(LEFT, lever.device_bytes, key), (SAVED, lever.saved_bytes, key)])
