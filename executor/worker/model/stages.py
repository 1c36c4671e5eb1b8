"""A causal language model of Transformers cut into pipeline stages: embedding, layers, and head with the loss.

Each part runs the model's own code: a stage's layers are the model's inner module with the other layers taken out,
called with hidden states in place of embeddings, so masks, rotary tables and layer types are made where they are used.
Not here: who holds which part, or what a pipeline does with them (engines/deepspeed_pipeline.py).
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from typing_extensions import override

from executor.worker.model.losses import set_targets, trained_head


class Layers(nn.Module):
    """Hidden states through some of a model's layers; on the last stage through the final norm too.

    `apart` is what keeps the documents of packed rows apart, set before each micro-batch.
    """

    apart: dict[str, torch.Tensor]

    def __init__(self, model: nn.Module, begin: int, end: int) -> None:
        super().__init__()
        whole: Any = model
        inner: Any = copy.copy(whole.base_model)  # the modules themselves are shared with the whole model
        inner._modules = dict(inner._modules)
        layers, norm, embedding = (_name(inner, names) for names in (("layers", "h"), ("norm", "ln_f"), _EMBEDDINGS))
        inner.config = copy.copy(inner.config)
        if getattr(inner.config, "layer_types", None):  # the model code reads them by a layer's place
            inner.config.layer_types = inner.config.layer_types[begin:end]
        last = end == len(inner._modules[layers])
        inner._modules[layers] = inner._modules[layers][begin:end]
        inner._modules[embedding] = None
        if not last:
            inner._modules[norm] = nn.Identity()
        if begin and "wpe" in inner._modules:
            inner._modules |= {"wpe": _NoPositions(), "drop": nn.Identity()}
        self.inner = inner

    @override
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.inner(inputs_embeds=hidden, use_cache=False, **self.apart).last_hidden_state
        return result


class Head(nn.Module):
    """Hidden states to logits and the loss. `targets` and `items` are set before each micro-batch.

    Returning the loss and not the logits lets these die with their backward: a pipeline keeps what a stage returns.
    """

    targets: torch.Tensor
    items: float

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        whole: Any = model
        self.lm_head = whole.get_output_embeddings()
        self.vocab_size: int = whole.config.vocab_size
        self._loss_function = whole.loss_function

    @override
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        set_targets(trained_head(self), self.targets, self.items)
        # As base.RankEngine._loss: the targets are shifted already, and the loss is summed over them and divided once.
        loss: torch.Tensor = self._loss_function(
            logits=self.lm_head(hidden),
            labels=self.targets,
            vocab_size=self.vocab_size,
            shift_labels=self.targets,
            num_items_in_batch=self.items,
        )
        return loss


_EMBEDDINGS = ("embed_tokens", "wte")


def _name(inner: Any, names: tuple[str, ...]) -> str:
    return next(name for name in names if name in inner._modules)


class _Nothing:
    """The addend of later stages for learned positions: no tensor, and so no copy of the hidden states."""

    def to(self, *_: Any) -> _Nothing:
        return self

    def __radd__(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


class _NoPositions(nn.Module):
    @override
    def forward(self, _: torch.Tensor) -> _Nothing:
        return _Nothing()
