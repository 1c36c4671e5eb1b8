"""What the model of a config.json is, where it is no causal language model: an encoder, or an encoder with a decoder.

Not here: families that are known (formats.py), or models that see or hear beside a text model (huggingface.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

ENCODER, BOTH = "an encoder", "an encoder with a decoder"
CAUSAL = re.compile(r"ForCausalLM|LMHead|GenerationDecoder$")
"""In the name of an architecture that predicts the next token."""
OF_ENCODERS = re.compile(
    r"For(MaskedLM|PreTraining|NextSentencePrediction|QuestionAnswering|MultipleChoice|MaskedImageModeling|CTC"
    r"|\w*Classification|\w*Detection|\w*Segmentation|DepthEstimation)$"
)
"""How the name of an architecture ends that reads a whole sequence at once."""
TYPES = dict.fromkeys(
    ("albert", "beit", "bert", "big_bird", "camembert", "clip", "convbert", "convnext", "convnextv2", "data2vec-text",
     "deberta", "deberta-v2", "deit", "dinov2", "dinov2_with_registers", "dinov3_vit", "distilbert", "electra", "ernie",
     "eurobert", "flaubert", "funnel", "hubert", "layoutlm", "layoutlmv2", "layoutlmv3", "longformer", "luke",
     "megatron-bert", "mobilebert", "modernbert", "mpnet", "mra", "nomic_bert", "nystromformer", "rembert", "resnet",
     "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "siglip", "squeezebert", "swin", "swinv2", "vit",
     "vit_mae", "wav2vec2", "wavlm", "xlm-roberta", "xlm-roberta-xl", "xmod", "yoso"), ENCODER
) | dict.fromkeys(
    ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "encoder-decoder", "fsmt", "led", "longt5", "m2m_100",
     "marian", "mbart", "mt5", "mvp", "nllb-moe", "pegasus", "pegasus_x", "plbart", "pop2piano", "prophetnet",
     "seamless_m4t", "speech-encoder-decoder", "speech_to_text", "switch_transformers", "t5", "t5gemma", "udop", "umt5",
     "vision-encoder-decoder", "whisper"), BOTH
)  # fmt: skip
"""Types whose published models are encoders, or have one: what says nothing of its architecture is taken for that."""


def other_than_causal(config: Mapping[str, Any], *, decodes: bool = False) -> str | None:
    """What the model of a config.json is, or None of a causal language model. A type that has a causal form too
    (`decodes`) is something else only where the file names an architecture that is."""
    stated = config.get("architectures")
    names = [name for name in stated if isinstance(name, str)] if isinstance(stated, list) else []
    if any(map(CAUSAL.search, names)):
        return None
    kind = TYPES.get(str(config.get("model_type")))
    if not names:
        return None if decodes or config.get("is_decoder") is True else kind
    if config.get("is_encoder_decoder") is True:
        return BOTH
    if any(map(OF_ENCODERS.search, names)):
        return ENCODER
    return kind


def sentence(kind: object, what: str) -> str:
    """Why such a model is refused."""
    return f"{kind} is {what}: planner plans causal language models"
