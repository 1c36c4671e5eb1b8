"""torch's own ring of attention: bytes that its operations move beside the attention of blocks, and what it sends,
counted on one rank of a group that is not there.

Not here: what other rings send (test_context.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from planner.figures.work import unit_work
from planner.parallelism import context
from planner.parallelism.case import Case
from planner.spec import Layout, TrainingJob, presets

HEADS, KV_HEADS, TOKENS, WIDTH = 8, 2, 64, 16
QUERIES, KEYS = HEADS * TOKENS * WIDTH, KV_HEADS * TOKENS * WIDTH
SENT = ("_c10d_functional.all_to_all_single.default", "_c10d_functional.all_gather_into_tensor.default")


class Counted(TorchDispatchMode):
    """Bytes of all operands of each operation, and how often the sending ones are called."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()
        self.sent: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = [one for one in tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
        written = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
        if str(func) in SENT:
            self.sent[str(func)] += sum(one.nbytes for one in read)
            self.calls[str(func)] += 1
        elif not func.is_view and "c10d" not in str(func):
            kept = written if "zeros_like" in str(func) else [*read, *written]
            self.bytes[str(func)] += sum(one.nbytes for one in kept)
        return out


@contextmanager
def group(ranks: int, method: str) -> Iterator[Any]:
    """torch's ring on the last rank of a group whose collectives do nothing."""
    from torch.distributed.tensor.experimental._context_parallel import _attention
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before = _attention._cp_options.rotate_method
    dist.init_process_group("fake", store=FakeStore(), rank=ranks - 1, world_size=ranks)
    try:
        _attention.set_rotate_method({"ring": "alltoall", "allgather": "allgather"}[method])
        yield _attention
    finally:
        _attention._cp_options.rotate_method = before
        dist.destroy_process_group()


def blocks(*like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Results of a block's attention, which is not counted."""
    with torch._C._DisableTorchDispatch():
        return tuple(torch.zeros(one.shape, dtype=one.dtype) for one in like)


def forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, is_causal: bool) -> tuple[torch.Tensor, ...]:
    with torch._C._DisableTorchDispatch():
        return *blocks(q), torch.zeros(q.shape[:-1])


def backward(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **_: Any) -> tuple[torch.Tensor, ...]:
    return blocks(query, key, value)


@pytest.mark.parametrize("method", ["ring", "allgather"])
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_it_moves_and_sends_what_is_said(ranks: int, method: str) -> None:
    q = torch.zeros(1, HEADS, TOKENS, WIDTH, dtype=torch.bfloat16)
    k, v = (torch.zeros(1, KV_HEADS, TOKENS, WIDTH, dtype=torch.bfloat16) for _ in range(2))
    with group(ranks, method) as ring:
        with Counted() as there:
            out, lse = ring._templated_ring_attention(dist.group.WORLD, 2, forward, q, k, v, is_causal=True)
        with Counted() as back:
            ring._templated_ring_attention_backward(
                dist.group.WORLD, 2, backward, out, "grad_out", q, k, v, out, lse, is_causal=True
            )

    rows = HEADS * TOKENS
    assert there.bytes.total() == context.torch_forward_bytes(QUERIES, rows, 2 * KEYS, ranks)
    assert back.bytes.total() == context.torch_backward_bytes(QUERIES, 2 * KEYS, ranks)

    calls = {
        (call.op, call.phase): (call.count, call.payload_bytes)
        for call in context.layer_collectives(
            method, 2 * QUERIES, 4 * KEYS, ranks, 1, recomputes=False, passed_back_bytes=8 * KEYS
        )
    }
    passed, gathered = SENT
    if method == "ring":
        assert calls == {
            ("send", "forward"): (there.calls[passed], there.sent[passed]),
            ("send", "backward"): (back.calls[passed], back.sent[passed]),
        }
        assert not there.sent[gathered] + back.sent[gathered]
    else:
        assert calls == {
            ("all_gather", "forward"): (1, ranks * there.sent[gathered]),
            ("all_gather", "backward"): (1, ranks * back.sent[gathered]),
            ("send", "backward"): (back.calls[passed], back.sent[passed]),
        }


def layer(cp: Any, engine: Any = "torchtitan", recompute: Any = "none", tp: int = 1) -> Any:
    layout = Layout(engine=engine, tp=tp, cp=cp, zero_stage=3, recompute=recompute, sequence_parallel=tp > 1)
    gpus = 64 if not isinstance(cp, int) else cp * tp
    runtime = presets.runtime("megatron-core" if engine == "megatron" else engine)
    job, cluster = TrainingJob(seq_len=65536), presets.cluster("dgx-h100", gpus)
    return unit_work(Case(presets.model("llama-3-8b"), job, layout, cluster, runtime))["layer"]


@pytest.mark.parametrize("tp", [1, 4])
def test_a_layer_of_torchtitan_has_these_bytes_and_one_of_megatron_or_of_no_context_ranks_has_none(tp: int) -> None:
    tokens = 65536 / 4 / tp
    queries, rows, keys_values = 4096 * tokens, 32 * tokens, 2 * 1024 * tokens
    found = layer(4, tp=tp)
    assert found.forward.attention_bytes == context.torch_forward_bytes(queries, rows, keys_values, 4)
    assert found.backward.attention_bytes == context.torch_backward_bytes(queries, keys_values, 4)
    for recompute, share in {"none": 0.0, "sac:matmul": 0.0, "full": 1.0}.items():
        again = layer(4, recompute=recompute, tp=tp).again.attention_bytes
        assert again == share * found.forward.attention_bytes, recompute
    for other in (layer(1, tp=tp), layer(4, engine="megatron", tp=tp)):
        assert other.forward.attention_bytes == other.backward.attention_bytes == 0


def test_columns_of_context_ranks_move_what_their_layouts_do() -> None:
    together = layer(np.array([1.0, 2.0, 8.0]))
    for place, cp in enumerate((1, 2, 8)):
        alone = layer(cp)
        assert together.forward.attention_bytes[place] == pytest.approx(alone.forward.attention_bytes)
        assert together.backward.attention_bytes[place] == pytest.approx(alone.backward.attention_bytes)
