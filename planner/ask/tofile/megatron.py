"""Megatron-LM's flags of a plan, the model's sizes among them, for pretrain_gpt.py.

Flags: Megatron-LM d98e8a64 (megatron/training/arguments.py and the dataclasses of its argument groups). Not here: data,
tokenizers and checkpoints, which are the person's own.
"""

from __future__ import annotations

from typing import Any

from planner.ask.fromfile import megatron as reader
from planner.ask.tofile.fields import Values
from planner.ask.tofile.table import (
    Entries,
    FieldKeys,
    FileOfFormat,
    above,
    flag,
    follows,
    forms,
    inverted,
    keys_of,
    words,
)
from planner.spec import ModelSpec
from planner.spec.layout import even_split

NAME = reader.NAME
FILE = "megatron.sh"
ENGINES = ("megatron",)
SCRIPT = "pretrain_gpt.py"

_HYBRID = {"bf16": True, "fp8-format": "hybrid"}
PRECISION: dict[str, Entries] = {
    "fp32": {},
    "bf16": {"bf16": True},
    "fp16": {"fp16": True},
    **{precision: _HYBRID | {"fp8-recipe": recipe} for recipe, precision in reader.RECIPES.items()},
    "nvfp4": {"bf16": True, "fp4-format": "e2m1", "fp4-recipe": "nvfp4"},
}
RECOMPUTE: dict[str, Entries] = {
    "none": {},
    "attention": {"recompute-granularity": "selective", "recompute-modules": ["core_attn"]},
    "full": {"recompute-granularity": "full", "recompute-method": "uniform", "recompute-num-layers": 1},
}
_FLEX = {"moe-token-dispatcher-type": "flex"}
DISPATCHERS: dict[str, Entries] = {
    "alltoall": {"moe-token-dispatcher-type": "alltoall"},
    **{name: _FLEX | {"moe-flex-dispatcher-backend": name} for name in reader.BACKENDS},
}
ENDS = {
    "embedding": {"account-for-embedding-in-pipeline-split": True},
    "head": {"account-for-loss-in-pipeline-split": True},
}
ACTIVATIONS: dict[tuple[bool, str], Entries] = {
    (True, "silu"): {"swiglu": True},
    (False, "relu"): {},
    (False, "gelu"): {},
}


def _plain_blocks(model: ModelSpec) -> bool:
    """Whether the layers are those of pretrain_gpt.py's flags."""
    odd = (
        model.described is not None or model.block != "sequential" or model.embedding_norm or model.attention_sinks,
        model.attention_soft_cap or model.logit_soft_cap or model.head_bias or model.full_attention_every,
        model.output_bias != model.mlp_bias or (model.qkv_bias and model.mlp_bias != model.qkv_bias and model.mlp_bias),
        model.positions not in ("rope", "learned") or (model.gated, model.activation) not in ACTIVATIONS,
        model.activation == "relu",
    )
    return not any(odd)


def _model(value: Any, values: Values) -> Entries | None:
    model: ModelSpec = values["spec"]
    if not _plain_blocks(model):
        return None
    found: dict[str, Any] = {
        "num-layers": model.layers,
        "hidden-size": model.hidden,
        "ffn-hidden-size": model.ffn,
        "num-attention-heads": model.heads,
        "kv-channels": model.head_dim,
        "vocab-size": model.vocab,
        "max-position-embeddings": max(model.max_seq_len, values["seq_len"]),
        "normalization": "RMSNorm" if model.norm == "rmsnorm" else "LayerNorm",
        "norm-epsilon": model.norm_eps,
        "position-embedding-type": "rope" if model.positions == "rope" else "learned_absolute",
        "untie-embeddings-and-output-weights": not model.tied,
        "disable-bias-linear": not model.mlp_bias,
        "add-qkv-bias": model.qkv_bias and not model.mlp_bias,
        "qk-layernorm": model.qk_norm,
        "hidden-dropout": model.dropout,
        "attention-dropout": model.attention_dropout,
    }
    if model.positions == "rope":
        found |= {"rotary-base": int(model.rope_theta), "rotary-percent": model.rotary_fraction}
    if model.kv_heads != model.heads:
        found |= {"group-query-attention": True, "num-query-groups": model.kv_heads}
    found |= ACTIVATIONS[model.gated, model.activation]
    return {**found, **_experts(model), **_latents(model)}


def _experts(model: ModelSpec) -> Entries:
    moe = model.moe
    if moe is None:
        return {}
    found: dict[str, Any] = {
        "num-experts": moe.experts,
        "moe-router-topk": moe.top_k,
        "moe-ffn-hidden-size": moe.expert_ffn,
        "moe-grouped-gemm": True,
    }
    if moe.shared_experts:
        found["moe-shared-expert-intermediate-size"] = moe.shared_ffn
    if model.family == "deepseek_v3":
        found["moe-router-score-function"] = "sigmoid"
    if moe.dense_layers:
        found["moe-layer-freq"] = f"([0]*{moe.dense_layers}+[1]*{model.layers - moe.dense_layers})"
    return found


