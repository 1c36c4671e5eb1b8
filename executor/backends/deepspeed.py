"""The DeepSpeed backend: ZeRO plans as a DeepSpeed configuration, and back through DeepSpeed's own parser.

Buckets and stage-3 limits come from the plan, because DeepSpeed's defaults cost gigabytes whatever the model. Not
here: training (worker/engines/deepspeed.py).
"""

from __future__ import annotations

import json
from typing import Any

from executor.backends.common import common_refusal, read_back
from planner.engines.buckets import allgather_bucket_elements, reduce_bucket_elements
from planner.errors import PlannerError
from planner.inventory import parameters
from planner.plan import Plan

CONFIG = "config/deepspeed.json"


class DeepSpeedBackend:
    """Backend of the engine `deepspeed`."""

    name = "deepspeed"

    def refusal(self, plan: Plan) -> str | None:
        """Why DeepSpeed cannot run the plan, or None."""
        layout = plan.layout
        if layout.engine != "deepspeed":
            return f"engine {layout.engine} is not DeepSpeed's"
        if layout.zero_stage == 0:
            return "zero_stage 0 under DeepSpeed shards nothing; use engine ddp, or zero_stage 1 to 3"
        if layout.dp_replicate != 1:
            return "ZeRO shards over all data-parallel ranks: dp_replicate must be 1 (engine fsdp2 has HSDP)"
        return common_refusal(plan)

    def files(self, plan: Plan) -> dict[str, str]:
        """deepspeed.json. JSON has no comments: the plan's hash stands in the key `_generated`."""
        note = f"from plan {plan.sealed().content_hash}; do not edit"
        return {CONFIG: json.dumps({"_generated": note} | configuration(plan), indent=2) + "\n"}

    def drift(self, plan: Plan, folder: str) -> list[str]:
        """What DeepSpeed's parser makes of the file that the plan does not say."""
        found = read_back("deepspeed", folder, CONFIG)
        if "error" in found:
            return [f"{CONFIG}: DeepSpeed cannot read it: {found['error']}"]
        expected = configuration(plan)
        extra = sorted(set(found["keys"]) - set(_keys(expected)) - {"_generated"})
        differences = [f"{CONFIG}: {key} is set, the plan does not set it" for key in extra]
        return differences + _differences(expected, found["effective"], "")

    def environment(self, plan: Plan, folder: str) -> dict[str, str]:
        """Nothing: DeepSpeed is configured by its file alone, which must parse."""
        found = read_back("deepspeed", folder, CONFIG)
        if "error" in found:
            raise PlannerError(
                CONFIG, None, f"DeepSpeed cannot read it: {found['error']}", "Make the run folder again", exit_code=4
            )
        return {}


def configuration(plan: Plan) -> dict[str, Any]:
    """The whole of deepspeed.json but its note."""
    layout, job = plan.layout, plan.job
    elements = parameters(plan.model, job.adapters, trainable=True)
    zero: dict[str, Any] = {
        "stage": layout.zero_stage,
        "contiguous_gradients": True,
        "overlap_comm": layout.overlap_comm,
        "reduce_bucket_size": reduce_bucket_elements(layout, elements),
        "allgather_bucket_size": allgather_bucket_elements(layout, elements),
    }
    if layout.zero_stage == 3:
        zero |= {
            "stage3_prefetch_bucket_size": layout.zero3_prefetch_elements,
            "stage3_param_persistence_threshold": layout.zero3_persistence_elements,
            "stage3_max_live_parameters": layout.zero3_max_live_elements,
            "stage3_max_reuse_distance": layout.zero3_max_reuse_elements,
        }
    pure = job.precision == "pure-bf16"
    return {
        "train_micro_batch_size_per_gpu": layout.micro_batch_size,
        "gradient_accumulation_steps": layout.grad_accum,
        "gradient_clipping": job.recipe.max_grad_norm,
        "zero_optimization": zero,
        "bf16": {
            "enabled": job.precision != "fp32",
            "bf16_master_weights_and_grads": pure,
            "bf16_optimizer_states": pure,
        },
        # SGD is torch's own, elementwise on the partition; DeepSpeed asks for this word before it shards it.
        "zero_allow_untested_optimizer": job.optimizer.name != "adamw",
        "steps_per_print": 10**9,
    }


def _keys(section: dict[str, Any], prefix: str = "") -> list[str]:
    nested = [
        name for key, value in section.items() if isinstance(value, dict) for name in _keys(value, f"{prefix}{key}.")
    ]
    return [prefix + key for key in section] + nested


def _differences(expected: dict[str, Any], effective: dict[str, Any], prefix: str) -> list[str]:
    found: list[str] = []
    for key, value in expected.items():
        if isinstance(value, dict):
            found += _differences(value, effective.get(key, {}), f"{prefix}{key}.")
        elif effective.get(key) != value:
            found.append(f"{CONFIG}: {prefix}{key} is {effective.get(key, 'unset')}, the plan says {value}")
    return found
