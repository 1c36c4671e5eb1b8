"""One rank's computation, timed alone: matrix products, attention, element-wise kernels, the cost of small operations.

Sizes are those of training: tokens by widths, as linear modules have them. Not here: calls between ranks
(links.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from executor.worker.probe.bench import Bench, ProbeRows
from planner.figures.byhand import GATE_ACCESSES, NORM_BYTES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
TOKENS, WIDTHS = (64, 256, 1024, 4096, 16384), (64, 128, 256, 512, 1024, 4096, 8192)
PRODUCT_S = 0.05
"""Given to each product; there are three for each size and number format."""
CYCLED_BYTES, MOST_CYCLED = 48 * 2**20, 64
"""Operands are as many as fill a cache, within reason."""
LONGEST_S = 0.03
"""Sizes whose calls would take longer tell nothing that smaller ones did not."""
ADDED = tuple(4**power for power in range(6, 14))
"""Elements of element-wise kernels: 16 KB to 256 MB in fp32."""
CHAINED = ((256, 256), (1024, 256), (1024, 1024), (4096, 1024), (16384, 4096))
"""Tokens and widths of the chains of element-wise kernels that model code has. A GPU takes as long for all but the last
as its host needs to start the kernels."""
SMALL = 64
"""Operations in a row on a handful of elements."""


def compute_tables(bench: Bench) -> dict[str, ProbeRows]:
    """Every table of work on one device, by its name in planner.calibrate.probe."""
    return {table.__name__: table(bench) for table in (products, attention, sweeps, overheads)}


def products(bench: Bench) -> ProbeRows:
    """The three products of a linear module in training, over some tokens and widths, in each number format.

    Small first, until one takes too long. Operands change from call to call, as in a step: caches hold few of them.
    """
    rows: ProbeRows = []
    sizes = itertools.product(*((64, 256), (64, 256)) if bench.task.quick else (TOKENS, WIDTHS))
    ordered = sorted(sizes, key=lambda size: size[0] * size[1] ** 2)
    for name, dtype in _formats(bench).items():
        too_long = float("inf")
        for tokens, width in ordered:
            flops = 2 * tokens * width * width
            if flops >= too_long:
                continue
            inputs = _several(bench, tokens, width, dtype=dtype)
            weights = _several(bench, width, width, dtype=dtype)
            # result = input weight', its input's gradient, its weight's gradient: rows, columns, what is summed over
            forms: dict[str, tuple[tuple[int, int, int], Callable[[], Any]]] = {
                "forward": ((tokens, width, width), lambda: next(inputs) @ next(weights).t()),  # noqa: B023
                "input": ((tokens, width, width), lambda: next(inputs) @ next(weights)),  # noqa: B023
                "weight": ((width, width, tokens), lambda: next(inputs).t() @ next(inputs)),  # noqa: B023
            }
            for form, ((m, n, k), call) in forms.items():
                seconds = bench.seconds(call, PRODUCT_S)
                rows.append({"form": form, "m": m, "n": n, "k": k, "dtype": name, "seconds": seconds})
                if seconds > LONGEST_S:
                    too_long = min(too_long, 2 * flops)
    return rows


def attention(bench: Bench) -> ProbeRows:
    """Causal attention forward and backward, long and short sequences, at a head's usual widths."""
    sizes = [(2, 4, 128, 32), (2, 4, 256, 64), (1, 8, 1024, 64), (1, 16, 2048, 128), (2, 32, 4096, 128),
             (2, 32, 8192, 128)]  # fmt: skip
    rows: ProbeRows = []
    for name, dtype in _formats(bench).items():
        for sequences, heads, seq_len, head_dim in sizes[:2] if bench.task.quick else sizes:
            q, k, v = (
                _random(bench, sequences, heads, seq_len, head_dim, dtype=dtype).requires_grad_() for _ in range(3)
            )

            def forward(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
                return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)

            forward_s = bench.seconds(forward, PRODUCT_S)
            out = forward()
            gradient = torch.ones_like(out)
            backward_s = bench.seconds(
                lambda out=out, q=q, k=k, v=v, g=gradient: torch.autograd.grad(out, (q, k, v), g, retain_graph=True),  # type: ignore[misc]
                PRODUCT_S,
            )
            rows.append(
                {"sequences": sequences, "heads": heads, "seq_len": seq_len, "head_dim": head_dim, "dtype": name}
                | {"forward_s": forward_s, "backward_s": backward_s}
            )
            if backward_s > LONGEST_S:
                break
    return rows


