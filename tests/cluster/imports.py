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
MORE_HEADS: dict[str, Any] = {"num_attention_heads": 8, "num_key_value_heads": 4}
"""Over tensor ranks, each of which has several."""
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "arcee": MORE_HEADS,
    "cohere": MORE_HEADS,
    "gemma": MORE_HEADS,
    "glm": MORE_HEADS,
    "granite": MORE_HEADS,
    "helium": {},
    "olmo2": MORE_HEADS,
    "seed_oss": {},
    "starcoder2": MORE_HEADS,
    "smollm3": {"num_hidden_layers": 5, **MORE_HEADS},
    "llama4_text": {"num_hidden_layers": 5, "intermediate_size_mlp": 320, "num_local_experts": 4, "moe_layers": [1, 3]},
    "glm4_moe": {
        "n_routed_experts": 8, "moe_intermediate_size": 64, "first_k_dense_replace": 1, "n_group": 1, **MORE_HEADS,
    },
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
DEALT: dict[str, dict[str, Any]] = {name: ARCHITECTURES[name] for name in ("glm4_moe", "mimo_v2_flash")} | {
    "dots1": {
        "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "first_k_dense_replace": 2,
        "n_shared_experts": 1,
    },
    "flex_olmo": {"num_experts": 8, "num_experts_per_tok": 2},
    "minimax_m2": {"num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    },
}  # fmt: skip
"""Mixtures whose expert plan is described, with the sizes that are other than `SIZES`."""
TOWER = {"hidden_size": 64, "intermediate_size": 96, "num_heads": 2, "num_attention_heads": 2, "depth": 2,
         "num_hidden_layers": 2, "patch_size": 14, "image_size": 56}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [4, 6, 6]}
SEEING: dict[str, dict[str, Any]] = {
    "gemma3": {"mm_tokens_per_image": 4, "image_token_index": 500, "boi_token_index": 501, "eoi_token_index": 502},
    "internvl": {"image_token_id": 500},
    "mistral3": {"image_token_index": 500},
    "qwen2_5_vl": {"image_token_id": 500, "video_token_id": 501},
    "qwen3_vl": {"image_token_id": 500, "video_token_id": 501},
}
"""Models with a tower beside the decoder, which is of `SIZES`; they are trained on text."""
WIDER: dict[str, Any] = {"hidden_size": 512, "num_attention_heads": 16, "num_key_value_heads": 4}
"""Under FSDP2, which sends the last norm apart: calls under 1 KB are not counted."""
SPLIT = ("arcee", "cohere", "gemma", "glm", "glm4_moe", "granite", "olmo2", "smollm3", "starcoder2")
"""Those whose tensor plan is described."""
DECODERS: dict[str, dict[str, Any]] = {
    "gemma3": {"model_type": "gemma3_text", "layer_types": ["sliding_attention", "full_attention"] * 2},
    "internvl": {"model_type": "qwen2"},
    "mistral3": {"model_type": "mistral"},
    "qwen2_5_vl": {"model_type": "qwen2_5_vl_text", "rope_parameters": ROPE},
    "qwen3_vl": {"model_type": "qwen3_vl_text", "rope_parameters": ROPE},
}
TOWERS: dict[str, dict[str, Any]] = {
    "gemma3": {"model_type": "siglip_vision_model", "vision_use_head": False},
    "internvl": {"model_type": "internvl_vision", "image_size": [56, 56], "patch_size": [14, 14]},
    "mistral3": {"model_type": "pixtral", "head_dim": 32},
    "qwen2_5_vl": {"model_type": "qwen2_5_vl", "fullatt_block_indexes": [1]},
    "qwen3_vl": {"model_type": "qwen3_vl", "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
}
FORMATS: dict[Precision, tuple[str, ...]] = {
    "fp32": ("fp32",),
    "bf16": ("mixed", "adapted", "pure"),
    "pure-bf16": ("pure",),
}
"""The number formats that a run computes in, by its precision."""


def seeing(architecture: str, *, wide: bool) -> dict[str, Any]:
    """The configuration of a model with a tower."""
    text = SIZES | (WIDER if wide else {}) | DECODERS[architecture]
    tower = TOWER | TOWERS[architecture] | {"out_hidden_size": text["hidden_size"]}
    return SEEING[architecture] | {"text_config": text, "vision_config": tower}


@cache
def imported(architecture: str, precision: Precision, *, wide: bool = False) -> ModelSpec:
    """The model, with what a run in one precision asks of its description."""
    raw = seeing(architecture, wide=wide) if architecture in SEEING else SIZES | (ARCHITECTURES | DEALT)[architecture]
    raw |= {"model_type": architecture}
    formats = {name: describing.VARIANTS[name] for name in FORMATS[precision]}
    with mock.patch.object(describing, "VARIANTS", formats):
        return spec_of(architecture, raw, config_of(raw), describe(raw, ("cpu",)))


def imported_case(architecture: str, layout: Layout, job: TrainingJob, *, wide: bool = False) -> Case:
    """A case of it; adapters are on the model's own modules, and its sequences as long as it takes."""
    model = imported(architecture, job.precision, wide=wide)
    adapters = None if job.adapters is None else replace(job.adapters, targets=default_lora(model).targets)
    described = model.described
    assert described is not None
    job = replace(job, lora=adapters, seq_len=max(job.seq_len, described.shortest))
    return Case(layout, job, model, sequences=layout.micro_batch_size * layout.grad_accum * layout.data_parallel)


def refused(plan: Plan) -> str | None:
    """Why nothing launches a plan, None where something does."""
    return refusal(planner_case.Case.of(plan))
