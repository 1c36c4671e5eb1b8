"""A model by the sizes of Megatron-LM's flags: the family of Transformers that is built alike, with these sizes.

Flags and defaults: Megatron-LM d98e8a64 (megatron/training/arguments.py, core/transformer/transformer_config.py).
Not here: how ranks split it (megatron.py).
"""

from __future__ import annotations

import re
from typing import Any

import msgspec

from planner.ask.fromfile import hub
from planner.ask.fromfile.sheet import OFF, Memory, Sheet
from planner.basics.errors import PlannerError
from planner.spec import ModelSpec
from planner.spec.model import Mla, Moe
from planner.spec.model_rules import check_model

NEEDED = ("num-layers", "hidden-size", "num-attention-heads")
BUILT = (
    "group-query-attention", "num-query-groups", "ffn-hidden-size", "kv-channels", "swiglu", "normalization",
    "norm-epsilon", "position-embedding-type", "use-rotary-position-embeddings", "rotary-base", "rotary-percent",
    "max-position-embeddings", "untie-embeddings-and-output-weights", "disable-bias-linear", "add-qkv-bias",
    "attention-dropout", "vocab-size", "padded-vocab-size", "make-vocab-size-divisible-by", "tokenizer-type",
    "tokenizer-model", "num-experts", "moe-router-topk", "moe-ffn-hidden-size", "moe-shared-expert-intermediate-size",
    "moe-layer-freq", "moe-router-score-function", "moe-router-num-groups", "moe-router-group-topk",
    "moe-router-topk-scaling-factor", "q-lora-rank", "kv-lora-rank", "qk-head-dim", "qk-pos-emb-head-dim",
    "v-head-dim", "qk-layernorm", "gated-linear-unit", "add-bias-linear", "share-embeddings-and-output-weights",
)  # fmt: skip
"""Keys beside NEEDED that the model is built from; the last three are Megatron-Bridge's."""
OF_BRIDGE = "add-bias-linear"
"""Which every dump of Megatron-Bridge has; there a number of query groups needs no flag beside it."""
DENSE = {True: ("llama", "qwen2", "qwen3"), False: ("gpt2", "gpt_neox")}
"""Families to try, by whether their MLP is gated: the first of which check_model accepts the facts is the model's."""
EXPERTS = {False: ("mixtral", "qwen3_moe"), True: ("deepseek_v2", "deepseek_v3")}
"""And of those with experts, by whether attention is latent."""
POSITIONS = {"learned_absolute": "learned", "rope": "rope", "yarn": "rope", "none": "none"}
NORMS = {"layernorm": "layernorm", "rmsnorm": "rmsnorm"}
LAYER_FREQ = re.compile(r"\(?\[0\]\*(\d{1,4})\+\[1\]\*(\d{1,4})\)?")


class NotPlanned(Exception):
    """A key, and why no model that is planned is built so."""


OF_TOKENIZER = ("vocab-file", "tokenizer-model", "tokenizer-type")
DIVISOR, TIKTOKEN = 128, 2**17
"""Rows that each tensor rank's part of the vocabulary is padded to, and TikTokenizer's where no size is said."""
TAKE = "Say which model it is like: --model NAME"


