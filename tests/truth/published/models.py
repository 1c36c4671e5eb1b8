"""Which model a measured row means: its kind of blocks by name, its sizes as the row states them.

Not here: the names (sources.py).
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

import msgspec

from planner.calibrate.asked import CannotPredict
from planner.spec import ModelSpec, Moe, presets
from tests.truth.published import sources
from tests.truth.published.notes import Notes, unknown
from tests.truth.published.rows import WordRow

SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tied")


@lru_cache(maxsize=512)
def _base_model(name: str, family: str | None) -> tuple[ModelSpec, bool, bool]:
    """(the preset whose blocks a model of that name has, whether it is its name, whether its sizes are meant too).

    A model of no known name has the blocks of its family, which is a model_type of Transformers.
    """
    for pattern, why in sources.NOT_DECODERS.items():
        if re.fullmatch(pattern, name, re.IGNORECASE):
            raise CannotPredict(
                f"{name} is {why}" if why.startswith("an") or why.startswith("a ") else f"{name}: {why}"
            )
    plain = name.lower().removesuffix(" truncated")
    if plain in presets.names("models") or plain in presets.aliases("models"):
        return presets.model(plain), True, True
    known = sources.looked_up(sources.FAMILIES, name)
    if known is not None:
        return msgspec.structs.replace(presets.model(known.preset), **known.changes), False, known.itself
    for preset in presets.names("models") if family is not None else ():
        if (spec := presets.model(preset)).family == family:
            return spec, False, False
    raise unknown("model", name, (*presets.names("models"), *presets.aliases("models")))


_MODELS: dict[tuple[Any, ...], tuple[ModelSpec, tuple[str, ...]]] = {}


def model_of(row: WordRow, notes: Notes) -> ModelSpec:
    """The row's model; equal rows share one value, which the walks are cached by."""
    stated = row.model
    key = (*msgspec.structs.astuple(stated), row.layout.seq)
    if key not in _MODELS:
        own = Notes()
        _MODELS[key] = _made_model(row, own), tuple(own.made)
    model, made = _MODELS[key]
    for one in made:
        notes.add(one)
    return model


def stated_seq_len(row: WordRow) -> int | None:
    """Tokens of a sequence as is known of its table, else as the row says."""
    quirk = sources.QUIRKS.get(row.source.repo_or_paper, sources.NO_QUIRK)
    known = sources.looked_up(quirk.seq_len, row.model.name)
    return row.layout.seq if known is None else int(known[1])


def _made_model(row: WordRow, notes: Notes) -> ModelSpec:
    stated = row.model
    if stated.name is None:
        raise CannotPredict("model not stated")
    base, exact, itself = _base_model(stated.name, stated.family)
    sizes = {name: getattr(stated, name) for name in SIZES if getattr(stated, name) is not None}
    missing = [name for name in ("layers", "hidden", "heads") if name not in sizes]
    if missing and not itself:
        raise CannotPredict(f"model sizes not stated: {', '.join(missing)}")
    if missing and not exact:
        notes.add(f"model sizes not stated: those of {base.name}")
    changed = dict(sizes)
    if not missing:
        heads = sizes["heads"]
        changed.setdefault("kv_heads", base.kv_heads if exact else heads)
        changed.setdefault("ffn", base.ffn if exact else 4 * sizes["hidden"])
        if "ffn" not in sizes and not exact:
            notes.add("ffn not stated: 4 x hidden")
        head_dim = stated.head_dim or (base.head_dim if exact else sizes["hidden"] // heads)
        changed["head_dim"] = head_dim
    if "tied" not in sizes and not exact:
        notes.add(f"tied embeddings not stated: {str(base.tied).lower()}")
    if base.moe is not None:
        changed["moe"] = _experts(row, base.moe)
        changed["ffn"] = base.ffn
    if base.positions == "learned":
        changed["max_seq_len"] = stated_seq_len(row) or base.max_seq_len
    else:
        changed["max_seq_len"] = max(base.max_seq_len, stated_seq_len(row) or 0)
    spec = msgspec.structs.replace(base, name=stated.name, parameters=None, **changed)
    if spec.hidden % spec.heads and stated.head_dim is None and not exact:
        raise CannotPredict(f"hidden {spec.hidden} is not a multiple of {spec.heads} heads, and no head size is stated")
    return spec


def _experts(row: WordRow, moe: Moe) -> Moe:
    stated = row.model
    return msgspec.structs.replace(
        moe,
        experts=stated.experts or moe.experts,
        top_k=stated.top_k or moe.top_k,
        expert_ffn=stated.ffn or moe.expert_ffn,
    )
