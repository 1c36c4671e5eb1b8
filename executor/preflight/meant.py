"""Omissions of a plan that may be mistakes, checked before a launch or export: weights, a tokenizer, data.

Not here: whether what it names is there and suits it (datacheck.py, checkpoint.py), or what the planner asks
(planner/ask/question.py).
"""

from __future__ import annotations

import msgspec

from planner.ask.question import FIX
from planner.basics.errors import PlannerError
from planner.spec.plan import Plan

PREFLIGHT = 3


def meant(
    plan: Plan, *, random_weights: bool = False, demo_data: bool = False, data: bool = False, exported: bool = False
) -> Plan:
    """The plan with the omissions that the user confirms. PlannerError for adapters on random weights, for a checkpoint
    beside bytes that were not asked for, and for GPUs, or files for another launcher, without data; `data` come beside
    it."""
    recipe = plan.job.recipe
    said = {name: True for name, given in (("random_weights", random_weights), ("demo_data", demo_data)) if given}
    recipe = msgspec.structs.replace(recipe, **said)
    if plan.job.adapters is not None and recipe.checkpoint is None and not recipe.random_weights:
        rule = f"is missing: {plan.job.method} trains adapters, and the plan has no model to fine-tune"
        raise PlannerError("recipe.checkpoint", None, rule, FIX, exit_code=PREFLIGHT)
    if recipe.checkpoint is not None and recipe.tokenizer is None and not (recipe.data or "").endswith(".bin"):
        rule = f"is missing: bytes as tokens are wrong for the weights of {recipe.checkpoint}"
        fix = "Make the plan again: the default is now the checkpoint's own; --tokenizer bytes keeps the built-in one"
        raise PlannerError("recipe.tokenizer", None, rule, fix, exit_code=PREFLIGHT)
    if not (recipe.data or data or recipe.demo_data) and (exported or plan.cluster.gpu.kind != "cpu"):
        rule = f"is missing: the plan would train {recipe.steps} steps of the demo's text"
        fix = "Make the plan again with --data FILE, or add --demo-data"
        raise PlannerError("recipe.data", None, rule, fix, exit_code=PREFLIGHT)
    if not said:
        return plan
    return msgspec.structs.replace(plan, job=msgspec.structs.replace(plan.job, recipe=recipe)).sealed()
