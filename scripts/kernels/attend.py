"""Times of causal attention on this machine's GPU by implementation, as lines of tests/truth/own_attention.csv.

    python scripts/kernels/attend.py GPU-PRESET [IMPLEMENTATION ...]

`sdpa` is scaled_dot_product_attention as torch itself chooses, flash, efficient, cudnn and math are its backends, flex
is flex_attention compiled with a causal block mask, varlen is torch.nn.attention.varlen's kernel, eager is scores
written out in model code; flash3 and flash4 are FlashAttention's own packages, measured where they are named. Every
call has 16,384 tokens; a time is the median of five times ten calls one after the other. Backward is the gradient of a
given output gradient.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from itertools import product

import torch
import torch.nn.functional as functional
from torch.nn.attention import SDPBackend, sdpa_kernel

TOKENS = 16384
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
HEADS = {64: (32, 8), 128: (32, 8), 256: (16, 16)}
BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}
FEW = {"flex": (2048, 8192), "eager": LENGTHS[:4], "math": LENGTHS[:4]}
"""Lengths of implementations that compile for each, or whose scores do not fit."""

PACKAGES = {"flash3": "flash_attn_interface", "flash4": "flash_attn.cute"}
"""Modules of implementations that torch does not have; each has a `flash_attn_func`."""

Tensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def call_of(name: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[Callable[[], torch.Tensor], Tensors]:
    """One forward of an implementation on tensors of [batch, heads, seq, head_dim], and what its gradients are of."""
    grouped = k.shape[1] != q.shape[1]
    if name in ("sdpa", *BACKENDS):

        def one() -> torch.Tensor:
            with sdpa_kernel(BACKENDS[name]) if name in BACKENDS else nullcontext():
                return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

        return one, (q, k, v)
    if name in PACKAGES:
        attend = import_module(PACKAGES[name]).flash_attn_func
        turned = [one.transpose(1, 2).contiguous().detach().requires_grad_() for one in (q, k, v)]

        def by_package() -> torch.Tensor:
            found = attend(*turned, causal=True)
            result: torch.Tensor = found[0] if isinstance(found, tuple) else found
            return result

        return by_package, (turned[0], turned[1], turned[2])
    if name == "flex":
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        seq = q.shape[2]
        mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, seq, seq, device="cuda")
        compiled = torch.compile(flex_attention, dynamic=False)
        return lambda: compiled(q, k, v, block_mask=mask, enable_gqa=grouped), (q, k, v)
    if name == "varlen":
        from torch.nn.attention.varlen import varlen_attn

        batch, _, seq, _ = q.shape
        ends = torch.arange(0, (batch + 1) * seq, seq, dtype=torch.int32, device="cuda")
        rows = [one.transpose(1, 2).flatten(0, 1).contiguous().detach().requires_grad_() for one in (q, k, v)]
        return lambda: varlen_attn(*rows, ends, ends, seq, seq, window_size=(-1, 0)), (rows[0], rows[1], rows[2])

    def eager() -> torch.Tensor:
        keys, values = (one.repeat_interleave(q.shape[1] // k.shape[1], 1) for one in (k, v))
        seq = q.shape[2]
        hidden = torch.full((seq, seq), float("-inf"), dtype=q.dtype, device="cuda").triu(1)
        scores = q @ keys.transpose(2, 3) * q.shape[-1] ** -0.5 + hidden
        return functional.softmax(scores, -1, dtype=torch.float32).to(q.dtype) @ values

    return eager, (q, k, v)


def timed(call: Callable[[], object]) -> float:
    """Microseconds of a call: the median of five times ten."""
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    found = []
    for _ in range(5):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(10):
            call()
        end.record()
        torch.cuda.synchronize()
        found.append(begin.elapsed_time(end) * 100)
    return statistics.median(found)


def measured(name: str, seq: int, heads: int, kv_heads: int, head_dim: int) -> tuple[float, float]:
    """Microseconds of forward and backward of one size."""
    sizes = [(one, seq, head_dim) for one in (heads, kv_heads, kv_heads)]
    q, k, v = (
        torch.randn(TOKENS // seq, *size, device="cuda", dtype=torch.bfloat16).requires_grad_() for size in sizes
    )
    call, leaves = call_of(name, q, k, v)
    forward_us, result = timed(call), call()
    gradient = torch.randn_like(result)
    return forward_us, timed(lambda: torch.autograd.grad(result, leaves, gradient, retain_graph=True))


def main() -> None:
    """A line for each implementation and size; what fails is a line on standard error."""
    gpu, *names = sys.argv[1:]
    print("gpu,dtype,implementation,batch,seq,heads,kv_heads,head_dim,forward_us,backward_us", flush=True)
    for name in names or ("sdpa", *BACKENDS, "flex", "varlen", "eager"):
        of_dim = [(head_dim, heads, some) for head_dim, (heads, fewer) in HEADS.items() for some in (heads, fewer)]
        for (head_dim, heads, kv_heads), seq in product(dict.fromkeys(of_dim), FEW.get(name, LENGTHS)):
            torch.cuda.empty_cache()
            try:
                forward_us, backward_us = measured(name, seq, heads, kv_heads, head_dim)
            except (RuntimeError, TypeError) as error:
                print(f"{name} {heads}/{kv_heads} x {head_dim}, {seq}: {error}"[:300], file=sys.stderr)
                continue
            sizes = f"{TOKENS // seq},{seq},{heads},{kv_heads},{head_dim}"
            print(f"{gpu},bf16,{name},{sizes},{forward_us:.2f},{backward_us:.2f}", flush=True)


if __name__ == "__main__":
    main()
