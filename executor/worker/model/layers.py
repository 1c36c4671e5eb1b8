"""The layers of a model of Transformers, whatever its family calls them.

Not here: what is done to them.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def of_layers(config: Any, layers: int) -> Any:
    """A configuration cut to its first layers, and all that it lists for each layer."""
    text = config.get_text_config()
    before = text.num_hidden_layers
    if layers != before:
        for key, value in list(vars(text).items()):
            if isinstance(value, list) and len(value) == before:
                setattr(text, key, value[:layers])
        text.num_hidden_layers = layers
    return config


def without_padding(config: Any) -> None:
    """Take a configuration's token of padding away: the trainer has none, and some configurations check what is set."""
    vars(config.get_text_config())["pad_token_id"] = None


def layers_of(model: Any) -> nn.ModuleList:
    """The decoder's list of layers."""
    found = named_layers(model)
    assert found is not None, f"{type(model).__name__} has no list of layers"
    return found[1]


def named_layers(model: Any) -> tuple[str, nn.ModuleList] | None:
    """The decoder's list of layers with its name: the longest list of modules that Transformers can recompute."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    decoder = model.get_decoder() if hasattr(model, "get_decoder") else None
    inside = {id(module) for module in (decoder or model).modules()}
    found = [
        (name, module)
        for name, module in model.named_modules()
        if id(module) in inside and isinstance(module, nn.ModuleList)
        if len(module) and isinstance(module[0], GradientCheckpointingLayer)
    ]
    return max(found, key=lambda one: len(one[1]), default=None)
