"""Claims about every type of causal language model that Transformers has, and some of those that see: it is imported,
and has all the parameters of its module, or is refused in one line.

Not here: whether the peak of what is imported is right (test_imported.py).
"""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)

from executor.worker.imported import describe as describing
from executor.worker.imported.describe import config_of, describe
from executor.worker.imported.facts import spec_of
from executor.worker.imported.record import NotDescribed
from planner.inventory import parameters

TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
SEEING = ("internvl", "llama4", "llava", "mistral3", "mllama", "qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe",
          "smolvlm")  # fmt: skip
"""Types of models that see, of which there are published configurations here; their text models are trained."""
HEARING = tuple(
    one for one in MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES if one not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
)
"""Types of models that hear, and do not see; their text models are trained, too."""
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
INDEXER = {"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 256, "indexer_budget": 2048,
           "indexer_compress_ratio": 16}  # fmt: skip
FIELDS: dict[str, dict[str, Any]] = {
    "big_bird": {"is_decoder": True, "attention_type": "original_full"},
    "cohere_compass_text": {"rope_parameters": {"full_attention": ROPE, "sliding_attention": ROPE}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 8, "clip_qkv": 8}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "gemma4_assistant": {"text_config": {"hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0}},
    "hunyuan_v1_dense": {"head_dim": 128},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"num_hidden_layers": 6, "layer_types": ["conv", "conv", "full_attention"] * 2},
    "longcat_flash": {"n_routed_experts": 8, "zero_expert_num": 4, "moe_topk": 3},
    "ministral": {"head_dim": 128},
    "nemotron": {"num_key_value_heads": 48, "head_dim": 128},
    "qwen4_exp_text": INDEXER,
    "qwen4_exp": {"text_config": INDEXER},
    "reformer": {"is_decoder": True},
    "xmod": {"default_language": "en_XX"},
}
"""Fields that every published config.json of a type has, and without whose defaults Transformers cannot build it; and
fewer experts of LongCat-Flash, whose loop over all 768 takes longer than an import may."""
REFUSED: dict[str, str] = {
    "blt": "num_hidden_layers is None",
    "gemma3n": "Transformers cannot build it: ImportError",
    "gemma4_assistant": "Transformers cannot build it",
    "gemma4_unified_assistant": "Transformers cannot build it",
    "hrm_text": "num_hidden_layers is 128, and its longest list of layers has 16",
    "inkling2_text": "what it does between its layers is not the same for each",
    "musicgen": "Transformers cannot build it",
    "musicgen_melody": "Transformers cannot build it",
    "prophetnet": "its head is no linear module that takes all tokens alike",
    "reformer": "axial_pos_shape",
    "xlm": "what it does between its layers is not the same for each",
    "zamba": "its operations are others at another length",
    "qwen3_omni_moe": "Transformers cannot build it",
    "voxtral_realtime": "its code fails with ValueError",
    **dict.fromkeys(("kyutai_speech_to_text", "qwen2_5_omni"), "is no causal language model of Transformers"),
    **dict.fromkeys(("qwen4_exp", "qwen4_exp_text"), "the numbers in its tensors decide their sizes"),
}
"""Types that are not imported, and why. A listed type that is imported fails its test."""


def config_file(kind: str, architecture: str) -> dict[str, Any]:
    """A type's default configuration, as a config.json of an architecture says it."""
    raw: dict[str, Any] = CONFIG_MAPPING[kind](**FIELDS.get(kind, {}), architectures=[architecture]).to_dict()
    return {key: value for key, value in raw.items() if key not in ("transformers_version", "dtype")}


HYBRID = re.compile(
    "bamba|hybrid|deepseek_v4|falcon_h1|gemma3n|kimi|mamba|minimax|nemotron_h|next|qwen3_5|qwen4|rwkv|zamba|lstm|doge"
)
"""Types that take minutes: they have loops over chunks, or many operations a layer."""
SEEING_IN_CI = Random(32).sample(SEEING, 1)
IN_CI = Random(31).sample([one for one in TYPES if not HYBRID.search(one)], 6)


@pytest.mark.parametrize("kind", [pytest.param(one, marks=() if one in IN_CI else pytest.mark.long) for one in TYPES])
def test_a_type_is_imported_with_all_its_parameters_or_refused_in_one_line(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(describing, "VARIANTS", {"mixed": describing.VARIANTS["mixed"]})
    check(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind], REFUSED)


@pytest.mark.parametrize(
    "kind", [pytest.param(one, marks=() if one in SEEING_IN_CI else pytest.mark.long) for one in SEEING]
)
def test_a_type_that_sees_is_imported_with_all_its_parameters(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(describing, "VARIANTS", {"mixed": describing.VARIANTS["mixed"]})
    check(kind, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[kind], {})


@pytest.mark.parametrize("kind", [pytest.param(one, marks=pytest.mark.long) for one in HEARING])
def test_a_type_that_hears_is_imported_with_all_its_parameters_or_refused_in_one_line(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(describing, "VARIANTS", {"mixed": describing.VARIANTS["mixed"]})
    check(kind, MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES[kind], REFUSED)


def check(kind: str, architecture: str, refused: dict[str, str]) -> None:
    raw = config_file(kind, architecture)
    if kind in refused:
        with pytest.raises(NotDescribed) as refusal:
            describe(raw, ("cuda",))
        assert refused[kind] in str(refusal.value)
        assert "\n" not in str(refusal.value)
        return
    described = describe(raw, ("cuda",))
    with torch.device("meta"):
        module = describing.built(config_of(raw), torch.bfloat16, padded=described.padded)

    model = spec_of(kind, raw, config_of(raw), described)

    assert parameters(model) == sum(one.numel() for one in module.parameters())
