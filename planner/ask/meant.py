"""What a question may leave out by mistake: fine-tuning of weights that nothing was learned into yet.

Asked where a layout is recommended; an estimate alone needs no checkpoint. Not here: what a plan needs to be launched
(executor/preflight/meant.py).
"""

from __future__ import annotations

from pathlib import Path

from planner.basics.errors import PlannerError
from planner.spec import TrainingJob
from planner.spec.datafile import form_of, holds_chats

FIX = "Give --checkpoint DIR, or --random-weights where that is meant"


def check_meant(job: TrainingJob) -> None:
    """Refuse adapters, and chats, on random weights, unless that was said to be meant (PlannerError)."""
    recipe = job.recipe
    if recipe.data is None or recipe.checkpoint is not None or recipe.random_weights:
        return
    path = Path(recipe.data)
    chats = path.exists() and holds_chats(path, form_of(path, "recipe.data"))
    if job.method != "full" or chats:
        what = f"{path.name} are chats" if job.method == "full" else f"{job.method} trains adapters"
        raise PlannerError("checkpoint", None, f"is missing: {what}, and there is no model to fine-tune", FIX)
