"""On a GPU: attention takes the factors of presets/kernel_times for this machine's card, and keeps what a plan says.

Not here: the table of an H100 (tests/planner/test_attention.py), or training (test_measure.py).
"""

from __future__ import annotations

import pytest
import torch

from planner.figures.kernels.attention import attention_kernel_seconds
from planner.figures.kernels.products import Device, named
from planner.spec import presets
from planner.spec.kernel_times import kernel_times
from scripts.kernels.attend import PACKAGES, TOKENS, call_of, measured

SEQ, HEADS = 8192, 32
CODES = {"flash2": "flash", "flex": "flex", "flash3": "flash3", "flash4": "flash4"}
"""Codes by their names in scripts/kernels/attend.py."""


def this_card() -> Device:
    name = torch.cuda.get_device_name()
    found = next((one for one in presets.names("gpus") if kernel_times(one) and _words(one) <= _words(name)), None)
    if found is None:
        pytest.skip(f"{name} has no kernel times")
    device = named(found)
    assert device is not None
    return device


def _words(name: str) -> set[str]:
    return {word for word in name.lower().replace("-", " ").split() if word not in ("sxm", "nvidia")}


def needs_package(code: str) -> None:
    if code in PACKAGES:
        pytest.importorskip(PACKAGES[code])


@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("code", list(CODES))
def test_a_code_takes_its_factor_of_the_measured_kernels(code: str, head_dim: int) -> None:
    needs_package(code)
    device = this_card()
    known, times = device.times.attention_code(code, head_dim, SEQ), device.times.attend(backward=True)
    if known is None or times is None:
        pytest.skip(f"nothing is known of {code} on {device.name}")
    took = measured(CODES[code], SEQ, HEADS, HEADS, head_dim)
    for way, took_us in zip(("forward", "backward"), took, strict=True):
        back = way == "backward"
        alone_s = attention_kernel_seconds(TOKENS // SEQ, SEQ, HEADS, HEADS, head_dim, device, times, backward=back)
        assert took_us * 1e-6 == pytest.approx(float(alone_s) * getattr(known, way), rel=0.25)


@pytest.mark.parametrize("code", ["sdpa", *CODES.values(), "varlen"])
def test_fused_attention_keeps_queries_keys_values_its_result_and_a_number_a_row(code: str) -> None:
    needs_package(code)
    batch, seq, head_dim = 2, 4096, 128
    q, k, v = (
        torch.randn(batch, HEADS, seq, head_dim, device="cuda", dtype=torch.bfloat16).requires_grad_() for _ in "qkv"
    )
    call, _ = call_of(code, q, k, v)
    call()  # compiles, and makes what stays
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    result = call()
    kept = torch.cuda.memory_allocated() - before
    rows = batch * HEADS * seq
    assert kept == pytest.approx(rows * (2 * head_dim + 4), rel=0.02)
    del result
