"""The sizes that rules and tables ask of a described model, from its configuration.

Not here: its weights and operations (describe.py).
"""

from __future__ import annotations

import re
from math import prod
from typing import Any

from executor.worker.model.layers import decoder_config, layer_key
from planner.spec import ModelSpec, Moe
from planner.spec.described import Described

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
CHOSEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts", "moe_k", "num_selected_experts")
WIDTHS = ("decoder_ffn_dim", "intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner", "mlp_hidden_size")


def spec_of(name: str, raw: dict[str, Any], config: Any, described: Described) -> ModelSpec:
    """The model's facts, with its description; a fact that its configuration does not name is 1, or none."""
    text = decoder_config(config)
    hidden = _first(text, ("hidden_size", "d_model", "n_embd"), 1)
    heads = _first(text, ("decoder_attention_heads", "num_attention_heads", "n_head", "num_heads"), 1)
    kv_heads = _first(text, ("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), heads)
    windows = getattr(text, "layer_types", None) or []
    full = [place for place, kind in enumerate(windows, 1) if kind == "full_attention"]
    return ModelSpec(
        name=re.sub(r"[^\w.-]", "-", name) or "model",
        family=str(raw["model_type"]),
        layers=int(getattr(text, layer_key(text))) - described.idle_layers,
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads if heads % kv_heads == 0 else heads,
        head_dim=_first(text, ("head_dim", "attention_head_dim"), max(1, hidden // heads)),
        ffn=_first(text, WIDTHS, 4 * hidden),
        vocab=_first(text, ("vocab_size",), 1),
        tied=not any(weight.name for weight in described.units["embed"].weights),
        max_seq_len=_first(text, ("max_position_embeddings", "max_sequence_length", "n_positions"), 4096),
        sliding_window=_first(text, ("sliding_window",), 0) or None,
        full_attention_every=full[0] if full and full[0] > 1 else 0,
        moe=_experts(text, described, hidden),
        positions="none",
        imported=described,
    )


def _first(text: Any, keys: tuple[str, ...], absent: int) -> int:
    def value(key: str) -> Any:
        try:
            return getattr(text, key, None)
        except RuntimeError:  # Transformers' own, where layers have values of their own
            return None

    return int(next((found for key in keys if isinstance(found := value(key), int)), absent))


def _experts(text: Any, described: Described, hidden: int) -> Moe | None:
    stacked = [one for unit in described.units.values() for one in unit.weights if one.use == "expert"]
    if not stacked:
        return None
    count = stacked[0].shape[0]
    return Moe(
        experts=count, top_k=min(_first(text, CHOSEN, 1), count), expert_ffn=prod(stacked[-1].shape[1:]) // hidden
    )
