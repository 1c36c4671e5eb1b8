"""Hugging Face config.json: read one into a ModelSpec, and write the one the trainer builds its model from.

Both ages of rotary keys are read (rope_theta and rope_scaling; rope_parameters since transformers 5).
Not here: what the keys of a family are (formats.py), weights, tokenizers, or fetching a file (hub.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec

from planner.basics import reading
from planner.basics.errors import PlannerError, refusing
from planner.basics.names import check_name
from planner.spec import Mla, ModelSpec, Moe
from planner.spec.causal import other_than_causal, sentence
from planner.spec.described import SCHEMA
from planner.spec.formats import FORMATS, SHIPPED_QUANTIZED, Format
from planner.spec.model import Activation, RopeScaling
from planner.spec.model_rules import check_model

ABSENT_ROPE_THETA = {"mixtral": 1e6, "gemma3_text": 1e6, "gpt_oss": 150000.0}
"""What Transformers assumes, where it is not 10000."""

ACTIVATIONS = {name: name for name in get_args(Activation)} | {"swish": "silu"}
"""Names in a config.json and in a spec."""

FLAGS = ("tied", "qkv_bias", "output_bias", "mlp_bias", "moe.normalised")
NUMBERS = (
    "norm_eps", "dropout", "attention_dropout", "query_scale", "attention_soft_cap", "logit_soft_cap", "moe.scale",
)  # fmt: skip


def read_config(path: str | os.PathLike[str]) -> ModelSpec:
    """The sizes in a config.json, given as the file or its folder. The model is named after its folder."""
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    elif (found := _read(file)).get("schema") == SCHEMA:
        from planner.spec.importing import described_model  # only for descriptions

        return described_model(msgspec.json.encode(found), str(file))
    name = check_name(
        file.resolve().parent.name or "model", "model", "The model has its folder's name: rename the folder"
    )
    return spec_of(_read(file), file, name)


def spec_of(config: dict[str, Any], file: Path, name: str) -> ModelSpec:
    """The model of a decoded config.json; `file` is how a refusal names it."""
    kind = config.get("model_type")
    known = not isinstance(kind, str) or kind in FORMATS
    if not known and (what := other_than_causal(config)) is not None:
        fix = "Give the config.json of a decoder: its architectures name ...ForCausalLM"
        raise PlannerError(f"{file}: model_type", None, sentence(kind, what), fix)
    if isinstance(kind, str) and _is_unknown(kind, config):
        from planner.spec.importing import imported  # starts a process

        return imported(file, config, name, _other_way(kind, config))
    _refuse_other_towers(config, kind, file)
    if kind == "gemma3" and isinstance(config.get("text_config"), dict):
        config, kind = {**config["text_config"], "model_type": "gemma3_text"}, "gemma3_text"
    if not isinstance(kind, str) or kind not in FORMATS:
        raise PlannerError(f"{file}: model_type", kind, "is not a family planned here", _other_way(str(kind), config))
    form, keys = FORMATS[kind], _Keys(config, file)
    _refuse_what_no_spec_says(keys, kind, form)
    found: dict[str, Any] = {"name": name, "family": kind, **form.facts}
    for field, names in form.keys.items():
        found[field] = _value(keys, field, names, form.absent)
    _complete(found, keys, form)
    for part, type_ in (("moe", Moe), ("mla", Mla)):
        inner = {field[4:]: found.pop(field) for field in list(found) if field.startswith(f"{part}.")}
        if inner:
            found[part] = type_(**inner)
    if "mla" in found:
        found["head_dim"] = found["mla"].qk_head_dim
    spec = ModelSpec(**found)
    check_model(spec, str(file))
    return spec


TOWERS = ("vision_config", "vision_tower_config", "audio_config", "speech_config", "mm_vision_tower")
"""Keys of models that see or hear: what they name has weights and activations beside the text model's."""
DENSE = frozenset(("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size"))
NOT_DENSE = r"expert|moe|lora_rank|ssm|mamba|conv|encoder|type_vocab"
"""Keys that all decoders like Llama's have, and words in those of others."""
NO_SLIPS = ("gemma3n_text", "gpt_neo", "ministral", "mllama")
"""Types of Transformers with the name of a known family but for a letter."""
NEAR = 0.85
"""How like a known family a name must be to be taken for a slip of the keyboard: lama is, mamba is not."""


