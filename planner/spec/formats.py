"""What the config.json of each family calls the facts of a ModelSpec: one table a model_type.

Read in transformers 5.23, models/<family>/configuration_<family>.py. Not here: reading and writing (huggingface.py),
or the names of modules and weights (inventory/names.py).
"""

from __future__ import annotations

from typing import Any, NamedTuple

from planner.spec.model import ModelSpec

Keys = dict[str, tuple[str, ...]]


class Format(NamedTuple):
    """One family's config.json, and the classes it names: the whole model's and one layer's.

    `keys` gives, for a field of the spec ("moe.experts" for a nested one), the key that is written and others that
    are read as well. `absent` holds what Transformers assumes of a key that is not there; a field without it must be
    given. `facts` are fields that the family's modules fix; `must` are keys that may have only this value, since no
    ModelSpec says otherwise. `windows` names the layers that slide: none, all, or a repeated pattern.
    """

    architecture: str
    layer: str
    keys: Keys
    absent: dict[str, Any]
    facts: dict[str, Any]
    must: dict[str, Any]
    windows: str = ""

    def variant(self, architecture: str, layer: str, **changes: dict[str, Any]) -> Format:
        """A family like this one; of each table only the differences are given, None takes a key out."""
        merged: dict[str, Any] = {
            field: {key: value for key, value in {**getattr(self, field), **new}.items() if value != ()}
            for field, new in changes.items()
        }
        return self._replace(architecture=architecture, layer=layer, **merged)


SIZES: Keys = {
    "hidden": ("hidden_size",),
    "heads": ("num_attention_heads",),
    "layers": ("num_hidden_layers",),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("head_dim",),
    "ffn": ("intermediate_size",),
    "vocab": ("vocab_size",),
    "tied": ("tie_word_embeddings",),
    "max_seq_len": ("max_position_embeddings",),
    "norm_eps": ("rms_norm_eps",),
    "activation": ("hidden_act",),
    "attention_dropout": ("attention_dropout",),
}
"""Keys that most families share."""

