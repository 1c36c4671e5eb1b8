"""The backend of tensor parallel plans under `executor measure`: no framework's file, since none starts them.

It is no entry point: `executor run` refuses such plans still, since a run of them is not tested as training. Not
here: the engine (executor/worker/engines/transformers_tp.py).
"""

from __future__ import annotations

from planner.plan import Plan

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose plan in Transformers is the one that the planner knows."""


class TransformersBackend:
    """Transformers' tensor parallel plan, with FSDP2 over the other ranks."""

    name = "transformers"
    engine = "transformers-tp"

    def refusal(self, plan: Plan) -> str | None:
        """Why it cannot be measured, or None."""
        if plan.layout.engine != self.engine:
            return f"engine {plan.layout.engine} is not {self.engine}"
        if plan.model.family not in FAMILIES:
            return f"family {plan.model.family} is not one of {', '.join(FAMILIES)}"
        if plan.model.tied:
            return "Transformers splits a tied head only while it loads a checkpoint"
        if plan.job.method != "full":
            return "adapters beside split weights are not built"
        if plan.model.moe is not None:
            return "experts beside split weights are not built"
        return None

    def files(self, plan: Plan) -> dict[str, str]:
        """None: the engine reads the plan."""
        return {}

    def drift(self, plan: Plan, folder: str) -> list[str]:
        """Nothing is written that could be read otherwise."""
        return []

    def environment(self, plan: Plan, folder: str) -> dict[str, str]:
        """Nothing."""
        return {}
