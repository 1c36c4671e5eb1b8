"""Axolotl's keys that a model decides: the types whose modules its Liger plugin replaces, the weights that stay trained
where others are frozen by their names, the loss of routers, and restarts of adapters.

Not here: what the keys set (axolotl.py), its functions of adapters (functions.py), or other formats' keys (bymodel.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from planner.ask.fromfile.sheet import Ignored, OptionLine
from planner.basics.quantities import BYTES
from planner.inventory import layer_kinds, unit_weights
from planner.inventory.mlp import balance_bytes
from planner.inventory.standins import LIGER_TYPES
from planner.spec import ModelSpec

LIGER_PLUGIN = (
    "deepseek_v2", "exaone4", "falcon_h1", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma4", "gemma4_text",
    "gemma4_unified", "gemma4_unified_text", "glm4", "glm4v", "glm4v_moe", "gpt_oss", "granite", "granitemoe",
    "hunyuan_v1_dense", "hunyuan_v1_moe", "internvl", "jamba", "llama", "llama4", "llama4_text", "llava", "ministral",
    "mistral", "mixtral", "mllama", "mllama_text_model", "nemotron", "olmo2", "olmo3", "paligemma", "phi3", "pixtral",
    "qwen2", "qwen2_5_vl", "qwen2_5_vl_text", "qwen2_vl", "qwen2_vl_text", "qwen3", "qwen3_5", "qwen3_5_moe",
    "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "qwen3_vl", "qwen3_vl_moe", "qwen3_vl_moe_text",
    "qwen3_vl_text", "smollm3", "smolvlm",
)  # fmt: skip
"""Types of which the plugin replaces something: Liger-Kernel's own (0.8.0, which Axolotl asks for,
transformers/monkey_patch.py, MODEL_TYPE_TO_APPLY_LIGER_FN) and its own (067b021, integrations/liger/plugin.py). Of
others it makes the fused loss alone."""
OF_LIGER = "liger_"
"""How the plugin's keys begin."""
FUSED_LOSS = "liger_fused_linear_cross_entropy"
LAYER_NORMS = "liger_layer_norm"

UNFROZEN = "unfrozen_parameters"
"""Axolotl's key of patterns, of which one must match the beginning of a weight's name, or the weight is frozen
(067b021, train.py, setup_model_and_tokenizer, and utils/freeze.py, freeze_layers_except)."""
UNDER_ADAPTERS = "base_model."
"""How names of weights begin under peft's modules (0.21, peft_model.py)."""
OTHER_START = re.compile(r"\^?(?P<first>\w)(?![?*{])")
WHOLE_TEXT = re.compile(r"\^?model\\?\.language_model(\\?\.\*?)?")
"""A pattern of all that is in the text model of one that sees; its head is beside it."""
HEAD = re.compile(r"\^?lm_head(\\?\.(\*|weight\$?)?)?")


ROUTERS = "model_config.output_router_logits"
"""Axolotl's key of Transformers' loss for balance between experts."""
SMALL_SHARE = 0.01
"""Of what cross-entropy on whole logits holds at once: three fp32 figures a logit (inventory/ends.py)."""


RESTARTS = "relora"
RESTART_COPIES = 3
"""Of one matrix, in fp32 at most, that a restart holds between two steps: what is merged, the weight of the checkpoint
and their sum (067b021, monkeypatch/relora.py, merge_and_save)."""


def means(one: Ignored) -> bool:
    """Whether a key means something by the model."""
    return one.key.startswith(OF_LIGER) or one.key in (UNFROZEN, ROUTERS, RESTARTS)


def _routers(one: Ignored, model: ModelSpec) -> Ignored:
    """The loss of a mixture's routers, which is next to nothing where experts are few beside the vocabulary."""
    if (moe := model.moe) is None:
        return one
    kept, logits = balance_bytes(model.layers - moe.dense_layers, moe.experts), model.vocab * 3 * BYTES["fp32"]
    if kept > SMALL_SHARE * logits:
        return one
    why = f"keeps at most {kept:,} bytes a token, {100 * kept / logits:.1f} % of the logits', which are not counted"
    return Ignored(one.key, one.value, why, "none")


def of_model(
    lines: list[OptionLine], ignored: Sequence[Ignored], model: ModelSpec
) -> tuple[list[OptionLine], tuple[Ignored, ...]]:
    """The account of a file as this model has it."""
    gone: list[OptionLine] = []
    if model.family not in LIGER_PLUGIN:
        gone = [line for line in lines if line.keys and all(map(_is_part, line.keys))]
        why = f"Axolotl's Liger plugin knows no {model.family}, and replaces nothing"
        ignored = [Ignored(one.key, one.value, why, "none") if _is_part(one.key) else one for one in ignored]
        ignored += [Ignored(key, True, why, "none") for line in gone for key in line.keys]
    lines = [line for line in lines if line not in gone]
    return lines, tuple(one if one.memory == "same" else _of_key(one, lines, model) for one in ignored)


def _of_key(one: Ignored, lines: Sequence[OptionLine], model: ModelSpec) -> Ignored:
    """A key that makes a bound, as this model has it."""
    told = {line.option: line.value for line in lines}
    if one.key == UNFROZEN:
        return _unfrozen(one, model, adapters=told.get("method", "full") != "full")
    if one.key == LAYER_NORMS and (model.family in LIGER_TYPES if model.described else model.norm != "layernorm"):
        return Ignored(one.key, one.value, f"{model.name} has no such part that is trained", "none")
    if one.key == RESTARTS:
        return _restarts(one, told, model)
    return _routers(one, model) if one.key == ROUTERS else one


def _is_part(key: str) -> bool:
    return key.startswith(OF_LIGER) and key != FUSED_LOSS


def _unfrozen(one: Ignored, model: ModelSpec, *, adapters: bool) -> Ignored:
    """A list of what stays trained: adapters that it does not name are frozen, with which nothing is trained, and
    the whole text of a model that sees is what a plan on text trains."""
    patterns = [str(pattern) for pattern in (one.value if isinstance(one.value, list) else [one.value])]
    if adapters and all(map(_leaves_adapters_out, patterns)):
        why = f"names no adapter ({UNDER_ADAPTERS}...): Axolotl trains nothing; estimated as if it were absent"
        return Ignored(one.key, one.value, why, "none")
    towers = model.described is not None and model.described.towers
    text, head = (any(known.fullmatch(pattern) for pattern in patterns) for known in (WHOLE_TEXT, HEAD))
    if towers and not adapters and text and (head or model.tied):
        return Ignored(one.key, one.value, "the whole text model: towers stay frozen, as is estimated", "none")
    return one


def _leaves_adapters_out(pattern: str) -> bool:
    """Whether a pattern begins with a letter that no name under peft's modules begins with."""
    start = OTHER_START.match(pattern)
    return start is not None and "|" not in pattern and start["first"] != UNDER_ADAPTERS[0]


def _restarts(one: Ignored, told: Mapping[str, Any], model: ModelSpec) -> Ignored:
    """Restarts merge one matrix after another between steps, when nothing of a step is there: no peak, where the
    logits of a step are as large."""
    logits = told.get("micro_batch_size", 1) * told.get("seq_len", 0) * model.vocab * 3
    largest = max(weight.elements for kind in layer_kinds(model) for weight in unit_weights(model)[kind])
    if told.get("loss") not in (None, "whole") or logits < RESTART_COPIES * largest:
        return one
    return Ignored(one.key, one.value, "merges one matrix after another between steps, below a step's peak", "none")
