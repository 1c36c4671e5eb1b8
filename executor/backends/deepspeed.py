"""The DeepSpeed backend: ZeRO plans as a DeepSpeed configuration, and back through DeepSpeed's own parser.

Buckets and stage-3 limits come from the plan, because DeepSpeed's defaults cost gigabytes whatever the model. Not
here: training (worker/engines/deepspeed.py).
"""

from __future__ import annotations

from typing import Any

from executor.backends.common import TRAINER
from executor.backends.jsonfile import JsonBackend
from executor.backends.launched import launched_by
from planner.ask import tofile
from planner.ask.tofile.deepspeed import SHARED, ZERO_ROWS
from planner.ask.tofile.table import entries
from planner.ask.tofile.text import nested
from planner.parallelism.case import Case
from planner.parallelism.rule import Rule, one_of
from planner.spec.plan import Plan

CONFIG = "config/deepspeed.json"
TENSOR_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families that were split by AutoTP, and by Ulysses, and trained against one process."""
PIPELINE_FAMILIES = (*TENSOR_FAMILIES, "gpt2")
"""Families that were cut into stages. Others do more to embeddings than look them up (Gemma scales them, Falcon and
BLOOM add a norm or a bias)."""


def _without_tp(case: Case) -> str:
    engine = "deepspeed" if case.layout.pp == 1 else case.layout.engine
    return f"Use engine {engine} with tp=1 dp_shard={case.layout.tp * case.layout.dp_shard}"


def _without_cp(case: Case) -> str:
    return f"Use engine deepspeed with cp=1 dp_shard={case.layout.state_shards}"


RULES: tuple[Rule, ...] = (
    Rule(
        name="DeepSpeed without ZeRO",
        field="zero_stage",
        holds=lambda case: case.layout.zero_stage >= 1,
        sentence=lambda case: "stage 0 is planned, but the trainer reads its optimizer from ZeRO's",
        fix=lambda case: "Use zero_stage=1",
    ),
    *TRAINER,
    Rule(
        name="experts under DeepSpeed",
        field="model",
        holds=lambda case: case.model.moe is None,
        sentence=lambda case: f"ZeRO is not tested with mixtures of experts, and {case.model.name} is one",
        fix=lambda case: "Use engine fsdp2",
    ),
    Rule(
        name="family without a pipeline",
        field="pp",
        holds=lambda case: (case.layout.pp == 1) | (case.model.family in PIPELINE_FAMILIES),
        sentence=lambda case: f"the trainer splits {one_of(PIPELINE_FAMILIES)} into stages, not {case.model.family}",
        fix=lambda case: "Use pp=1",
    ),
    Rule(
        name="family of another tensor plan",
        field="tp",
        holds=lambda case: (case.layout.tp == 1) | (case.model.family in TENSOR_FAMILIES),
        sentence=lambda case: (
            f"AutoTP supports {one_of(TENSOR_FAMILIES)}, and {case.model.name} is a {case.model.family}"
        ),
        fix=_without_tp,
    ),
    Rule(
        name="adapters under AutoTP",
        field="method",
        # The plan names q_proj.weight, which beside an adapter is q_proj.base_layer.weight: DeepSpeed splits nothing.
        holds=lambda case: (case.layout.tp == 1) | (case.job.method == "full"),
        sentence=lambda case: "AutoTP finds no linear that an adapter has wrapped, and leaves it whole",
        fix=_without_tp,
    ),
    Rule(
        name="family not tried with Ulysses",
        field="cp",
        holds=lambda case: (case.layout.cp == 1) | (case.model.family in TENSOR_FAMILIES),
        sentence=lambda case: (
            f"Ulysses supports {one_of(TENSOR_FAMILIES)}, and {case.model.name} is a {case.model.family}"
        ),
        fix=_without_cp,
    ),
    Rule(
        name="adapters under Ulysses",
        field="method",
        holds=lambda case: (case.layout.cp == 1) | (case.job.method == "full"),
        sentence=lambda case: "Ulysses is tested with full training only",
        fix=_without_cp,
    ),
    Rule(
        name="16-bit states on the host",
        field="precision",
        # BaseOptimizer._configure_master_weights of 0.19.8 asserts DeepSpeedCPUAdam there; ours is torch's fused step.
        holds=lambda case: case.job.precision != "pure-bf16" or not case.layout.offload_optimizer,
        sentence=lambda case: (
            "DeepSpeed offloads bf16 states only with its own optimizer, which the trainer does not build"
        ),
        fix=lambda case: "Use precision=bf16, or offload_optimizer=false",
    ),
)
"""What is planned for DeepSpeed's engines, but not launched."""


SAID = (
    "micro_batch_size", "grad_accum", "max_grad_norm", *ZERO_ROWS, "offload_optimizer", "offload_params", "precision",
)  # fmt: skip
"""Fields of a plan that its file says as any script's would."""


def configuration(plan: Plan) -> dict[str, Any]:
    """The whole of deepspeed.json but its note."""
    layout, job = plan.layout, plan.job
    said = nested(entries(SHARED, tofile.values(plan), SAID))
    zero = said["zero_optimization"]
    said["zero_optimization"] = {"stage": zero["stage"], "contiguous_gradients": True} | zero
    # An offloaded step is torch's own fused one (docs/decisions/0015-fused-step-on-the-host.md).
    own_step = {"zero_force_ds_cpu_optimizer": False} if layout.offload_optimizer else {}
    split: dict[str, Any] = {
        # A tied head stays whole, as the planner has it: left to itself DeepSpeed splits it with the embedding.
        "tensor_parallel": {"autotp_size": layout.tp, "vocab_parallel_lm_head": False},
    }
    # The trainer hands DeepSpeed the groups themselves; whoever reads this file takes the size from here.
    shared = {"sequence_parallel_size": layout.cp} if layout.cp > 1 else {}
    if layout.engine == "deepspeed-pipeline":
        # Off, every tensor rank sends its neighbour the whole hidden states; nothing is gathered on the other side.
        split = {"pipeline": {"pipe_partitioned": False, "grad_partitioned": False}}
    # ZeRO sums micro-batches in bf16, as DeepSpeed does by default: with fp32 sums it takes another optimizer at
    # stage 1 (engine.py, _do_optimizer_sanity_check), the one that pipelines run anyway.
    wide = job.precision == "bf16" and layout.engine == "deepspeed-pipeline"
    sums: dict[str, Any] = {"data_types": {"grad_accum_dtype": "fp32"}} if wide else {}
    return (
        (split if layout.tp > 1 else {})
        | shared
        | sums
        | own_step
        | said
        | {
            # SGD is torch's own, elementwise on the partition; DeepSpeed asks for this word before it shards it.
            "zero_allow_untested_optimizer": job.optimizer.name != "adamw",
            "steps_per_print": 10**9,
        }
    )


class DeepSpeedBackend(JsonBackend):
    """Backend of ZeRO, alone, with AutoTP, with Ulysses and in pipelines."""

    name, title, config = "deepspeed", "DeepSpeed", CONFIG
    engines = launched_by(name)
    rules = RULES
    configuration = staticmethod(configuration)