def read(sheet: Sheet, tp: int, beside: str = "") -> ModelSpec | None:
    """The model, on the sheet, with a note `beside` it; None where sizes are missing, or no planned model is so."""
    there = [key for key in NEEDED if sheet.has(key)]
    if len(there) < len(NEEDED):
        missing = ", ".join(key for key in NEEDED if key not in there)
        for key in there:
            sheet.decides(key, f"the model's sizes are not complete without {missing}", TAKE, "model")
        return None
    vocab, note, memory = _vocabulary(sheet, tp)
    try:
        found = _facts(sheet) | {"vocab": vocab}
    except NotPlanned as error:
        key, why = error.args
        sheet.decides(key, why, TAKE, "model")
        return None
    dropout = sheet.real("hidden-dropout")
    found["dropout"] = 0.1 if dropout is None else dropout
    tried = EXPERTS["mla" in found] if "moe" in found else DENSE[found["gated"]]
    if sheet.data.get("moe-router-score-function") == "sigmoid":
        tried = tried[::-1]
    spec, why = _built(sheet, tried, found)
    if spec is None and found["dropout"]:
        spec, _ = _built(sheet, tried, found | {"dropout": 0.0})
        if spec is not None and sheet.has("hidden-dropout"):
            sheet.unmodelled("hidden-dropout", "masks of dropout beside this model's branches", "more")
        elif spec is not None:
            note, memory = "; ".join(filter(None, (note, "not modelled: hidden-dropout is 0.1 by default"))), "more"
    if spec is None:
        sheet.decides("num-layers", f"no model that is planned is built so: {why}", TAKE, "model")
        return None
    if spec.mla is not None and not sheet.flag("qk-layernorm"):
        sheet.unmodelled("multi-latent-attention", "norms of the latents, which are estimated", "less")
    keys = (*NEEDED, *BUILT, "multi-latent-attention") if sheet.flag("qk-layernorm") else (*NEEDED, *BUILT)
    note = "; ".join(filter(None, (beside, note)))
    sheet.means("model", spec, *keys, "hidden-dropout" if spec.dropout else "", note=note, memory=memory)
    sheet.ignore("hidden-dropout", OFF)
    return spec


def _built(sheet: Sheet, families: tuple[str, ...], facts: dict[str, Any]) -> tuple[ModelSpec | None, str]:
    """The first family whose modules have these facts, and why the first one of all has not."""
    why = ""
    for family in families:
        name = f"{family}-{facts['layers']}x{facts['hidden']}".replace("_", "-")
        try:
            spec = msgspec.convert({"name": name, "family": family, **facts}, ModelSpec)
            check_model(spec, sheet.path)
        except (PlannerError, msgspec.ValidationError) as error:
            said = error.rule if isinstance(error, PlannerError) else str(error)
            field = error.field.rpartition(": ")[2] if isinstance(error, PlannerError) else ""
            why = why or f"{field} {said}"
        else:
            return spec, ""
    return None, why


def _facts(sheet: Sheet) -> dict[str, Any]:
    layers, hidden, heads = (sheet.whole(key) or 0 for key in NEEDED)
    gated = bool(sheet.flag("swiglu") or sheet.flag("gated-linear-unit"))
    # A gated MLP without a width has 2/3 of the usual one, in multiples of 64.
    usual = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
    biased = not sheet.flag("disable-bias-linear") and sheet.flag("add-bias-linear") is not False
    groups = sheet.whole("num-query-groups")
    grouped = groups is not None and (sheet.flag("group-query-attention") or sheet.has(OF_BRIDGE))
    separate = sheet.flag("untie-embeddings-and-output-weights")
    shared = sheet.flag("share-embeddings-and-output-weights")
    rotary = sheet.flag("use-rotary-position-embeddings")
    turned = sheet.real("rotary-percent")
    eps, dropped, base = sheet.real("norm-epsilon"), sheet.real("attention-dropout"), sheet.real("rotary-base")
    found: dict[str, Any] = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": groups if grouped else heads,
        "head_dim": sheet.whole("kv-channels") or hidden // max(heads, 1),
        "ffn": sheet.whole("ffn-hidden-size") or usual,
        "max_seq_len": sheet.whole("max-position-embeddings") or sheet.whole("seq-length") or 4096,
        "gated": gated,
        "activation": "silu" if gated else "gelu",
        "norm": sheet.choice("normalization", NORMS) or "layernorm",
        "norm_eps": 1e-5 if eps is None else eps,
        "positions": "rope" if rotary else sheet.choice("position-embedding-type", POSITIONS) or "learned",
        "rotary_fraction": 1.0 if turned is None else turned,
        "rope_theta": 10000.0 if base is None else base,
        "tied": not separate if shared is None else shared,
        "qk_norm": bool(sheet.flag("qk-layernorm")),
        "qkv_bias": biased or bool(sheet.flag("add-qkv-bias")),
        "output_bias": biased,
        "mlp_bias": biased,
        "attention_dropout": 0.1 if dropped is None else dropped,
    }
    if sheet.whole("num-experts"):
        found |= _experts(sheet, found)
    if sheet.flag("multi-latent-attention"):
        found |= _latents(sheet, heads)
    return found