LLAMA = Format(
    architecture="LlamaForCausalLM",
    layer="LlamaDecoderLayer",
    keys=SIZES | {"qkv_bias": ("attention_bias",), "output_bias": ("attention_bias",), "mlp_bias": ("mlp_bias",)},
    absent={
        "num_key_value_heads": None,
        "head_dim": None,
        "tie_word_embeddings": False,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "mlp_bias": False,
    },
    facts={},
    must={},
)
NO_BIAS: Keys = {"qkv_bias": (), "output_bias": (), "mlp_bias": ()}
MISTRAL = LLAMA.variant(
    "MistralForCausalLM",
    "MistralDecoderLayer",
    keys=NO_BIAS | {"sliding_window": ("sliding_window",)},
    absent={"num_key_value_heads": 8, "max_position_embeddings": 4096 * 32, "sliding_window": 4096},
)._replace(windows="all")
QWEN2 = LLAMA.variant(
    "Qwen2ForCausalLM",
    "Qwen2DecoderLayer",
    keys=NO_BIAS,
    absent={"num_key_value_heads": 32, "max_position_embeddings": 32768},
    facts={"qkv_bias": True},
    must={"use_sliding_window": False},
)
QWEN3 = LLAMA.variant(
    "Qwen3ForCausalLM",
    "Qwen3DecoderLayer",
    keys={"mlp_bias": ()},
    absent={"num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768},
    facts={"qk_norm": True},
    must={"use_sliding_window": False},
)
GEMMA2 = LLAMA.variant(
    "Gemma2ForCausalLM",
    "Gemma2DecoderLayer",
    keys={
        "mlp_bias": (),
        "activation": ("hidden_activation",),
        "query_scale": ("query_pre_attn_scalar",),
        "sliding_window": ("sliding_window",),
        "attention_soft_cap": ("attn_logit_softcapping",),
        "logit_soft_cap": ("final_logit_softcapping",),
    },
    absent={
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "hidden_activation": "gelu_pytorch_tanh",
        "tie_word_embeddings": True,
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    facts={"block": "sandwich", "layer_norms": 4},
    must={"use_bidirectional_attention": None},
)._replace(windows="2")
LAYERNORM: Keys = NO_BIAS | {"norm_eps": ("layer_norm_eps",)}
BIASES = {"norm": "layernorm", "gated": False, "qkv_bias": True, "output_bias": True, "mlp_bias": True}
NEOX = LLAMA.variant(
    "GPTNeoXForCausalLM",
    "GPTNeoXLayer",
    keys=LAYERNORM
    | {
        "kv_heads": (),
        "head_dim": (),
        "dropout": ("hidden_dropout",),
        "qkv_bias": ("attention_bias",),
        "output_bias": ("attention_bias",),
    },
    absent={"layer_norm_eps": 1e-5, "hidden_act": "gelu", "attention_bias": True, "hidden_dropout": 0.0},
    facts={"norm": "layernorm", "gated": False, "mlp_bias": True},
    must={},
)
PHI = LLAMA.variant(
    "PhiForCausalLM",
    "PhiDecoderLayer",
    keys=LAYERNORM | {"head_dim": (), "dropout": ("resid_pdrop",)},
    absent={"layer_norm_eps": 1e-5, "hidden_act": "gelu_new", "resid_pdrop": 0.0},
    facts=BIASES | {"block": "parallel", "layer_norms": 1, "head_bias": True},
    must={"qk_layernorm": False, "embd_pdrop": 0.0},
)
PHI3 = LLAMA.variant(
    "Phi3ForCausalLM",
    "Phi3DecoderLayer",
    keys=NO_BIAS | {"head_dim": (), "sliding_window": ("sliding_window",), "dropout": ("resid_pdrop",)},
    absent={"max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "sliding_window": None, "resid_pdrop": 0.0},
    must={"embd_pdrop": 0.0},
)._replace(windows="all")
GPT2 = LLAMA.variant(
    "GPT2LMHeadModel",
    "GPT2Block",
    keys=LAYERNORM
    | {
        "layers": ("n_layer", "num_hidden_layers"),
        "hidden": ("n_embd", "hidden_size"),
        "heads": ("n_head", "num_attention_heads"),
        "kv_heads": (),
        "head_dim": (),
        "ffn": ("n_inner",),
        "max_seq_len": ("n_positions", "max_position_embeddings"),
        "norm_eps": ("layer_norm_epsilon",),
        "activation": ("activation_function",),
        "dropout": ("resid_pdrop",),
        "attention_dropout": ("attn_pdrop",),
    },
    absent={
        "n_inner": None,
        "n_positions": 1024,
        "layer_norm_epsilon": 1e-5,
        "activation_function": "gelu_new",
        "resid_pdrop": 0.1,
        "attn_pdrop": 0.1,
        "tie_word_embeddings": True,
    },
    facts=BIASES | {"positions": "learned"},
    must={
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": False,
        "reorder_and_upcast_attn": False,
        "add_cross_attention": False,
    },
)
OPT = LLAMA.variant(
    "OPTForCausalLM",
    "OPTDecoderLayer",
    keys=LAYERNORM
    | {
        "kv_heads": (),
        "head_dim": (),
        "ffn": ("ffn_dim",),
        "norm_eps": (),
        "activation": ("activation_function",),
        "dropout": ("dropout",),
    },
    absent={"activation_function": "relu", "dropout": 0.1, "tie_word_embeddings": True},
    facts=BIASES | {"positions": "learned", "norm_eps": 1e-5},
    must={
        "do_layer_norm_before": True,
        "_remove_final_layer_norm": False,
        "enable_bias": True,
        "layer_norm_elementwise_affine": True,
        "layerdrop": 0.0,
    },
)
BLOOM = LLAMA.variant(
    "BloomForCausalLM",
    "BloomBlock",
    keys=LAYERNORM
    | {
        "layers": ("n_layer", "num_hidden_layers"),
        "hidden": ("hidden_size", "n_embed"),
        "heads": ("n_head", "num_attention_heads"),
        "kv_heads": (),
        "head_dim": (),
        "ffn": (),
        "max_seq_len": ("seq_length",),
        "norm_eps": ("layer_norm_epsilon",),
        "activation": (),
        "dropout": ("hidden_dropout",),
    },
    absent={
        "seq_length": 2048,
        "layer_norm_epsilon": 1e-5,
        "hidden_dropout": 0.0,
        "tie_word_embeddings": True,
    },
    facts=BIASES | {"positions": "alibi", "embedding_norm": True, "activation": "gelu_pytorch_tanh"},
    must={"apply_residual_connection_post_layernorm": False},
)
FALCON = LLAMA.variant(
    "FalconForCausalLM",
    "FalconDecoderLayer",
    keys={
        "layers": ("num_hidden_layers", "n_layer"),
        "heads": ("num_attention_heads", "n_head"),
        "hidden": ("hidden_size", "n_embed"),
        "kv_heads": (),
        "head_dim": (),
        "ffn": ("ffn_hidden_size",),
        "norm_eps": ("layer_norm_epsilon",),
        "activation": ("activation",),
        "dropout": ("hidden_dropout",),
        "qkv_bias": ("bias",),
        "output_bias": ("bias",),
        "mlp_bias": ("bias",),
    },
    absent={
        "ffn_hidden_size": None,
        "layer_norm_epsilon": 1e-5,
        "activation": "gelu",
        "hidden_dropout": 0.0,
        "bias": False,
        "tie_word_embeddings": True,
    },
    facts={"norm": "layernorm", "gated": False, "block": "parallel"},
    must={"alibi": False, "parallel_attn": True},
)
MIXTRAL = MISTRAL.variant(
    "MixtralForCausalLM",
    "MixtralDecoderLayer",
    keys={
        "moe.experts": ("num_local_experts", "num_experts"),
        "moe.top_k": ("num_experts_per_tok",),
        "moe.expert_ffn": ("intermediate_size",),
    },
    absent={"rms_norm_eps": 1e-5, "sliding_window": None, "num_local_experts": 8, "num_experts_per_tok": 2},
    must={"router_jitter_noise": 0.0},
)
QWEN3_MOE = QWEN3.variant(
    "Qwen3MoeForCausalLM",
    "Qwen3MoeDecoderLayer",
    keys={
        "moe.experts": ("num_experts", "num_local_experts"),
        "moe.top_k": ("num_experts_per_tok",),
        "moe.expert_ffn": ("moe_intermediate_size",),
        "moe.normalised": ("norm_topk_prob",),
    },
    absent={"num_key_value_heads": 4, "head_dim": None, "norm_topk_prob": False},
    must={"decoder_sparse_step": 1, "mlp_only_layers": []},
)
GPT_OSS = LLAMA.variant(
    "GptOssForCausalLM",
    "GptOssDecoderLayer",
    keys={
        "mlp_bias": (),
        "activation": (),
        "sliding_window": ("sliding_window",),
        "moe.experts": ("num_local_experts", "num_experts"),
        "moe.top_k": ("num_experts_per_tok", "experts_per_token"),
        "moe.expert_ffn": ("intermediate_size",),
    },
    absent={
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "attention_bias": True,
        "sliding_window": 128,
    },
    facts={"attention_sinks": True, "moe.bias": True},
)._replace(windows="2")
DEEPSEEK_V2 = LLAMA.variant(
    "DeepseekV2ForCausalLM",
    "DeepseekV2DecoderLayer",
    keys=NO_BIAS
    | {
        "kv_heads": (),
        "head_dim": (),
        "moe.experts": ("n_routed_experts", "num_experts"),
        "moe.top_k": ("num_experts_per_tok",),
        "moe.expert_ffn": ("moe_intermediate_size",),
        "moe.shared_experts": ("n_shared_experts",),
        "moe.dense_layers": ("first_k_dense_replace",),
        "moe.scale": ("routed_scaling_factor",),
        "moe.groups": ("n_group",),
        "moe.top_groups": ("topk_group",),
        "moe.normalised": ("norm_topk_prob",),
        "mla.q_lora_rank": ("q_lora_rank",),
        "mla.kv_lora_rank": ("kv_lora_rank",),
        "mla.qk_nope_head_dim": ("qk_nope_head_dim",),
        "mla.qk_rope_head_dim": ("qk_rope_head_dim",),
        "mla.v_head_dim": ("v_head_dim",),
    },
    absent={
        "n_shared_experts": 2,
        "first_k_dense_replace": 0,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
    },
    must={"attention_bias": False, "mlp_bias": False, "moe_layer_freq": 1},
)
DEEPSEEK_V3 = DEEPSEEK_V2.variant(
    "DeepseekV3ForCausalLM",
    "DeepseekV3DecoderLayer",
    absent={
        "max_position_embeddings": 4096,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "routed_scaling_factor": 2.5,
        "n_group": 8,
        "topk_group": 4,
        "norm_topk_prob": True,
    },
)

FORMATS: dict[str, Format] = {
    "llama": LLAMA,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "gemma2": GEMMA2,
    "gemma3_text": GEMMA2.variant(
        "Gemma3ForCausalLM",
        "Gemma3DecoderLayer",
        absent={
            "vocab_size": 262208,
            "max_position_embeddings": 131072,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
        },
        facts={"qk_norm": True},
        must={"use_bidirectional_attention": False},
    )._replace(windows="6"),
    "phi": PHI,
    "phi3": PHI3,
    "gpt2": GPT2,
    "gpt_neox": NEOX,
    "opt": OPT,
    "bloom": BLOOM,
    "falcon": FALCON,
    "mixtral": MIXTRAL,
    "qwen3_moe": QWEN3_MOE,
    "gpt_oss": GPT_OSS,
    "deepseek_v2": DEEPSEEK_V2,
    "deepseek_v3": DEEPSEEK_V3,
}
"""By model_type: every family this project plans."""

SHIPPED_QUANTIZED = ("deepseek_v3", "gpt_oss")
"""Families whose makers publish 8-bit or 4-bit weights: their config.json describes the model all the same."""


def wrapped_classes(model: ModelSpec) -> tuple[str, ...]:
    """The classes in Transformers of what is sharded by itself: a model's layers, and its towers."""
    if model.described is None:
        return (FORMATS[model.family].layer,)
    return model.described.layer_class, *dict.fromkeys(model.described.towers.values())
