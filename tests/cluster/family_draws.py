"""Draws by seed of every family that is launched at its own defaults, packed and padded: what else is drawn is the
layout, the method, the precision and the batch.

A model's config.json holds its sizes alone, so that dropouts, biases, windows and ties are those of the family's
configuration class. Not here: other draws (draws.py), the runs, or what is claimed of them (test_family_draws.py).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, NamedTuple, get_args

from cases import job
from chats import chat_file
from combinations import RUN, TRACED, on_gpus, refusal
from draws import UNDRAWN, Draw, any_batch
from msgspec.structs import replace

from planner.inventory import default_lora
from planner.spec import Layout, ModelSpec
from planner.spec.formats import FORMATS
from planner.spec.huggingface import spec_of
from planner.spec.job import Packing

HEADS = {"num_hidden_layers": 3, "vocab_size": 512, "num_attention_heads": 4}
PLAIN: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 176, **HEADS}
GROUPED = {**PLAIN, "num_key_value_heads": 2, "head_dim": 16}
FEW = {"num_experts_per_tok": 2}

SIZES: dict[str, dict[str, Any]] = {
    "llama": PLAIN,
    "mistral": GROUPED,
    "qwen2": {**PLAIN, "num_key_value_heads": 2},
    "qwen3": GROUPED,
    "gemma2": GROUPED,
    "gemma3_text": GROUPED,
    "phi": PLAIN,
    "phi3": {**PLAIN, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "vocab_size": 512},
    "gpt_neox": PLAIN,
    "opt": {"hidden_size": 64, "ffn_dim": 256, **HEADS},
    "bloom": {"hidden_size": 64, "n_layer": 3, "num_attention_heads": 4, "vocab_size": 512},
    "falcon": {"hidden_size": 64, **HEADS},
    "mixtral": {**GROUPED, "num_local_experts": 4},
    "qwen3_moe": {**GROUPED, **FEW, "num_experts": 4, "moe_intermediate_size": 96},
    "gpt_oss": {**GROUPED, **FEW, "num_local_experts": 4},
}
"""What a config.json says of each family beside its name: sizes, and nothing that a configuration class has a default
for where that is small enough."""


def model(family: str) -> ModelSpec:
    """The small model of a family."""
    return spec_of({"model_type": family, **SIZES[family]}, Path("config.json"), f"small-{family.replace('_', '-')}")


class Kind(NamedTuple):
    """A family and how its documents are laid out."""

    family: str
    packing: Packing


def refused(kind: Kind) -> str | None:
    """Why nothing trains the kind, None where something does."""
    return refusal(on_gpus(model(kind.family), replace(job("full"), packing=kind.packing), Layout(engine="single")))


KINDS = [
    kind
    for family in FORMATS
    if family in SIZES
    for packing in get_args(Packing)
    if refused(kind := Kind(family, packing)) is None
]
"""Every family that is launched, with each way to lay out its documents that is."""


def family_draws(seed: int, count: int) -> dict[str, Draw]:
    """By name, which says the seed, the place and the kind: as many draws as asked, the same for the same seed.

    All kinds come before any comes again. Engines are drawn alike, and of each its combinations.
    """
    dice = random.Random(seed)
    launched = tuple(dict.fromkeys((*TRACED.values(), *RUN.values())))
    engines = sorted({one.engine for one in launched})
    by_engine = {engine: [one for one in launched if one.engine == engine] for engine in engines}
    kinds: list[Kind] = []
    while len(kinds) < count:
        kinds += dice.sample(KINDS, len(KINDS))
    found: dict[str, Draw] = {}
    for place, kind in enumerate(kinds[:count]):
        while True:
            drawn = of_kind(any_batch(dice, dice.choice(by_engine[dice.choice(engines)])), kind)
            if drawn.job.optimizer.name != UNDRAWN and refusal(on_gpus(*drawn)) is None:
                break
        found[f"seed{seed}-{place:02}-{kind.family}-{kind.packing}"] = drawn
    return found


def of_kind(drawn: Draw, kind: Kind) -> Draw:
    """The draw with the kind's model, adapters on matrices that this has, and documents where these are packed."""
    small = model(kind.family)
    lora = None if drawn.job.adapters is None else replace(drawn.job.adapters, targets=default_lora(small).targets)
    recipe = replace(drawn.job.recipe, data=chat_file() if kind.packing == "packed" else None)
    return Draw(small, replace(drawn.job, packing=kind.packing, lora=lora, recipe=recipe), drawn.layout)