def _latents(model: ModelSpec) -> Entries:
    mla = model.mla
    if mla is None:
        return {}
    queries = {} if mla.q_lora_rank is None else {"q-lora-rank": mla.q_lora_rank}
    return queries | {
        "multi-latent-attention": True,
        "qk-layernorm": True,
        "kv-lora-rank": mla.kv_lora_rank,
        "qk-head-dim": mla.qk_nope_head_dim,
        "qk-pos-emb-head-dim": mla.qk_rope_head_dim,
        "v-head-dim": mla.v_head_dim,
    }


def _modules(value: Any, values: Values) -> Entries | None:
    """Parts that run again, beside the attention core where that does."""
    if not value:
        return {}
    if values["recompute"] not in ("none", "attention"):
        return None
    core = ["core_attn"] if values["recompute"] == "attention" else []
    return {"recompute-granularity": "selective", "recompute-modules": list(dict.fromkeys([*core, *value]))}


def _stages(value: Any, values: Values) -> Entries:
    """A letter a layer, a bar between stages, where they are not dealt evenly beside the ends that count."""
    counted = values["counted_ends"]
    ends = (int(counted in ("embedding", "both")), int(counted in ("head", "both")))
    if even_split(values["spec"].layers, values["pp"] * values["virtual_stages"], *ends) == value:
        return {}
    stages = ["t" * count for count in value]
    return {"pipeline-model-parallel-layout": "|".join([f"E{stages[0]}", *stages[1:]]) + "L"}


def _gradients(value: Any, values: Values) -> Entries:
    """fp16's are 16 bits wide unless it is said otherwise, others' are 32."""
    if values["precision"] == "fp16":
        return {"accumulate-allreduce-grads-in-fp32": not value}
    return {"grad-reduce-in-bf16": value}


def _moments(value: Any, values: Values) -> Entries:
    narrow = {"exp-avg-dtype": "bf16", "exp-avg-sq-dtype": "bf16"}
    return {"use-precision-aware-optimizer": True} | narrow if value else {}


ROWS: dict[str, FieldKeys] = {
    **keys_of(reader.PLAIN, "cp", "ep", "dp_replicate"),
    "model": FieldKeys(("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "num-experts"), _model),
    "gpus": FieldKeys(("nproc-per-node", "nnodes"), lambda value, values: {}),
    "nodes": FieldKeys(("nnodes",), lambda value, values: {}),
    "engine": follows("use-distributed-optimizer", "megatron"),
    "method": follows("use-distributed-optimizer", "full"),
    "precision": forms(PRECISION),
    "narrow_weights": flag("fp8-param-gather"),
    "narrow_gradients": FieldKeys(("grad-reduce-in-bf16", "accumulate-allreduce-grads-in-fp32"), _gradients),
    "narrow_moments": FieldKeys(("use-precision-aware-optimizer", "exp-avg-dtype", "exp-avg-sq-dtype"), _moments),
    "optimizer": words("optimizer", inverted(reader.OPTIMIZERS)),
    "momentum": FieldKeys(
        ("sgd-momentum",), lambda value, values: {"sgd-momentum": value} if values["optimizer"] == "sgd" else {}
    ),
    "grad_accum": FieldKeys(
        ("global-batch-size",), lambda value, values: {"global-batch-size": values["global_batch_size"]}
    ),
    "cp": above("context-parallel-size", 1),
    "ep": FieldKeys(
        ("expert-model-parallel-size", "expert-tensor-parallel-size"),
        lambda value, values: (
            {"expert-model-parallel-size": value, "expert-tensor-parallel-size": 1}
            if values["spec"].moe is not None
            else {}
        ),
    ),
    "zero_stage": forms({0: {}, 1: {"use-distributed-optimizer": True}}),
    "sequence_parallel": flag("sequence-parallel"),
    "cp_method": words("cp-comm-type", inverted(reader.CONTEXT)),
    "pp_schedule": follows("num-virtual-stages-per-pipeline-rank", "1f1b", "interleaved"),
    "virtual_stages": above("num-virtual-stages-per-pipeline-rank", 1),
    "stage_layers": FieldKeys(("pipeline-model-parallel-layout",), _stages),
    "counted_ends": forms({"none": {}, **ENDS, "both": ENDS["embedding"] | ENDS["head"]}),
    "recompute": forms(RECOMPUTE),
    "recompute_modules": FieldKeys(("recompute-modules",), _modules),
    "tp_comm_overlap": flag("tp-comm-overlap"),
    "token_dispatcher": forms(DISPATCHERS),
}
FIXED = {
    "transformer-impl": ("transformer_engine", "as is estimated"),
    "overlap-grad-reduce": (True, "as is estimated"),
}


def head(values: Values) -> tuple[str, ...]:
    """What starts the ranks of a node."""
    each = str(values["gpus"] // values["nodes"])
    return ("torchrun", "--nnodes", str(values["nodes"]), "--nproc-per-node", each, SCRIPT)


def parts(values: Values) -> tuple[FileOfFormat, ...]:
    """The one command line."""
    return (FileOfFormat(FILE, "command", ROWS, FIXED, head),)
