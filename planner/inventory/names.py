"""What Transformers calls the modules of each family, and in which order a layer registers them.

Read in transformers 5.23, models/<family>/modeling_<family>.py; tests hold every table against the real modules.
Not here: shapes (attention.py, mlp.py, block.py, ends.py), or the keys of config.json (huggingface.py).
"""

from __future__ import annotations

from typing import NamedTuple


class Names(NamedTuple):
    """One family's names, without the path to the model and to the layer.

    `attention` holds (q, k, v, output), or (fused q-k-v, output); `mlp` (gate, up, down), (fused gate-up, down) or
    (up, down), of which `gated` of the spec decides. `norms` are those before attention, before the MLP, after
    attention and after the MLP, as many as the family has. `layer` is the order of registration: the two parts by
    their module's name, norms by theirs. `transposed` marks weights held as (in, out).
    """

    embedding: str = "embed_tokens"
    final_norm: str = "norm"
    attention_module: str = "self_attn"
    attention: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    registered: tuple[str, ...] = ()
    mlp_module: str = "mlp"
    mlp: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj")
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    layer: tuple[str, ...] = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    router: str = "gate"
    positions: str = ""
    embedding_norm: str = ""
    transposed: bool = False


LLAMA = Names()
SANDWICH = LLAMA._replace(
    norms=(
        "input_layernorm",
        "pre_feedforward_layernorm",
        "post_attention_layernorm",
        "post_feedforward_layernorm",
    ),
    layer=(
        "self_attn",
        "mlp",
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
)
NEOX = Names(
    embedding="embed_in",
    final_norm="final_layer_norm",
    attention_module="attention",
    attention=("query_key_value", "dense"),
    mlp=("dense_h_to_4h", "dense_4h_to_h"),
    layer=("input_layernorm", "post_attention_layernorm", "attention", "mlp"),
)

FAMILIES: dict[str, Names] = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "qwen2": LLAMA,
    "qwen3": LLAMA,
    "mixtral": LLAMA,
    "qwen3_moe": LLAMA,
    "deepseek_v2": LLAMA,
    "deepseek_v3": LLAMA,
    "gpt_oss": LLAMA._replace(router="router"),
    "gemma2": SANDWICH,
    "gemma3_text": SANDWICH,
    "phi": Names(
        final_norm="final_layernorm",
        attention=("q_proj", "k_proj", "v_proj", "dense"),
        mlp=("fc1", "fc2"),
        norms=("input_layernorm",),
        layer=("self_attn", "mlp", "input_layernorm"),
    ),
    "phi3": LLAMA._replace(
        attention=("qkv_proj", "o_proj"), registered=("o_proj", "qkv_proj"), mlp=("gate_up_proj", "down_proj")
    ),
    "gpt2": Names(
        embedding="wte",
        positions="wpe",
        final_norm="ln_f",
        attention_module="attn",
        attention=("c_attn", "c_proj"),
        mlp=("c_fc", "c_proj"),
        norms=("ln_1", "ln_2"),
        layer=("ln_1", "attn", "ln_2", "mlp"),
        transposed=True,
    ),
    "gpt_neox": NEOX,
    "opt": Names(
        positions="embed_positions",
        final_norm="final_layer_norm",
        attention=("q_proj", "k_proj", "v_proj", "out_proj"),
        registered=("k_proj", "v_proj", "q_proj", "out_proj"),
        mlp_module="",
        mlp=("fc1", "fc2"),
        norms=("self_attn_layer_norm", "final_layer_norm"),
        layer=("self_attn", "self_attn_layer_norm", "", "final_layer_norm"),
    ),
    "bloom": NEOX._replace(
        embedding="word_embeddings",
        embedding_norm="word_embeddings_layernorm",
        final_norm="ln_f",
        attention_module="self_attention",
        layer=("input_layernorm", "self_attention", "post_attention_layernorm", "mlp"),
    ),
    "falcon": NEOX._replace(
        embedding="word_embeddings",
        final_norm="ln_f",
        attention_module="self_attention",
        layer=("self_attention", "mlp"),
    ),
}
"""By model_type. Falcon's norms depend on how many it has: see `names_of`."""

FALCON_NORMS = {1: ("input_layernorm",), 2: ("ln_attn", "ln_mlp")}


def names_of(family: str, layer_norms: int = 2) -> Names:
    """The names of a family; a family that is not in the table is our own mistake (check_model asks first)."""
    names = FAMILIES[family]
    if family != "falcon":
        return names
    norms = FALCON_NORMS[layer_norms]
    return names._replace(norms=norms, layer=(*names.layer, *norms))
