"""Seconds of kernels that only move bytes: element-wise ones, permutations of tokens, the loss.

Not here: which bytes those are (work.py).
"""

from __future__ import annotations

from planner.basics.arith import Number
from planner.basics.formula import formula
from planner.figures.kernels.device import Device
from planner.spec.kernel_times import MemoryTimes


@formula(unit="s", source="bytes at a share of the memory's rate, by kind (fitted: presets/kernel_times)")
def moving_seconds(moved_bytes: Number, kernels: Number, device: Device, one: MemoryTimes) -> Number:
    """So many kernels that move so many bytes together."""
    return kernels * one.launch_s + moved_bytes / (device.bytes_per_s * one.share)
