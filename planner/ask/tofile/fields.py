"""What a plan says, field by field, under the names of the planner's options: as it is read back of a file, so that an
engine's own choice and the same choice said by name are one value.

Not here: which format says which field (a module a format), or what the options mean (planner/spec/options.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from planner.engines import engine_of
from planner.engines.common import allgather_bucket_elements, implementation, reduce_bucket_elements
from planner.engines.deepspeed_common import configured_elements
from planner.inventory.optimizers import BLOCKS_TORCHAO, STEPPED_BY_TORCH
from planner.parallelism.case import Case
from planner.spec import Layout, TrainingJob
from planner.spec.engines import ENGINES
from planner.spec.job import Lora, Optimizer, Quantization, Recipe
from planner.spec.options import OF_AXIS, TABLE, Option, reads
from planner.spec.plan import Plan

Values = Mapping[str, Any]
"""Fields of a plan by name; one that its engine does not read, or that means nothing in it, is absent."""

PARTS = ("job", "lora", "quantization", "optimizer", "layout", "recipe")
"""Values of a plan whose fields are options."""
OF_THE_RUN = ("steps", "max_grad_norm", "seed")
"""Of the recipe's fields those that formats have a key for, and that are no path and no schedule of our trainer."""
FIELDS: tuple[str, ...] = (
    "model", "gpus", "nodes", "engine", "runtime", "seq_len", "mean_seq_len",
    *(one.name for one in TABLE if one.part in PARTS and (one.part != "recipe" or one.name in OF_THE_RUN)),
    "lora_targets", "modules_to_save",
)  # fmt: skip
"""Everything that a plan says and a format may say."""
BUCKETS = {"reduce_bucket_elements": reduce_bucket_elements, "allgather_bucket_elements": allgather_bucket_elements}
OF_ADAPTERS = ("lora", "quantization")


def values_of(plan: Plan | Case) -> dict[str, Any]:
    """The fields of a plan, or of what may become one, that mean something in it."""
    job, layout, case = plan.job, plan.layout, plan if isinstance(plan, Case) else Case.of(plan)
    found: dict[str, Any] = {
        "model": plan.model.name,
        "gpus": layout.world_size,
        "nodes": plan.cluster.nodes,
        "engine": layout.engine,
        "runtime": plan.runtime.name,
        "seq_len": job.seq_len,
        "mean_seq_len": job.mean_seq_len,
    }
    of = {
        "job": job, "layout": layout, "optimizer": job.optimizer, "recipe": job.recipe,
        "lora": job.adapters, "quantization": job.base_quantization,
    }  # fmt: skip
    for one in TABLE:
        if one.name in FIELDS and one.part in PARTS and of[one.part] is not None and _means_something(one, layout):
            found[one.name] = getattr(of[one.part], one.field or one.name)
    if job.adapters is not None:
        found |= {"lora_targets": job.adapters.targets, "modules_to_save": job.adapters.modules_to_save}
    return found | _effective(case, found)


def _means_something(one: Option, layout: Layout) -> bool:
    """Whether an engine reads a field and its axis is split."""
    facts, axis = layout.facts, OF_AXIS.get(one.name)
    if axis is not None and getattr(layout, axis) == 1:
        return False
    if one.name == "reshard_after_forward":
        return len(facts.reshard) > 1
    if one.name.startswith("zero3_"):
        return layout.engine.startswith("deepspeed") and layout.zero_stage == 3
    if one.name == "pp_schedule":
        return layout.pp > 1
    return one.part != "layout" or reads(layout.engine, one.name)


def _effective(case: Case, found: Values) -> dict[str, Any]:
    """What an engine makes of fields that are left to it."""
    job, layout, facts = case.job, case.layout, case.layout.facts
    made: dict[str, Any] = {"global_batch_size": layout.global_batch_size, "image_tokens": job.image_tokens}
    if layout.pp > 1:
        made["stage_layers"] = layout.layers_by_stage(case.model.layers)
    if "reduce_bucket_elements" in found:
        elements = int(configured_elements(case))
        made |= {name: int(sized(layout, elements)) for name, sized in BUCKETS.items()}
    torchs = job.optimizer.name in STEPPED_BY_TORCH and not engine_of(layout.engine).own_step
    made["optimizer_implementation"] = implementation(case) if torchs else None
    if job.optimizer.name in BLOCKS_TORCHAO:
        made["state_block"] = job.optimizer.state_block or BLOCKS_TORCHAO[job.optimizer.name]
    if facts.chooses_loss:
        made["loss"] = layout.loss or ("whole" if case.runtime.parts.loss in WHOLE else None)
    if layout.compile == "none" and not case.runtime.parts.compiled:
        made["compile"] = None
    return made


WHOLE = ("eager-fp32", "eager")
"""Losses of kernels that compute whole logits, as `--loss whole` does."""


@cache
def at_rest() -> Values:
    """The value of each field where nothing is asked for."""
    plain = {
        "job": TrainingJob(), "layout": Layout(engine="fsdp2"), "optimizer": Optimizer(), "lora": Lora(),
        "quantization": Quantization(), "recipe": Recipe(),
    }  # fmt: skip
    found = {
        one.name: getattr(plain[one.part], one.field or one.name)
        for one in TABLE
        if one.name in FIELDS and one.part in PARTS
    }
    return {**found, "mean_seq_len": None, "modules_to_save": (), "image_tokens": 0, "loss": "whole"}


def implied(values: Values) -> frozenset[str]:
    """Fields that follow from others: groups of data-parallel ranks where the engine has one kind, the product of batch
    sizes, and stages of engines with one."""
    facts = ENGINES[values["engine"]]
    found = {"global_batch_size", "dp_shard"}
    if facts.copies != "any":
        found.add("dp_replicate")
    if len(facts.zero_stages) == 1:
        found.add("zero_stage")
    return frozenset(found)


def told(value: Any) -> str:
    """A value as a sentence has it."""
    if isinstance(value, tuple):
        return ",".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)
