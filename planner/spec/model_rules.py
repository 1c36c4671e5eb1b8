"""What a model's facts must keep: sizes that exist, and habits that the family's modules have.

Not here: reading facts (presets.py, huggingface.py), or what the families' facts are (formats.py).
"""

from __future__ import annotations

import math

from planner.basics.errors import PlannerError, did_you_mean
from planner.basics.names import check_name, check_texts
from planner.spec import ModelSpec, Moe
from planner.spec.formats import FORMATS
from planner.spec.model import Mla, RopeScaling
from planner.spec.options import LARGEST_SEQ, of_part

LARGEST = {option.name: int(option.high) for option in of_part("model")} | {
    "head_dim": 2**16,
    "max_seq_len": LARGEST_SEQ,
}
"""Sizes above these are typing errors: each is over ten times the largest in any published model."""

ROPE_SCALING = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "longrope": ("original_max_position_embeddings",),
}
"""Kinds of rotary scaling the trainer takes, and the numbers each must have."""

LISTS = {"longrope": ("short_factor", "long_factor")}
"""And the lists: a number for each frequency, which is a pair of elements that turn."""


BLOCK_FACTS = (
    "block", "norm", "layer_norms", "embedding_norm", "qk_norm", "gated", "activation", "qkv_bias", "output_bias",
    "mlp_bias", "head_bias", "positions", "rotary_fraction", "sliding_window", "attention_sinks",
    "attention_soft_cap", "logit_soft_cap", "dropout", "attention_dropout",
)  # fmt: skip
"""Facts that a family fixes unless its config.json has a key for them."""

FREE = {
    "falcon": ("layer_norms",),
    "gpt_neox": ("block", "rotary_fraction"),
    "phi": ("rotary_fraction",),
    "phi3": ("rotary_fraction",),
}
"""Facts beside the plain keys that a family's config.json may choose."""


