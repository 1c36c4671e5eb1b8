"""A tour of six stops that teaches how training is split: each is a layout of the same question, with what it does in a
sentence; what it changes is said by the figures (face.py).

Not here: where it is shown (web/).
"""

from __future__ import annotations

from typing import Any

import msgspec

QUESTION: dict[str, Any] = {"model": "llama-3-70b", "gpus": 64, "cluster": "dgx-h100", "seq_len": 2048}
"""The same for every stop, with 64 sequences a step."""


class Stop(msgspec.Struct, frozen=True):
    """One stop: `does` says what the GPUs do differently, `layout` are the options beside QUESTION."""

    title: str
    does: str
    layout: dict[str, Any]

    @property
    def given(self) -> dict[str, Any]:
        """The options that ask for it."""
        return QUESTION | self.layout


def _megatron(**sizes: Any) -> dict[str, Any]:
    return {"runtime": "megatron-core", "zero_stage": 1, "recompute": "none"} | sizes


STOPS = (
    Stop(
        "Copies",
        "Every GPU holds the whole model and trains on sequences of its own. After each step the GPUs add up their "
        "gradients, so that all copies stay equal. Gradients alone are sent, and nothing is smaller than on one GPU.",
        {"runtime": "accelerate-ddp", "dp_replicate": 64, "micro_batch_size": 1, "grad_accum": 1, "recompute": "none"},
    ),
    Stop(
        "Shards",
        "Each GPU keeps a 64th of the weights, gradients and optimizer states. It gathers a layer's weights from the "
        "others when it computes that layer, and drops them again. Activations stay as they were.",
        {"runtime": "accelerate-fsdp2", "zero_stage": 3, "dp_shard": 64, "micro_batch_size": 1, "grad_accum": 1,
         "recompute": "none"},
    ),
    Stop(
        "Tensor ranks",
        "The eight GPUs of a node share each matrix: every one multiplies an eighth of it, for the same sequences, and "
        "they add up the results inside every layer. Weights and activations are divided by eight; each layer waits "
        "for the others.",
        _megatron(tp=8, dp_shard=8, micro_batch_size=2, grad_accum=4),
    ),
    Stop(
        "Pipeline stages",
        "Four groups of GPUs hold a quarter of the layers each and pass activations on. Little is sent, but a stage "
        "stands idle while the first micro-batches have not reached it, and while the last ones have left it.",
        _megatron(tp=8, pp=4, dp_shard=2, micro_batch_size=2, grad_accum=16),
    ),
    Stop(
        "Micro-batches",
        "The same batch in twice as many pieces: the pipeline is full for a larger part of the step, and each piece "
        "needs half the activations. Matrices become narrower, which GPUs multiply less well.",
        _megatron(tp=8, pp=4, dp_shard=2, micro_batch_size=1, grad_accum=32),
    ),
    Stop(
        "Recomputation",
        "Each layer keeps its input alone and runs forward a second time before its backward. Activations almost "
        "disappear; a step does a third more arithmetic.",
        _megatron(tp=8, pp=4, dp_shard=2, micro_batch_size=1, grad_accum=32, recompute="full"),
    ),
)  # fmt: skip