def _is_unknown(kind: str, config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a family whose own code may describe it, and not of one here, or of one misspelt."""
    if kind in FORMATS or not kind.replace("-", "_").isidentifier():
        return False
    if towers := [config[key] for key in TOWERS if config.get(key)]:
        return all(isinstance(tower, dict) for tower in towers)
    return kind != "gemma3" and (kind in NO_SLIPS or "Did you mean" not in _other_way(kind, config))


def _refuse_other_towers(config: dict[str, Any], kind: object, file: Path) -> None:
    found = next((key for key in TOWERS if config.get(key)), None)
    if found is None:
        return
    rule = f"has more than a text model ({found}), which is not planned here: none of it is left out in silence"
    raise PlannerError(f"{file}: model_type", kind, rule, _text_alone(config))


def _text_alone(config: Mapping[str, Any]) -> str:
    """How the text model alone of one that sees or hears is planned."""
    if isinstance(config.get("text_config"), dict):
        return "To plan the text model alone, give its text_config as a config.json of its own"
    return "To plan the text model alone, give its sizes: --layers, --hidden, --heads, --kv-heads, --ffn, --vocab"


def _other_way(kind: str, config: Mapping[str, Any]) -> str:
    """What to give instead of a config.json whose family is not known. Another number in a family's name is another
    family, and sizes alone say enough of a dense decoder."""
    from difflib import get_close_matches  # only on the error path

    if any(map(config.get, TOWERS)):
        return _text_alone(config)
    alike = [name for name in FORMATS if re.findall(r"\d", name) == re.findall(r"\d", kind)]
    if near := get_close_matches(kind.lower(), alike, n=1, cutoff=NEAR):
        return f"Did you mean {near[0]}?"
    added = "docs/adding-a-model.md adds a family"
    decodes = all(str(name).endswith("ForCausalLM") for name in config.get("architectures") or ("",))
    if not decodes or not DENSE.issubset(config) or any(re.search(NOT_DENSE, str(key)) for key in config):
        return added[0].upper() + added[1:]
    return (
        "A decoder like Llama's can be given by its sizes: --layers, --hidden, --heads, --kv-heads, --ffn, --vocab; "
        + added
    )


NULL = {"mla.q_lora_rank": None, "sliding_window": None, "kv_heads": None, "head_dim": None,
        "moe.groups": 1, "moe.top_groups": 1}  # fmt: skip
"""What null means where a config.json has it in place of a number."""


def _value(keys: _Keys, field: str, names: tuple[str, ...], absent: dict[str, Any]) -> Any:
    """One field from the first of its keys that is there."""
    key = next((name for name in names if name in keys.config), names[0])
    if field in FLAGS:
        return keys.flag(key, absent.get(key, False))
    if field in NUMBERS:
        return keys.number(key, absent.get(key))
    if field == "activation":
        chosen = keys.config.get(key, absent.get(key))
        if not isinstance(chosen, str) or chosen not in ACTIVATIONS:
            raise keys.refusal(key, f"must be one of {', '.join(ACTIVATIONS)}")
        return ACTIVATIONS[chosen]
    if key in absent and absent[key] is None and keys.config.get(key) is None:
        return None
    if field in NULL and keys.config.get(key, 0) is None:
        return NULL[field]
    return keys.whole(key, absent.get(key))


def _complete(found: dict[str, Any], keys: _Keys, form: Format) -> None:
    """What follows from other fields, or needs more than one key."""
    heads, hidden, kind = found["heads"], found["hidden"], found["family"]
    found["head_dim"] = found.get("head_dim") or hidden // max(heads, 1)
    if kind == "falcon":
        found |= _falcon(keys, heads)
    elif kind == "gpt_neox":
        parallel = keys.flag("use_parallel_residual", True)
        found["block"] = "parallel" if parallel else "sequential"
    if found.get("kv_heads") is None:
        found["kv_heads"] = heads
    if found.get("ffn") is None:
        found["ffn"] = 4 * hidden
    if kind == "opt" and keys.config.get("word_embed_proj_dim") not in (None, hidden):
        raise keys.refusal("word_embed_proj_dim", f"must be the hidden size {hidden}", "Only opt-350m differs")
    if kind == "gpt2" and keys.number("embd_pdrop", 0.1) != found["dropout"]:
        raise keys.refusal("embd_pdrop", f"must be resid_pdrop, {found['dropout']:g}")
    if found.get("sliding_window") is not None:
        found["full_attention_every"] = _full_attention_every(keys, form, found["layers"])
    if found.get("positions", "rope") == "rope":
        theta, local, fraction, scaling = _rope(keys, kind)
        found |= {
            "rope_theta": theta,
            "rope_theta_local": local,
            "rotary_fraction": fraction,
            "rope_scaling": scaling,
        }


def _falcon(keys: _Keys, heads: int) -> dict[str, int]:
    """Falcon has two ages: one norm and one key-value head, or two norms and groups."""
    if keys.flag("new_decoder_architecture"):
        groups = keys.config.get("num_kv_heads")
        norms = keys.config.get("num_ln_in_parallel_attn")
        return {
            "kv_heads": heads if groups is None else keys.whole("num_kv_heads"),
            "layer_norms": 2 if norms is None else keys.whole("num_ln_in_parallel_attn"),
        }
    return {"kv_heads": 1 if keys.flag("multi_query", True) else heads, "layer_norms": 1}


def _full_attention_every(keys: _Keys, form: Format, layers: int) -> int:
    """After how many layers one sees everything: 0 where all slide."""
    if form.windows == "all":
        return 0
    kinds = keys.config.get("layer_types")
    if kinds is None:
        return keys.whole("sliding_window_pattern", int(form.windows))
    if not isinstance(kinds, list):
        raise keys.refusal("layer_types", "must be a list of names, one a layer")
    full = [place for place, one in enumerate(kinds, 1) if one == "full_attention"]
    every = full[0] if full else 0
    if len(kinds) != layers or full != (list(range(every, layers + 1, every)) if every else []):
        raise keys.refusal("layer_types", "must repeat one pattern: a number of sliding layers, then a full one")
    return every


def config_dict(model: ModelSpec) -> dict[str, Any]:
    """The config.json of a model in the format of transformers 5, with its model_type."""
    if model.described is not None:
        return dict(model.described.config)
    form = FORMATS[model.family]
    config: dict[str, Any] = {"architectures": [form.architecture], "model_type": model.family}
    for field, names in form.keys.items():
        value: Any = model
        for part in field.split("."):
            value = getattr(value, part)
        config[names[0]] = value
    config |= form.must
    if "query_pre_attn_scalar" in config:
        config["query_pre_attn_scalar"] = int(config["query_pre_attn_scalar"])
    if model.family in ("gpt2",):
        config["embd_pdrop"] = model.dropout
    if model.family == "gpt_neox":
        config["use_parallel_residual"] = model.block == "parallel"
    if model.family == "falcon":
        new = model.layer_norms == 2 or model.kv_heads not in (1, model.heads)
        config |= {"new_decoder_architecture": new, "multi_query": model.kv_heads == 1 and not new}
        config |= {"num_kv_heads": model.kv_heads, "num_ln_in_parallel_attn": model.layer_norms if new else None}
    if model.family == "deepseek_v2":
        limited = model.moe is not None and model.moe.groups > 1
        config |= {"topk_method": "group_limited_greedy" if limited else "greedy"}
    if model.mla:
        config |= {"num_key_value_heads": model.kv_heads, "head_dim": model.mla.qk_rope_head_dim}
    if form.windows not in ("", "all"):
        every = model.full_attention_every
        config["layer_types"] = [
            "full_attention" if every and not place % every else "sliding_attention"
            for place in range(1, model.layers + 1)
        ]
    if model.positions == "rope":
        config["rope_parameters"] = table = _rope_parameters(model)
        if model.family == "phi3" and ORIGINAL in table:
            config[ORIGINAL] = table[ORIGINAL]  # of the two places, this one is read
    return config


def _rope_parameters(model: ModelSpec) -> dict[str, Any]:
    scaling = model.rope_scaling or {"rope_type": "default"}
    table: dict[str, Any] = {key: list(one) if isinstance(one, tuple) else one for key, one in scaling.items()}
    table["rope_theta"] = model.rope_theta
    if model.family in PARTIAL:
        table["partial_rotary_factor"] = model.rotary_fraction
    if model.rope_theta_local is None:
        return table
    local = {"rope_type": "default", "rope_theta": model.rope_theta_local}
    return {"full_attention": table, "sliding_attention": local}


ORIGINAL = "original_max_position_embeddings"
PHI3_ORIGINAL = 4096
"""What Phi3Config assumes."""
OLD_NAMES = {"phi3": {"su": "longrope", "yarn": "longrope"}}
"""Kinds of scaling that a family's older files call otherwise (transformers 5.23, Phi3Config)."""

PARTIAL = {"phi": 0.5, "phi3": 1.0, "gpt_neox": 0.25}
"""Families that may turn a part of each head, and the part Transformers assumes when nothing is said."""


class _Keys:
    """Typed look-up in a config; the refusal names file, key and rule."""

    def __init__(self, config: dict[str, Any], file: Path) -> None:
        self.config, self.file = config, file

    def refusal(self, key: str, rule: str, fix: str = "") -> PlannerError:
        return PlannerError(f"{self.file}: {key}", self.config.get(key), rule, fix)

    def whole(self, key: str, absent: int | None = None) -> int:
        if key not in self.config and absent is None:
            raise self.refusal(key, "is missing, and nothing stands in for it")
        value = self.config.get(key, absent)
        if type(value) is not int:
            raise self.refusal(key, "must be a whole number")
        return value

    def number(self, key: str, absent: float | None) -> float | None:
        value = self.config.get(key, absent)
        if value is None and absent is None:
            return None
        if value is None or type(value) not in (int, float) or not abs(value) <= 1e30:  # nan is neither
            raise self.refusal(key, "must be a number")
        return float(value)

    def flag(self, key: str, absent: bool = False) -> bool:
        value = self.config.get(key, absent)
        if type(value) is not bool:
            raise self.refusal(key, "must be true or false")
        return value


def _read(file: Path) -> dict[str, Any]:
    with refusing(OSError, "model", file, "cannot be read", "Give a config.json, or the folder that holds one"):
        raw = reading.read_bytes(file)
    return decoded(raw, str(file))


def decoded(raw: bytes, name: str) -> dict[str, Any]:
    """The object in a config.json, or a refusal that names it."""
    with refusing(ValueError, name, None, "is not a JSON object", "Give the config.json of a Hugging Face model"):
        return msgspec.convert(reading.read_json(raw), dict[str, Any])


def _refuse_what_no_spec_says(keys: _Keys, kind: str, form: Format) -> None:
    for key in ("quantization_config", "compression_config"):
        if keys.config.get(key) is not None and kind not in SHIPPED_QUANTIZED:
            fix = "Use the config.json of the model before it was quantized"
            raise PlannerError(f"{keys.file}: {key}", None, "quantized weights are not supported", fix)
    for key, value in form.must.items():
        given = keys.config.get(key, value)
        if given != value and given is not None:
            said = str(value).lower() if isinstance(value, bool) else value
            raise keys.refusal(key, f"must be {said}: no other {kind} is planned here")


def _rope(keys: _Keys, kind: str) -> tuple[float, float | None, float, RopeScaling | None]:
    """(theta, theta of sliding layers, part of the head that turns, scaling).

    A non-empty rope_scaling wins over rope_parameters, as in transformers 5.
    """
    table_key = "rope_scaling" if keys.config.get("rope_scaling") else "rope_parameters"
    table = keys.config.get(table_key) or {}
    local: float | None = None
    if kind == "gemma3_text":
        local = 10000.0 if keys.config.get("rope_local_base_freq") is None else keys.number("rope_local_base_freq", 0)
        if isinstance(table, dict) and isinstance(table.get("full_attention"), dict):
            sliding = table.get("sliding_attention")
            if isinstance(sliding, dict):
                local = _Keys(sliding, Path(f"{keys.file}: {table_key}.sliding_attention")).number("rope_theta", local)
            table = table["full_attention"]
    if not isinstance(table, dict) or not all(map(_is_scaling, table.values())):
        raise keys.refusal(table_key, "must be one table of numbers and names", "Known kinds: see presets/README.md")
    table = {key: tuple(value) if isinstance(value, list) else value for key, value in table.items()}
    rope = _Keys(dict(table), Path(f"{keys.file}: {table_key}"))
    fraction = PARTIAL.get(kind, 1.0)
    for where, key in ((keys, "rotary_pct"), (keys, "partial_rotary_factor"), (rope, "partial_rotary_factor")):
        if key in where.config:
            fraction = where.number(key, None) or 0.0
            if kind not in PARTIAL and fraction != 1.0:
                raise where.refusal(key, f"must be 1: rotary positions turn the whole head of a {kind}")
    old = "rotary_emb_base" if "rotary_emb_base" in keys.config else "rope_theta"
    theta = rope.number("rope_theta", keys.number(old, ABSENT_ROPE_THETA.get(kind, 10000.0)))
    rope_type = table.get("rope_type", table.get("type", "default"))
    rope_type = OLD_NAMES.get(kind, {}).get(rope_type, rope_type) if isinstance(rope_type, str) else rope_type
    assert theta is not None  # the default is a number
    if rope_type == "default":
        return theta, local, fraction, None
    not_scaling = ("rope_theta", "rope_type", "type", "partial_rotary_factor")
    numbers = {key: value for key, value in table.items() if key not in not_scaling}
    if kind == "phi3" and rope_type == "longrope":
        numbers[ORIGINAL] = keys.whole(ORIGINAL, table.get(ORIGINAL, PHI3_ORIGINAL))
    return theta, local, fraction, {"rope_type": rope_type, **numbers}


def _is_scaling(value: object) -> bool:
    """A number, a name, or a list of numbers."""
    if isinstance(value, list):
        return all(isinstance(one, int | float) and not isinstance(one, bool) and abs(one) <= 1e30 for one in value)
    return isinstance(value, str) or (isinstance(value, int | float) and abs(value) <= 1e30)
