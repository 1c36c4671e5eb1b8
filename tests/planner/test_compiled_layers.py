"""What torch.compile keeps of a real layer and of a loss, and how often it converts an input to 8 bits, beside the
parts of `torchtitan-compiled`.

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

    last = walk(model, Compute(2, 2, kernels=PARTS), Stage(False, True, (("layer", 1),))).kept
    assert last[TERMS.index("logits")].per_token == 2 * model.vocab
    assert measured == 2 * model.vocab + 8


def test_compiled_products_of_one_input_convert_it_once() -> None:
    """As torchao's linears do (0.18, float8/float8_linear.py): each scales its input and weight by their largest."""
    from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    def narrow(wide: torch.Tensor) -> torch.Tensor:
        scaled = wide.float() * (448 / wide.abs().amax().float())
        return scaled.to(torch.float8_e4m3fn).to(wide.dtype)

    def products(x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        return torch.cat([narrow(x) @ narrow(weight) for weight in weights], dim=-1)

    def conversions(graph: torch.fx.GraphModule) -> int:
        return sum(node.kwargs.get("dtype") == torch.float8_e4m3fn for node in graph.graph.nodes)

    counted: list[int] = []

    def forward(graph: torch.fx.GraphModule, _: Any) -> Any:
        counted.append(conversions(graph))
        return make_boxed_func(graph.forward)

    x = torch.randn(8, 16, dtype=torch.bfloat16, requires_grad=True)
    weights = [torch.randn(16, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=lambda graph, _: make_boxed_func(graph.forward),
        partition_fn=min_cut_rematerialization_partition,
    )
    compiled = torch.compile(products, backend=backend)(x, *weights)

    assert counted == [1 + len(weights)]
    assert PARTS.converts_once
    torch.testing.assert_close(compiled, products(x, *weights))
