"""The layers of a model of Transformers, whatever its family calls them.

Not here: what is done to them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

from torch import nn

from planner.spec.described import Described

LEFT_OUT = ("auto_map", "attn_implementation", "_attn_implementation", "experts_implementation", "_name_or_path")
"""Keys of a config.json that name code, or where to fetch it."""
NUMBERED = "hybrid_layer_ids"
"""What Zamba 2 calls the numbers of its layers with attention."""
AGAIN = "num_blocks"
"""What xLSTM calls its number of layers beside what others do."""


def config_of(raw: dict[str, Any]) -> Any:
    """Transformers' configuration of a decoded config.json. What would choose code, or fetch it, is left out."""
    from transformers import AutoConfig

    kept = {key: deepcopy(value) for key, value in raw.items() if key not in LEFT_OUT}  # which it may write to
    return AutoConfig.for_model(**kept)


def decoder_config(config: Any) -> Any:
    """The part of a configuration that its decoder is made of."""
    return config.decoder if "decoder" in config.sub_configs else config.get_text_config()


def auto_class(config: Any) -> Any:
    """Transformers' class that builds the model of a configuration: one that sees where its type has such a form,
    unless its architecture is named as a causal language model's own."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
    )

    kind = config.model_type
    sees = MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES.get(kind)
    alone = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind)
    if sees is None or (alone != sees and alone in (config.architectures or ())):
        return AutoModelForCausalLM
    return AutoModelForMultimodalLM


def layer_key(text: Any) -> str:
    """What a configuration calls its number of layers."""
    keys = ("num_decoder_layers", "decoder_layers", "num_layers")
    return next((key for key in keys if key in vars(text)), "num_hidden_layers")


def of_layers(config: Any, layers: Sequence[int]) -> Any:
    """A configuration with some of its layers, and of all that it lists for each layer those."""
    text = decoder_config(config)
    key = layer_key(text)
    before = getattr(text, key)
    if len(layers) != before:
        for name, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == before:
                setattr(text, name, [value[place] for place in layers])
        if numbers := vars(text).get(NUMBERED):  # one that is left out has a number that no layer has
            setattr(text, NUMBERED, [layers.index(one) if one in layers else before + one for one in numbers])
        setattr(text, key, len(layers))
        if vars(text).get(AGAIN) == before:
            setattr(text, AGAIN, len(layers))
    return config


def without_padding(config: Any) -> None:
    """Take a configuration's token of padding away: the trainer has none, and some configurations check what is set."""
    vars(decoder_config(config))["pad_token_id"] = None


def counts_from_padding(model: Any) -> bool:
    """Whether modules of a model that was built without a token of padding look for it, as those do that number
    positions from it on. A whole model has `padding_idx` for the table that it makes alone."""
    from transformers import PreTrainedModel

    return any(
        getattr(module, name, 0) is None and not isinstance(module, but)
        for module in model.modules()
        for name, but in (("padding_idx", (nn.Embedding, PreTrainedModel)), ("pad_index", (nn.Embedding,)))
    )


def freeze_unused(model: Any, described: Described, *, towers: bool = True) -> None:
    """Freeze weights that take no part in the loss of text: `towers`, and those that are named as `unnumbered` does."""
    for tower in described.towers if towers else ():
        model.get_submodule(tower).requires_grad_(False)
    for name, weight in model.named_parameters():
        if described.unused and unnumbered(model, name) in described.unused:
            weight.requires_grad_(False)


def unnumbered(model: Any, name: str) -> str:
    """The name of a weight without the number of its layer."""
    found = named_layers(model)
    return name if found is None else re.sub(rf"^{re.escape(found[0])}\.\d+\.", f"{found[0]}.*.", name)


def layers_of(model: Any) -> nn.ModuleList:
    """The decoder's list of layers."""
    found = named_layers(model)
    assert found is not None, f"{type(model).__name__} has no list of layers"
    return found[1]


def named_layers(model: Any) -> tuple[str, nn.ModuleList] | None:
    """The decoder's list of layers with its name: of the lists of modules that Transformers can recompute, or else of
    all, the one that is as long as the configuration says, or else the longest."""
    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    inside = {id(module) for module in (decoder or model).modules()}
    found = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) and any(True for _ in module.parameters())
    ]
    text = decoder_config(model.config)
    count = getattr(text, layer_key(text), None)

    def rank(layers: nn.ModuleList) -> tuple[bool, bool, bool, int]:
        return id(layers) in inside, _is_recomputed(layers), len(layers) == count, len(layers)

    return max(found, key=lambda one: rank(one[1]), default=None)


def _is_recomputed(layers: nn.ModuleList) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(layers[0], GradientCheckpointingLayer)


def can_recompute(model: Any) -> bool:
    """Whether Transformers recomputes a model's layers where it is asked to."""
    found = named_layers(model)
    return bool(model.supports_gradient_checkpointing) and found is not None and _is_recomputed(found[1])