def sweeps(bench: Bench) -> ProbeRows:
    """Element-wise kernels over more and more memory: alone, as model code chains them, and as AdamW does."""
    rows: ProbeRows = []
    for elements in ADDED[:4] if bench.task.quick else ADDED:
        x, y = _several(bench, elements), _several(bench, elements)
        added_s = bench.seconds(lambda x=x, y=y: next(x) + next(y), PRODUCT_S)  # type: ignore[misc]
        rows.append({"kind": "add", "bytes": 12.0 * elements, "seconds": added_s})
        if added_s > LONGEST_S:
            break
    for tokens, width in ((64, 64), (256, 256)) if bench.task.quick else CHAINED:
        found = _chains(bench, tokens, width)
        rows += found
        if max(row["seconds"] for row in found) > LONGEST_S:
            break
    for elements in (2**16, 2**20) if bench.task.quick else (2**16, 2**20, 2**23):
        weight = torch.nn.Parameter(_random(bench, elements))
        weight.grad = _random(bench, elements)
        optimizer = torch.optim.AdamW([weight])
        # The weight and both moments are read and written, the gradient is read.
        rows.append({"kind": "adamw", "bytes": 28.0 * elements, "seconds": bench.seconds(optimizer.step, PRODUCT_S)})
    return rows


def _chains(bench: Bench, tokens: int, width: int) -> ProbeRows:
    """A norm and a gate as eager model code has them, forward and backward, with the bytes that planner.figures.byhand
    counts."""
    x, gate, up = (_random(bench, tokens, width).requires_grad_() for _ in range(3))
    scale = torch.nn.Parameter(torch.ones(width, device=bench.device))
    gradient = _random(bench, tokens, width)

    def norm() -> Any:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return torch.autograd.grad(scale * wide.to(x.dtype), (x, scale), gradient)

    def gated() -> Any:
        return torch.autograd.grad(torch.nn.functional.silu(gate) * up, (gate, up), gradient)

    fixed, times = NORM_BYTES["eager-fp32"]
    counted = {"norm": fixed + 4 * times, "gate": 4 * GATE_ACCESSES["eager"]}
    calls = {"norm": norm, "gate": gated}
    return [
        # Backward moves twice what forward does, as planner.figures.byhand has it.
        {"kind": kind, "bytes": 3.0 * tokens * width * counted[kind], "seconds": bench.seconds(call, PRODUCT_S)}
        for kind, call in calls.items()
    ]


def overheads(bench: Bench) -> ProbeRows:
    """The fixed cost of one operation: alone, recorded for backward, in backward and in AdamW."""
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
    return [
        {"kind": kind, "operations": SMALL, "seconds": bench.seconds(call, PRODUCT_S)} for kind, call in calls.items()
    ]


def _chain(x: Tensor) -> Tensor:
    for _ in range(SMALL):
        x = x * 1.0
    return x


def _formats(bench: Bench) -> dict[str, torch.dtype]:
    """fp16 is left out on a CPU: its products there are emulated and not used for training."""
    return {name: dtype for name, dtype in DTYPES.items() if bench.device.type != "cpu" or name != "fp16"}


def _several(bench: Bench, *shape: int, dtype: torch.dtype = torch.float32) -> Iterator[Tensor]:
    """One tensor after the other, again and again."""
    first = _random(bench, *shape, dtype=dtype)
    count = min(max(CYCLED_BYTES // (first.numel() * first.element_size()), 1), MOST_CYCLED)
    return itertools.cycle([first, *(first.clone() for _ in range(count - 1))])


def _random(bench: Bench, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=bench.device).to(dtype)
