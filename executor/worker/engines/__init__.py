"""One adapter a framework, chosen by the plan's layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from executor.worker.engines.base import Engine
    from planner.plan import Plan


_KEPT: list[Engine] = []
"""This rank's engines, until the process ends. A process group that loses its last reference joins gloo's threads while
it holds the interpreter's lock, for which one of them may wait: ranks were seen to hang so after their last step."""


def start_engine(plan: Plan, folder: str) -> Engine:
    """Start the framework the layout names; only that one is imported."""
    _KEPT.append(_started(plan, folder))
    return _KEPT[-1]


def _started(plan: Plan, folder: str) -> Engine:
    if plan.layout.engine == "deepspeed":
        from executor.worker.engines.deepspeed import DeepSpeedEngine

        return DeepSpeedEngine(plan, folder)
    if plan.layout.engine == "deepspeed-pipeline":
        from executor.worker.engines.deepspeed_pipeline import DeepSpeedPipelineEngine

        return DeepSpeedPipelineEngine(plan, folder)
    if plan.layout.engine == "deepspeed-autotp":
        from executor.worker.engines.deepspeed_autotp import DeepSpeedAutoTpEngine

        return DeepSpeedAutoTpEngine(plan, folder)
    if plan.layout.engine == "deepspeed-ulysses":
        from executor.worker.engines.deepspeed_ulysses import DeepSpeedUlyssesEngine

        return DeepSpeedUlyssesEngine(plan, folder)
    if plan.layout.engine == "transformers-tp":
        from executor.worker.engines.transformers_tp import TransformersTpEngine

        return TransformersTpEngine(plan, folder)
    from executor.worker.engines.accelerate import DdpEngine, Fsdp2Engine, SingleEngine

    if plan.layout.engine == "single":
        return SingleEngine(plan, folder)
    return DdpEngine(plan, folder) if plan.layout.engine == "ddp" else Fsdp2Engine(plan, folder)
