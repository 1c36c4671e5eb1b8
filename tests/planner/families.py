"""A small model of every family, and what one process holds of it.

Not here: the claims (test_families.py, test_real_modules.py).
"""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from planner.inventory import Moment, Stage, layer_runs, unit_weights
from planner.spec import Mla, ModelSpec, Moe
from planner.spec.model_rules import check_model

BATCH, SEQ = 3, 40

PLAIN: dict[str, Any] = {
    "name": "small",
    "layers": 4,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "head_dim": 16,
    "ffn": 160,
    "vocab": 384,
    "max_seq_len": 128,
}
LAYERNORM = {"norm": "layernorm", "gated": False}
BIASES = {"qkv_bias": True, "output_bias": True, "mlp_bias": True}
GPT2 = {"kv_heads": 4, "tied": True, "activation": "gelu_new", "positions": "learned", **LAYERNORM, **BIASES}
SANDWICH = {
    "block": "sandwich",
    "layer_norms": 4,
    "activation": "gelu_pytorch_tanh",
    "tied": True,
    "sliding_window": 256,
    "query_scale": 16.0,
}
FALCON = {"block": "parallel", "tied": True, "activation": "gelu", **LAYERNORM}
# Queries as wide as values, so that the CPU's fused kernel takes them.
LATENT = Mla(q_lora_rank=24, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=24)
EXPERTS = Moe(experts=8, top_k=2, expert_ffn=48)

SMALL: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"qkv_bias": True},
    "qwen3": {"qk_norm": True, "head_dim": 24},
    "gpt2": GPT2,
    "gpt2 with dropout": {**GPT2, "dropout": 0.1},
    "gpt2 with its own dropouts": {**GPT2, "dropout": 0.1, "attention_dropout": 0.1},
    "gpt_neox": {
        "kv_heads": 4, "block": "parallel", "activation": "gelu", "rotary_fraction": 0.25, **LAYERNORM, **BIASES,
    },
    "phi": {
        "block": "parallel", "layer_norms": 1, "activation": "gelu_new", "head_bias": True, "rotary_fraction": 0.5,
        "dropout": 0.1, **LAYERNORM, **BIASES,
    },
    "phi3": {},
    "opt": {**GPT2, "activation": "relu", "dropout": 0.1},
    "bloom": {
        **GPT2, "activation": "gelu_pytorch_tanh", "positions": "alibi", "embedding_norm": True, "ffn": 256,
    },
    "falcon": {"kv_heads": 1, "layer_norms": 1, **FALCON},
    "falcon with groups": {"kv_heads": 2, "layer_norms": 2, **FALCON},
    "gemma2": {**SANDWICH, "full_attention_every": 2, "attention_soft_cap": 50.0, "logit_soft_cap": 30.0},
    "gemma3_text": {**SANDWICH, "full_attention_every": 6, "qk_norm": True, "rope_theta_local": 1e4},
    "mixtral": {"moe": Moe(experts=8, top_k=2, expert_ffn=160)},
    "qwen3_moe": {"qk_norm": True, "moe": EXPERTS},
    "gpt_oss": {
        "ffn": 48, "qkv_bias": True, "output_bias": True, "attention_sinks": True, "sliding_window": 128,
        "full_attention_every": 2, "moe": replace(EXPERTS, bias=True),
    },
    "deepseek_v2": {
        "kv_heads": 4, "head_dim": 24, "mla": LATENT, "moe": replace(EXPERTS, shared_experts=2, normalised=False),
    },
    "deepseek_v3": {
        "kv_heads": 4, "head_dim": 24, "mla": LATENT,
        "moe": replace(EXPERTS, shared_experts=1, groups=2, top_groups=1, scale=2.5),
    },
    "deepseek_v3 with a dense layer": {
        "kv_heads": 4, "head_dim": 24, "mla": LATENT,
        "moe": replace(EXPERTS, shared_experts=1, dense_layers=1, groups=2, top_groups=1, scale=2.5),
    },
}  # fmt: skip


def whole_model(model: ModelSpec) -> Stage:
    """The only stage of a model that is not cut."""
    return Stage(True, True, tuple(run for run in layer_runs(model) if run[1]))


def small(name: str) -> ModelSpec:
    spec = ModelSpec(**{**PLAIN, "family": name.split()[0], **SMALL[name]})
    check_model(spec, name)
    return spec


def bytes_at(moment: Moment, spec: ModelSpec, element_bytes: int = 4) -> float:
    """Live bytes of the walk and of the gradients made so far, as one process without any engine holds them."""
    elements = {unit: sum(weight.elements for weight in weights) for unit, weights in unit_weights(spec).items()}
    grads = 0
    if moment.phase == "backward" and moment.unit != "loss":
        grads = moment.unit_grads + moment.in_flight
        if moment.unit != "tail":
            done = range(max(moment.layer + 1, 0), spec.layers)
            grads += elements["tail"]
            grads += sum(elements["dense" if layer < spec.dense_layers else "layer"] for layer in done)
    return float(sum(size.at(BATCH, SEQ) for size in moment.live)) + grads * element_bytes
