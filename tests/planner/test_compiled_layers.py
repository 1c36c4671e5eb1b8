"""What torch.compile keeps of a real layer and of a loss, beside the parts of `torchtitan-compiled`.

The partitioner that decides what stays is the one that inductor runs after; the graphs are run eagerly here, which
needs no compiler. Not here: what compiled code takes of time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_kernels import a_layer_keeps

from planner.inventory import TERMS, Compute, Stage, walk
from planner.spec import ModelSpec, presets
from planner.spec.huggingface import config_dict

BATCH, SEQ = 2, 64
BACKEND = "aot_eager_decomp_partition"
PARTS = presets.kernels("torchtitan-compiled")


def model_of(kv_heads: int) -> ModelSpec:
    return ModelSpec(name="small", layers=2, hidden=256, heads=8, kv_heads=kv_heads, head_dim=32, ffn=704, vocab=512)


def kept_bytes(made: Callable[..., Any], skipped: set[int], *arguments: Any, **named: Any) -> float:
    """Bytes a token of storages that a compiled forward keeps for backward, but for those skipped."""
    seen: dict[int, int] = {}
    compiled = torch.compile(made, backend=BACKEND)
    compiled(*arguments, **named)

    def pack(kept: torch.Tensor) -> torch.Tensor:
        storage = kept.untyped_storage()
        if kept.ndim and storage.data_ptr() not in skipped and kept.is_floating_point():
            seen[storage.data_ptr()] = storage.nbytes()
        return kept

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept):
        compiled(*arguments, **named)
    return sum(seen.values()) / (BATCH * SEQ)


@pytest.fixture(autouse=True)
def fresh() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("kv_heads", [8, 2])
def test_a_compiled_layer_keeps_what_its_parts_say(kv_heads: int) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

    model = model_of(kv_heads)
    config = LlamaConfig(**config_dict(model), attn_implementation="sdpa")
    layer = LlamaDecoderLayer(config, 0).bfloat16()
    x = torch.randn(BATCH, SEQ, model.hidden, dtype=torch.bfloat16, requires_grad=True)
    tables = LlamaRotaryEmbedding(config)(x, torch.arange(SEQ)[None])  # one pair for all layers
    skipped = {one.untyped_storage().data_ptr() for one in (*layer.parameters(), *tables)}

    measured = kept_bytes(layer, skipped, x, position_embeddings=tables)

    assert measured == a_layer_keeps(model, Compute(2, 2, kernels=PARTS)).per_token
    eager = presets.kernels("torchtitan")
    assert measured < a_layer_keeps(model, Compute(2, 2, kernels=eager)).per_token


def test_a_compiled_loss_keeps_the_logits_and_two_figures_a_token() -> None:
    model = model_of(8)
    logits = torch.randn(BATCH, SEQ, model.vocab, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(0, model.vocab, (BATCH, SEQ))

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1))

    measured = kept_bytes(loss, set(), logits, labels)

    last = walk(model, Compute(2, 2, kernels=PARTS), Stage(False, True, 0, 1)).kept
    assert last[TERMS.index("logits")].per_token == 2 * model.vocab
    assert measured == 2 * model.vocab + 8
