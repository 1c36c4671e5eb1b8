"""The Transformers backend: tensor parallel plans, alone or with FSDP2, as a `DistributedConfig` in JSON, and back.

The file is what `from_pretrained(distributed_config=...)` takes. Not here: training
(worker/engines/transformers_tp.py), or what the engine asks of a layout (planner/engines/transformers_tp.py).
"""

from __future__ import annotations

from typing import Any

from executor.backends.common import TRAINER
from executor.backends.jsonfile import JsonBackend
from executor.backends.launched import launched_by
from planner.parallelism.case import Case
from planner.parallelism.rule import Rule, one_of
from planner.parallelism.rules import accepts
from planner.spec.plan import Plan

CONFIG = "config/distributed.json"
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families whose tensor parallel plan in Transformers is the one that the planner knows, each trained against one
process. Of imported models the plan is part of the description (planner/parallelism/described_rules.py)."""
EXPERTS_APART = ("mixtral", "qwen3_moe")
"""Families whose experts were trained over ranks (`ep_size`), each against one process."""


def _without(case: Case) -> str:
    """The nearest layout without tensor parallel groups: their ranks shard instead."""
    copies = f" dp_replicate={case.layout.dp_replicate}" if case.layout.dp_replicate > 1 else ""
    return f"Use engine fsdp2 with tp=1{copies} dp_shard={case.layout.dp_shard * case.layout.tp}"


RULES: tuple[Rule, ...] = (
    Rule(
        name="family of another tensor plan",
        field="tp",
        holds=lambda case: (
            (case.layout.tp == 1)
            | (case.model.described is not None)
            | (case.model.family in FAMILIES and case.model.moe is None)
        ),
        sentence=lambda case: (
            f"Transformers' tensor parallelism supports {one_of(FAMILIES)}, and {case.model.name} is a "
            f"{case.model.family}" + (" with experts" if case.model.moe else "")
        ),
        fix=_without,
    ),
    Rule(
        name="experts of another family apart",
        field="ep",
        holds=lambda case: (
            (case.layout.ep == 1) | (case.model.described is not None) | (case.model.family in EXPERTS_APART)
        ),
        sentence=lambda case: f"expert parallelism supports {one_of(EXPERTS_APART)}, not {case.model.family}",
        fix=lambda case: f"Use engine fsdp2 with ep=1 dp_shard={case.layout.dp_shard}",
    ),
    accepts("method", ("full",), "split weights are launched for full training"),
    *TRAINER,
)
"""What is planned for the engine, but not launched."""


def configuration(plan: Plan) -> dict[str, Any]:
    """The fields of DistributedConfig that the plan decides; without shards bf16 is autocast's, not FSDP2's."""
    layout = plan.layout
    return {
        "tp_size": layout.tp,
        "fsdp_size": layout.dp_shard,
        "dp_replicate_size": layout.dp_replicate,
        "ep_size": layout.ep,
        "fsdp_mixed_precision": plan.job.precision == "bf16" and layout.data_parallel > 1,
    }


class TransformersBackend(JsonBackend):
    """Backend of the engine `transformers-tp`."""

    name, title, config = "transformers", "Transformers", CONFIG
    engines = launched_by(name)
    rules = RULES
    configuration = staticmethod(configuration)
