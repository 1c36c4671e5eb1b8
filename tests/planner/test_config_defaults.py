"""A config.json with its sizes alone: what each family's configuration class in transformers 5.23 takes for the rest.

Written off the classes (models/<family>/configuration_<family>.py), so that no test needs them. Not here: keys that
are given (test_huggingface.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner.basics.errors import PlannerError
from planner.spec.huggingface import spec_of

SIZES = {"hidden_size": 256, "intermediate_size": 96, "num_hidden_layers": 4, "vocab_size": 1000}
PLAIN = {**SIZES, "num_attention_heads": 64}
GPT2 = {"n_layer": 4, "n_embd": 256, "n_head": 64, "vocab_size": 1000}
FALCON = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 64, "vocab_size": 1000}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
LATENT = {
    "n_routed_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 40, "q_lora_rank": 12,
    "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 2, "v_head_dim": 4,
}  # fmt: skip

ABSENT: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (PLAIN, {"kv_heads": 64, "head_dim": 4, "max_seq_len": 2048, "norm_eps": 1e-6, "tied": False,
                      "attention_dropout": 0.0, "sliding_window": None}),
    "mistral": (PLAIN, {"kv_heads": 8, "max_seq_len": 131072, "sliding_window": 4096, "full_attention_every": 0}),
    "qwen2": (PLAIN, {"kv_heads": 32, "head_dim": 4, "max_seq_len": 32768, "qkv_bias": True, "output_bias": False}),
    "qwen3": (PLAIN, {"kv_heads": 32, "head_dim": 128, "max_seq_len": 32768, "qk_norm": True, "qkv_bias": False}),
    "gemma2": (SIZES, {"heads": 8, "kv_heads": 4, "head_dim": 256, "max_seq_len": 8192, "tied": True,
                       "query_scale": 256, "sliding_window": 4096, "attention_soft_cap": 50.0, "logit_soft_cap": 30.0,
                       "full_attention_every": 2, "layer_norms": 4, "block": "sandwich"}),
    "gemma3_text": ({**SIZES, "vocab_size": 1000}, {"heads": 8, "kv_heads": 4, "head_dim": 256, "max_seq_len": 131072,
                    "query_scale": 256, "sliding_window": 4096, "attention_soft_cap": None, "logit_soft_cap": None,
                    "full_attention_every": 6, "qk_norm": True, "rope_theta": 1e6, "rope_theta_local": 1e4}),
    "phi": (PLAIN, {"norm_eps": 1e-5, "dropout": 0.0, "activation": "gelu_new", "rotary_fraction": 0.5,
                    "layer_norms": 1, "head_bias": True, "block": "parallel", "max_seq_len": 2048}),
    "phi3": (PLAIN, {"max_seq_len": 4096, "norm_eps": 1e-5, "dropout": 0.0, "sliding_window": None,
                     "rotary_fraction": 1.0, "activation": "silu"}),
    "gpt2": (GPT2, {"ffn": 1024, "max_seq_len": 1024, "norm_eps": 1e-5, "dropout": 0.1, "attention_dropout": 0.1,
                    "activation": "gelu_new", "tied": True, "positions": "learned", "kv_heads": 64, "head_dim": 4}),
    "gpt_neox": ({**PLAIN, "num_attention_heads": 16},
                 {"norm_eps": 1e-5, "activation": "gelu", "dropout": 0.0, "rotary_fraction": 0.25,
                         "block": "parallel", "qkv_bias": True, "mlp_bias": True}),
    "opt": ({**FALCON, "ffn_dim": 96}, {"norm_eps": 1e-5, "dropout": 0.1, "activation": "relu", "tied": True, "ffn": 96,
                                        "positions": "learned", "max_seq_len": 2048}),
    "bloom": ({"n_layer": 4, "hidden_size": 256, "num_attention_heads": 64, "vocab_size": 1000},
              {"ffn": 1024, "max_seq_len": 2048, "norm_eps": 1e-5, "dropout": 0.0, "tied": True, "positions": "alibi",
               "embedding_norm": True, "activation": "gelu_pytorch_tanh"}),
    "falcon": (FALCON, {"ffn": 1024, "kv_heads": 1, "layer_norms": 1, "norm_eps": 1e-5, "activation": "gelu",
                        "dropout": 0.0, "qkv_bias": False, "tied": True, "block": "parallel", "gated": False}),
    "mixtral": (PLAIN, {"kv_heads": 8, "norm_eps": 1e-5, "sliding_window": None, "moe.experts": 8, "moe.top_k": 2,
                        "moe.expert_ffn": 96, "rope_theta": 1e6, "max_seq_len": 131072}),
    "qwen3_moe": ({**PLAIN, **EXPERTS}, {"kv_heads": 4, "head_dim": 4, "max_seq_len": 32768, "moe.normalised": False,
                                         "moe.experts": 6, "moe.top_k": 2, "moe.expert_ffn": 40, "qk_norm": True}),
    "gpt_oss": ({**PLAIN, "num_local_experts": 6, "num_experts_per_tok": 2},
                {"kv_heads": 8, "head_dim": 64, "max_seq_len": 131072, "norm_eps": 1e-5, "qkv_bias": True,
                 "output_bias": True, "sliding_window": 128, "full_attention_every": 2, "attention_sinks": True,
                 "moe.bias": True, "rope_theta": 150000.0}),
    "deepseek_v2": ({**PLAIN, **LATENT}, {"head_dim": 8, "kv_heads": 64, "moe.shared_experts": 2, "moe.dense_layers": 0,
                    "moe.scale": 1.0, "moe.groups": 1, "moe.top_groups": 1, "moe.normalised": False,
                    "max_seq_len": 2048, "mla.q_lora_rank": 12, "mla.v_head_dim": 4}),
    "deepseek_v3": ({**PLAIN, **LATENT}, {"head_dim": 8, "kv_heads": 64, "moe.shared_experts": 1, "moe.dense_layers": 3,
                    "moe.scale": 2.5, "moe.groups": 8, "moe.top_groups": 4, "moe.normalised": True,
                    "max_seq_len": 4096, "mla.kv_lora_rank": 10}),
}  # fmt: skip


def read(kind: str, **more: Any) -> Any:
    return spec_of({"model_type": kind, **ABSENT[kind][0], **more}, Path("config.json"), "bare")


def field_of(model: Any, path: str) -> Any:
    for name in path.split("."):
        model = getattr(model, name)
    return model


@pytest.mark.parametrize("kind", ABSENT)
def test_what_a_configuration_class_takes_for_keys_that_are_not_there(kind: str) -> None:
    expected = ABSENT[kind][1]
    model = read(kind)

    assert {path: field_of(model, path) for path in expected} == expected
    assert (model.layers, model.hidden, model.vocab, model.family) == (4, 256, 1000, kind)


MUST: list[tuple[str, str, Any, Any]] = [
    ("qwen2", "use_sliding_window", False, True),
    ("qwen3", "use_sliding_window", False, True),
    ("gemma2", "use_bidirectional_attention", None, True),
    ("gemma3_text", "use_bidirectional_attention", False, True),
    ("phi", "qk_layernorm", False, True),
    ("phi", "embd_pdrop", 0.0, 0.1),
    ("phi", "embd_pdrop", 0, 1),
    ("phi3", "embd_pdrop", 0.0, 0.1),
    ("phi3", "embd_pdrop", 0, 1.0),
    ("gpt2", "scale_attn_weights", True, False),
    ("gpt2", "scale_attn_by_inverse_layer_idx", False, True),
    ("gpt2", "embd_pdrop", 0.1, 0.2),
    ("opt", "do_layer_norm_before", True, False),
    ("opt", "layerdrop", 0.0, 1.0),
    ("opt", "word_embed_proj_dim", 256, 128),
    ("bloom", "apply_residual_connection_post_layernorm", False, True),
    ("falcon", "alibi", False, True),
    ("falcon", "parallel_attn", True, False),
    ("mixtral", "router_jitter_noise", 0.0, 1.0),
    ("qwen3_moe", "decoder_sparse_step", 1, 2),
    ("qwen3_moe", "mlp_only_layers", [], [0]),
    ("deepseek_v2", "moe_layer_freq", 1, 2),
    ("deepseek_v3", "attention_bias", False, True),
]


@pytest.mark.parametrize(("kind", "key", "usual", "other"), MUST)
def test_what_no_specification_says_must_be_as_it_usually_is(kind: str, key: str, usual: Any, other: Any) -> None:
    assert read(kind, **{key: usual}) == read(kind)
    if (kind, key) != ("gpt2", "embd_pdrop"):  # of which a number is needed
        assert read(kind, **{key: None}) == read(kind)
    with pytest.raises(PlannerError, match=key):
        read(kind, **{key: other})


def test_embeddings_of_gpt2_are_dropped_as_its_branches_are() -> None:
    assert read("gpt2", embd_pdrop=0.3, resid_pdrop=0.3).dropout == 0.3


def test_windows_repeat_so_many_sliding_layers_and_a_full_one() -> None:
    slide, full = "sliding_attention", "full_attention"
    for kinds, every in (([slide, full] * 2, 2), ([slide] * 4, 0), ([full] * 4, 1), ([slide, slide, full, slide], 3)):
        assert read("gemma2", layer_types=kinds).full_attention_every == every
    for kinds in ([full, slide, slide, slide], [slide, full, full, slide], [slide, full], [slide, full] * 3):
        with pytest.raises(PlannerError, match="must repeat"):
            read("gemma2", layer_types=kinds)
    assert read("gemma3_text", sliding_window_pattern=3).full_attention_every == 3


def test_numbers_of_any_size_that_a_float_holds_are_read() -> None:
    assert read("llama", rope_theta=1e30).rope_theta == 1e30
    for wrong in (2e30, -2e30, None, "1", True):
        with pytest.raises(PlannerError, match="rope_theta"):
            read("llama", rope_theta=wrong)


def test_only_makers_who_ship_quantized_weights_may_say_so() -> None:
    for key in ("quantization_config", "compression_config"):
        for kind in ("gpt_oss", "deepseek_v3"):
            assert read(kind, **{key: {"quant_method": "fp8"}}) == read(kind)
        with pytest.raises(PlannerError, match=key):
            read("llama", **{key: {"quant_method": "gptq"}})


def test_the_window_s_own_rotary_base_is_that_of_the_sliding_table() -> None:
    tables = {"full_attention": {"rope_theta": 5.0}, "sliding_attention": {"rope_theta": 3.0}}

    assert read("gemma3_text", rope_local_base_freq=7.0).rope_theta_local == 7.0
    both = read("gemma3_text", rope_parameters=tables)
    assert (both.rope_theta, both.rope_theta_local) == (5.0, 3.0)
    alone = read("gemma3_text", rope_parameters={"full_attention": {"rope_theta": 5.0}})
    assert (alone.rope_theta, alone.rope_theta_local) == (5.0, 1e4)


@pytest.mark.usefixtures("without_torch")
def test_a_name_is_a_slip_of_the_keyboard_when_it_is_near_enough() -> None:
    for name, near in (("lama", "Did you mean llama"), ("Qwen-3", "Did you mean qwen3"), ("mamba", "adds a family")):
        with pytest.raises(PlannerError, match=near):
            spec_of({"model_type": name}, Path("config.json"), "bare")