def check_model(spec: ModelSpec, where: str) -> None:
    """Refuse sizes that no decoder of the family can have. `where` names the file in the message."""

    def refuse(key: str, rule: str, fix: str = "") -> PlannerError:
        return PlannerError(f"{where}: {key}", getattr(spec, key), rule, fix)

    check_name(spec.name, f"{where}: name")
    check_texts(spec.rope_scaling, f"{where}: rope_scaling")
    if spec.described is None and spec.family not in FORMATS:
        raise refuse("family", "is not a model_type this version plans", did_you_mean(spec.family, FORMATS))
    for key, largest in LARGEST.items():
        if not 1 <= getattr(spec, key) <= largest:
            raise refuse(key, f"must be from 1 to {largest}")
    if spec.parameters is not None and spec.parameters < 1:
        raise refuse("parameters", "must be at least 1", "Leave it out when it is not published")
    if spec.heads % spec.kv_heads:
        fix = _divisor_fix("kv_heads", spec.heads, spec.kv_heads)
        raise refuse("kv_heads", f"must divide the {spec.heads} attention heads", fix)
    if spec.described is not None:
        return
    if spec.hidden % spec.heads:
        fix = _divisor_fix("heads", spec.hidden, spec.heads)
        raise refuse("heads", f"must divide the hidden size {spec.hidden}, as Transformers demands", fix)
    if spec.positions == "rope" and spec.head_dim % 2:
        fix = f"Try head_dim = {spec.head_dim + 1}"
        raise refuse("head_dim", "must be even, since rotary positions turn pairs", fix)
    if not 0 < spec.norm_eps < 1:
        raise refuse("norm_eps", "must be between 0 and 1", "Llama uses 1e-5")
    if not 0 < spec.rope_theta < math.inf:
        raise refuse("rope_theta", "must be above 0", "Llama 2 uses 10000, Llama 3 500000")
    if spec.rope_scaling is not None:
        _check_rope_scaling(spec.rope_scaling, spec.rotary_dim // 2, f"{where}: rope_scaling")
    _check_facts(spec, where)
    if spec.moe is not None:
        _check_moe(spec, spec.moe, where)
    if spec.mla is not None:
        _check_mla(spec.mla, where)


def _check_facts(spec: ModelSpec, where: str) -> None:
    """Refuse facts that the family's modules do not have: a plan for them could not be trained."""
    form = FORMATS[spec.family]
    plain = ModelSpec(name="", layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, ffn=1, vocab=1)
    for field in BLOCK_FACTS:
        allowed = form.facts.get(field, getattr(plain, field))
        free = field in form.keys or field in FREE.get(spec.family, ())
        if not free and getattr(spec, field) != allowed:
            rule = f"must be {_said(allowed)} in a {spec.family}"
            raise PlannerError(f"{where}: {field}", _said(getattr(spec, field)), rule, "See planner/spec/formats.py")
    for field in ("moe", "mla"):
        needed = any(key.startswith(f"{field}.") for key in form.keys)
        if needed != (getattr(spec, field) is not None):
            rule = f"a {spec.family} {'needs' if needed else 'has no'} table [{field}]"
            raise PlannerError(f"{where}: {field}", None, rule)
    if spec.positions == "rope" and spec.rotary_dim % 2:
        rule = f"must make an even part of the head of {spec.head_dim}, since rotary positions turn pairs"
        raise PlannerError(f"{where}: rotary_fraction", spec.rotary_fraction, rule)


def _said(value: object) -> object:
    return str(value).lower() if isinstance(value, bool) else value


def _check_moe(spec: ModelSpec, moe: Moe, where: str) -> None:
    rules = (
        ("experts", 1, 2**16),
        ("top_k", 1, moe.experts),
        ("expert_ffn", 1, LARGEST["ffn"]),
        ("shared_experts", 0, 2**10),
        ("dense_layers", 0, spec.layers - 1),
        ("top_groups", 1, moe.groups),
    )
    for key, least, most in rules:
        if not least <= getattr(moe, key) <= most:
            raise PlannerError(f"{where}: moe.{key}", getattr(moe, key), f"must be from {least} to {most}")
    if moe.experts % moe.groups:
        raise PlannerError(f"{where}: moe.groups", moe.groups, f"must divide the {moe.experts} experts")


def _check_mla(mla: Mla, where: str) -> None:
    largest = LARGEST["hidden"]
    for key in mla.__struct_fields__:
        value = getattr(mla, key)
        if value is not None and not 1 <= value <= largest:
            raise PlannerError(f"{where}: mla.{key}", value, f"must be from 1 to {largest}")
    if mla.qk_rope_head_dim % 2:
        rule = "must be even, since rotary positions turn pairs"
        raise PlannerError(f"{where}: mla.qk_rope_head_dim", mla.qk_rope_head_dim, rule)


def _check_rope_scaling(scaling: RopeScaling, frequencies: int, where: str) -> None:
    kind = str(scaling.get("rope_type"))
    if kind not in ROPE_SCALING:
        raise PlannerError(f"{where}.rope_type", kind, "is not supported", did_you_mean(kind, ROPE_SCALING))
    for key in ROPE_SCALING[kind]:
        if not _is_positive(value := scaling.get(key)):
            raise PlannerError(f"{where}.{key}", value, f"must be a number above 0 for rope_type {kind}")
    for key in LISTS.get(kind, ()):
        values = scaling.get(key)
        if not isinstance(values, tuple) or len(values) != frequencies or not all(map(_is_positive, values)):
            rule = f"must be {frequencies} numbers above 0, one a frequency, for rope_type {kind}"
            raise PlannerError(f"{where}.{key}", None, rule)
    for key in scaling.keys() - {*LISTS.get(kind, ())}:
        if isinstance(scaling[key], tuple):
            raise PlannerError(f"{where}.{key}", None, f"must be one number or name for rope_type {kind}")


def _is_positive(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf


def _divisor_fix(key: str, whole: int, wanted: int) -> str:
    divisors = [d for d in range(1, min(whole, 2 * wanted) + 1) if whole % d == 0]
    near = sorted(sorted(divisors, key=lambda d: abs(d - wanted))[:2])
    return f"Try {key} = {' or '.join(map(str, near))}"
