"""What one rank computes, timed alone: matrix products, attention, element-wise kernels, the cost of small operations.

Sizes are those of training: tokens by widths, as linear modules have them. Not here: calls between ranks
(probe_links.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from executor.worker.probe import Bench

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOKENS, WIDTHS = (64, 256, 1024, 4096, 16384), (64, 128, 256, 512, 1024, 4096, 8192)
LONGEST_S = 0.4
"""Sizes whose calls would take longer tell nothing that smaller ones did not."""
ADDED = tuple(4**power for power in range(5, 15))
"""Elements of element-wise kernels: 4 KB to 1 GB in fp32."""
SMALL = 64
"""Operations in a row on a handful of elements."""
BYTES = {torch.float32: 4, torch.bfloat16: 2, torch.float16: 2}

Rows = list[dict[str, Any]]


def compute_tables(bench: Bench) -> dict[str, Rows]:
    """Every table of work on one device, by its name in planner.truth.probe."""
    return {
        "products": products(bench),
        "attention": attention(bench),
        "sweeps": sweeps(bench),
        "overheads": overheads(bench),
    }


def products(bench: Bench) -> Rows:
    """Linear modules of some widths over some tokens, in each number format; small first, until one takes too long."""
    rows: Rows = []
    for name, dtype in _formats(bench).items():
        too_long = float("inf")
        for tokens, width in _product_sizes(bench):
            flops = 2 * tokens * width * width
            if flops >= too_long:
                continue
            x, weight = _random(bench, tokens, width, dtype=dtype), _random(bench, width, width, dtype=dtype)
            seconds = bench.seconds(lambda x=x, weight=weight: torch.nn.functional.linear(x, weight))  # type: ignore[misc]
            rows.append({"m": tokens, "n": width, "k": width, "dtype": name, "seconds": seconds})
            if seconds > LONGEST_S / 4:
                too_long = min(too_long, 2 * flops)
    return rows


def attention(bench: Bench) -> Rows:
    """Causal attention forward and backward, long and short sequences, at a head's usual widths."""
    sizes = [(2, 4, 128, 32), (2, 4, 256, 64), (1, 8, 1024, 64), (1, 16, 2048, 128), (2, 32, 4096, 128)]
    rows: Rows = []
    for name, dtype in _formats(bench).items():
        for sequences, heads, seq_len, head_dim in sizes[:2] if bench.task.quick else sizes:
            q, k, v = (
                _random(bench, sequences, heads, seq_len, head_dim, dtype=dtype).requires_grad_() for _ in range(3)
            )

            def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

            forward_s = bench.seconds(forward)
            out = forward()
            gradient = torch.ones_like(out)
            backward_s = bench.seconds(
                lambda out=out, q=q, k=k, v=v, g=gradient: torch.autograd.grad(out, (q, k, v), g, retain_graph=True)  # type: ignore[misc]
            )
            rows.append(
                {"sequences": sequences, "heads": heads, "seq_len": seq_len, "head_dim": head_dim, "dtype": name}
                | {"forward_s": forward_s, "backward_s": backward_s}
            )
            if backward_s > LONGEST_S / 4:
                break
    return rows


def sweeps(bench: Bench) -> Rows:
    """Element-wise kernels over more and more memory, with a new result each time, as model code has them."""
    rows: Rows = []
    for elements in ADDED[:4] if bench.task.quick else ADDED:
        x, y = _random(bench, elements), _random(bench, elements)
        added_s = bench.seconds(lambda x=x, y=y: x + y)  # type: ignore[misc]
        rows.append({"kind": "add", "bytes": 12.0 * elements, "seconds": added_s})
        silu_s = bench.seconds(lambda x=x: torch.nn.functional.silu(x))  # type: ignore[misc]
        rows.append({"kind": "silu", "bytes": 8.0 * elements, "seconds": silu_s})
        if added_s > LONGEST_S / 4:
            break
    for elements in (2**16, 2**20) if bench.task.quick else (2**16, 2**20, 2**23):
        weight = torch.nn.Parameter(_random(bench, elements))
        weight.grad = _random(bench, elements)
        optimizer = torch.optim.AdamW([weight])
        # The weight and both moments are read and written, the gradient is read.
        rows.append({"kind": "adamw", "bytes": 28.0 * elements, "seconds": bench.seconds(optimizer.step)})
    return rows


def overheads(bench: Bench) -> Rows:
    """What one operation costs before its data does, alone, recorded for backward, in backward and in AdamW."""
    x = _random(bench, 4)
    taped = x.clone().requires_grad_()
    weights = [torch.nn.Parameter(_random(bench, 4)) for _ in range(SMALL)]
    for weight in weights:
        weight.grad = _random(bench, 4)
    optimizer = torch.optim.AdamW(weights)
    chain = _chain(taped)
    calls: dict[str, Callable[[], Any]] = {
        "plain": lambda: _chain(x),
        "forward": lambda: _chain(taped),
        "backward": lambda: torch.autograd.grad(chain, taped, x, retain_graph=True),
        "optimizer": optimizer.step,
    }
    return [{"kind": kind, "operations": SMALL, "seconds": bench.seconds(call)} for kind, call in calls.items()]


def _chain(x: Tensor) -> Tensor:
    for _ in range(SMALL):
        x = x * 1.0
    return x


def _formats(bench: Bench) -> dict[str, torch.dtype]:
    """fp16 is left out on a CPU: its products there are emulated, and nobody trains so."""
    return {name: dtype for name, dtype in DTYPES.items() if bench.device.type != "cpu" or name != "fp16"}


def _product_sizes(bench: Bench) -> list[tuple[int, int]]:
    tokens, widths = ((64, 256), (64, 256)) if bench.task.quick else (TOKENS, WIDTHS)
    return sorted(((one, width) for one in tokens for width in widths), key=lambda size: size[0] * size[1] ** 2)


def _random(bench: Bench, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=bench.device).to(dtype)
