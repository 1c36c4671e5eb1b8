"""Claims about config.json files of models that are no causal language models: they are refused by what they are.

Not here: families that are known, or near one by name (test_config_defaults.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from planner.basics.errors import PlannerError
from planner.spec.causal import BOTH, ENCODER, other_than_causal
from planner.spec.huggingface import spec_of

OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "BERT": ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "bert is an encoder: "),
    "BERT without an architecture": ({"model_type": "bert", "hidden_size": 768}, "bert is an encoder: "),
    "ModernBERT": ({"model_type": "modernbert", "architectures": ["ModernBertForMaskedLM"]},
                   "modernbert is an encoder: "),
    "ViT": ({"model_type": "vit", "architectures": ["ViTForImageClassification"]}, "vit is an encoder: "),
    "an encoder of no known type": ({"model_type": "newbert", "architectures": ["NewBertForTokenClassification"]},
                                    "newbert is an encoder: "),
    "T5": ({"model_type": "t5", "is_encoder_decoder": True, "architectures": ["T5ForConditionalGeneration"]},
           "t5 is an encoder with a decoder: "),
    "Whisper": ({"model_type": "whisper", "is_encoder_decoder": True,
                 "architectures": ["WhisperForConditionalGeneration"]}, "whisper is an encoder with a decoder: "),
    "T5 without an architecture": ({"model_type": "t5"}, "t5 is an encoder with a decoder: "),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_a_model_that_is_no_causal_language_model_is_refused_by_what_it_is(name: str) -> None:
    config, rule = OTHERS[name]

    with pytest.raises(PlannerError) as refusal:
        spec_of(config, Path("config.json"), "mine")

    assert f"{rule}planner plans causal language models" in refusal.value.sentence
    assert "Did you mean" not in refusal.value.sentence


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "bert", "architectures": ["BertLMHeadModel"]},
        {"model_type": "bert", "is_decoder": True},
        {"model_type": "bart", "is_encoder_decoder": False, "architectures": ["BartForCausalLM"]},
        {"model_type": "olmo2"},
        {"model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"]},
        {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
        {"model_type": "emu3", "architectures": ["Emu3ForConditionalGeneration"]},
    ],
)
def test_a_decoder_is_no_other_model(config: dict[str, Any]) -> None:
    assert other_than_causal(config) is None


def test_a_type_with_a_causal_form_is_another_model_only_where_its_file_says_so() -> None:
    assert other_than_causal({"model_type": "bart"}) == BOTH
    assert other_than_causal({"model_type": "bart"}, decodes=True) is None
    assert other_than_causal({"model_type": "bert", "architectures": ["BertModel"]}, decodes=True) == ENCODER
