"""Small imported models of architectures that no branch describes, and plans of them over two ranks or more.

Not here: runs, or any claim (test_imported.py, test_imported_training.py).
"""

from __future__ import annotations

from functools import cache
from typing import Any
from unittest import mock

from cases import Case
from combinations import refusal
from msgspec.structs import replace

from executor.worker.imported import describe as describing
from executor.worker.imported.describe import config_of, describe
from executor.worker.imported.facts import spec_of
from planner.inventory.units import default_lora
from planner.parallelism import case as planner_case
from planner.spec import Layout, ModelSpec, TrainingJob
from planner.spec.job import Precision
from planner.spec.plan import Plan

SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "head_dim": 32,
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 32}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "arcee": {},
    "cohere": {},
    "gemma": {},
    "glm": {},
    "granite": {},
    "helium": {},
    "olmo2": {},
    "seed_oss": {},
    "starcoder2": {},
    "smollm3": {"num_hidden_layers": 5},
    "llama4_text": {"num_hidden_layers": 5, "intermediate_size_mlp": 320, "num_local_experts": 4, "moe_layers": [1, 3]},
    "glm4_moe": {"n_routed_experts": 8, "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_group": 1},
    "mimo_v2_flash": {"n_routed_experts": 8, "moe_intermediate_size": 64},
    "apertus": {},
    "mamba2": {"num_heads": 8, "state_size": 16, "n_groups": 1, "chunk_size": 32},
    "bamba": {"attn_layer_indices": [2], **MAMBA},
    "falcon_h1": {"mamba_d_ssm": 128, **MAMBA, "mamba_n_heads": 4},
    "granitemoehybrid": {
        "layer_types": ["mamba", "mamba", "attention", "mamba"], "num_local_experts": 4, "num_experts_per_tok": 2,
        "shared_intermediate_size": 128, **MAMBA,
    },
    "qwen3_next": {
        "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 32, "linear_value_head_dim": 32,
    },
}  # fmt: skip
"""With the sizes that are other than `SIZES`."""
SLOW = ("bamba", "falcon_h1", "granitemoehybrid", "mamba2", "qwen3_next")
"""Those whose import takes longest: chunks of a sequence."""
MIXTURES = ("glm4_moe", "granitemoehybrid", "llama4_text", "mimo_v2_flash", "qwen3_next")
"""Those that no ZeRO is launched with, and whose experts bitsandbytes does not pack."""
FORMATS: dict[Precision, tuple[str, ...]] = {
    "fp32": ("fp32",),
    "bf16": ("mixed", "adapted", "pure"),
    "pure-bf16": ("pure",),
}
"""The number formats that a run computes in, by its precision."""


@cache
def imported(architecture: str, precision: Precision) -> ModelSpec:
    """The model, with what a run in one precision asks of its description."""
    raw = SIZES | ARCHITECTURES[architecture] | {"model_type": architecture}
    formats = {name: describing.VARIANTS[name] for name in FORMATS[precision]}
    with mock.patch.object(describing, "VARIANTS", formats):
        return spec_of(architecture, raw, config_of(raw), describe(raw, ("cpu",)))


def imported_case(architecture: str, layout: Layout, job: TrainingJob) -> Case:
    """A case of it; adapters are on the model's own modules, and its sequences as long as it takes."""
    model = imported(architecture, job.precision)
    adapters = None if job.adapters is None else replace(job.adapters, targets=default_lora(model).targets)
    described = model.described
    assert described is not None
    job = replace(job, lora=adapters, seq_len=max(job.seq_len, described.shortest))
    return Case(layout, job, model, sequences=layout.micro_batch_size * layout.grad_accum * layout.data_parallel)


def refused(plan: Plan) -> str | None:
    """Why nothing launches a plan, None where something does."""
    return refusal(planner_case.Case.of(plan))