def _experts(sheet: Sheet, facts: dict[str, Any]) -> dict[str, Any]:
    """Experts instead of the MLP, shared ones beside them, and dense layers before them."""
    width, shared = (
        sheet.whole("moe-ffn-hidden-size") or facts["ffn"],
        sheet.whole("moe-shared-expert-intermediate-size"),
    )
    if shared and (width < 1 or shared % width):
        raise NotPlanned("moe-shared-expert-intermediate-size", f"is not a multiple of an expert's width, {width}")
    topk, scale = sheet.whole("moe-router-topk"), sheet.real("moe-router-topk-scaling-factor")
    moe = Moe(
        experts=sheet.whole("num-experts") or 0,
        top_k=2 if topk is None else topk,
        expert_ffn=width,
        shared_experts=(shared or 0) // max(width, 1),
        dense_layers=_dense_layers(sheet, facts["layers"]),
        scale=1.0 if scale is None else scale,
        groups=sheet.whole("moe-router-num-groups") or 1,
        top_groups=sheet.whole("moe-router-group-topk") or 1,
    )
    return {"moe": moe}


def _dense_layers(sheet: Sheet, layers: int) -> int:
    """Layers before the first with experts: 0 for each of them and 1 for the others, or every layer has them."""
    key = "moe-layer-freq"
    value = sheet.data.get(key)
    text = "".join(str(value).split())
    if value is None or text == "1":
        return 0
    if isinstance(value, list) and sorted(value, key=str) == value and set(map(str, value)) <= {"0", "1"}:
        return [str(one) for one in value].count("0")
    if (found := LAYER_FREQ.fullmatch(text)) and int(found[1]) + int(found[2]) == layers:
        return int(found[1])
    raise NotPlanned(key, "layers with experts do not follow the dense ones, which is planned")


def _latents(sheet: Sheet, heads: int) -> dict[str, Any]:
    """Multi-head latent attention, with Megatron-Core's widths where the file has none (MLATransformerConfig)."""
    sizes = {"kv-lora-rank": 512, "qk-head-dim": 128, "qk-pos-emb-head-dim": 64, "v-head-dim": 128}
    latent, plain, turned, values = (sheet.whole(key) or usual for key, usual in sizes.items())
    mla = Mla(
        q_lora_rank=sheet.whole("q-lora-rank"),
        kv_lora_rank=latent,
        qk_nope_head_dim=plain,
        qk_rope_head_dim=turned,
        v_head_dim=values,
    )
    return {"mla": mla, "kv_heads": heads, "head_dim": mla.qk_head_dim, "qk_norm": False}


def _vocabulary(sheet: Sheet, tp: int) -> tuple[int, str, Memory]:
    """Rows of the embedding, with a note and what it does to memory where the file does not say how many."""
    each = sheet.whole("make-vocab-size-divisible-by") or DIVISOR
    multiple = max(each, 1) * max(tp, 1)

    def padded(rows: int) -> int:
        return rows if each == DIVISOR else -(-rows // multiple) * multiple

    if sheet.has("padded-vocab-size"):
        return sheet.whole("padded-vocab-size") or 0, "", "same"
    if sheet.has("vocab-size"):
        return padded(sheet.whole("vocab-size") or 0), "", "same"
    kind, name = str(sheet.data.get("tokenizer-type")), sheet.data.get("tokenizer-model")
    if kind == "TikTokenizer":
        return padded(TIKTOKEN), f"TikTokenizer has {TIKTOKEN} tokens unless vocab-size says otherwise", "same"
    if isinstance(name, str) and "/" in name and (model := hub.sizes(name, sheet.path)) is not None:
        return padded(model.vocab), f"the vocabulary is that of {model.name}", "same"
    why = f"the tokenizer's size, which vocab-size says; {multiple} rows are estimated"
    if (key := next((one for one in OF_TOKENIZER if sheet.has(one)), None)) is not None:
        sheet.unmodelled(key, why, "more")
        return multiple, "", "same"
    return multiple, f"not modelled: {why}", "more"
