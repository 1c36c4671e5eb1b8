"""What to look for: the fastest layout, the fewest GPUs, the largest context or the largest micro-batch.

All but the first change the question to the extreme that still fits (fit.py), and recommend for that. Not here: the
search for that extreme, or the ranking.
"""

from __future__ import annotations

from typing import Any

import msgspec

from planner.ask.question import Question
from planner.basics.errors import PlannerError
from planner.basics.progress import Cancelled
from planner.decide.answers import FREE, Answer, Constraints
from planner.decide.recommendation import among_methods, recommend
from planner.studies.fit import FitLimit, fit
from planner.studies.reply import Resize

QUANTITIES = {"fewest-gpus": "gpus", "largest-context": "seq-len", "largest-micro-batch": "micro-batch"}
OBJECTIVES = ("fastest", *QUANTITIES)


class Reached(msgspec.Struct, frozen=True):
    """The recommendation of the question as the objective changed it, and what it found (None: just the fastest)."""

    objective: str
    found: Answer
    fitted: FitLimit | None = None


def reach(
    objective: str,
    question: Question,
    resize: Resize,
    *,
    top: int = 3,
    constraints: Constraints = FREE,
    front: int = 0,
    max_gpus: int = 1024,
) -> Reached:
    """The best layouts by an objective; the number of GPUs changes through `resize`, up to `max_gpus`."""
    if objective not in QUANTITIES:
        return Reached(objective, among_methods(question, top, constraints, front=front))
    quantity = QUANTITIES[objective]
    fits = fit(question, resize, [quantity], max_gpus=max_gpus, constraints=constraints, size_option="--gpus")
    if not fits.found:
        name = quantity.replace("-", "_") + ("_size" if quantity == "micro-batch" else "")
        raise PlannerError(name, None, f"is what {objective} looks for, but {fits.fixed[quantity]}", "Leave it out")
    fitted = fits.found[0]
    adapted = _adapted(question, resize, fitted, max_gpus)
    try:
        if not fitted.interrupted or fitted.best is None:
            return Reached(objective, recommend(adapted, top, constraints, front=front), fitted)
    except Cancelled:  # before it found again what the edge has shown
        if fitted.best is None:
            raise
    found = Answer(question=adapted, estimates=(fitted.best,), recommended=0, interrupted=True)
    return Reached(objective, found, fitted)


def _adapted(question: Question, resize: Resize, fitted: FitLimit, max_gpus: int) -> Question:
    """The question at the value found; where nothing fits, at the easiest value, whose best is the nearest to it."""
    if fitted.quantity == "gpus":
        return resize(max_gpus if fitted.value is None else fitted.value)
    if fitted.value is None and fitted.beyond is None:
        return question
    value = fitted.beyond if fitted.value is None else fitted.value
    if fitted.quantity == "seq-len":
        job = msgspec.structs.replace(question.job, seq_len=value)
        return msgspec.structs.replace(question, job=job)
    return msgspec.structs.replace(question, pins=msgspec.structs.replace(question.pins, micro_batch_size=value))


def as_json_object(reached: Reached) -> dict[str, Any]:
    """Under "objective" in recommend/1."""
    fitted = reached.fitted
    return {"name": reached.objective} | (
        {}
        if fitted is None
        else {"quantity": fitted.quantity, "value": fitted.value, "beyond": fitted.beyond, "limit": fitted.limit}
    )
