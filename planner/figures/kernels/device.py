"""A GPU as its kernels see it: datasheet rates, the chip's facts, and what was fitted to kernels measured on it.

Not here: any kernel.
"""

from __future__ import annotations

import msgspec

from planner.spec import Gpu, presets
from planner.spec.kernel_times import ALIKE, KernelTimes, kernel_times


class Device(msgspec.Struct, frozen=True):
    """Rates in base units. `power_w` infinite where the datasheet says none: nothing is held back then."""

    name: str
    flops_per_s: dict[str, float]
    bytes_per_s: float
    power_w: float
    times: KernelTimes

    @property
    def multiprocessors(self) -> int:
        """Parts of the chip among which a kernel's tiles are shared out."""
        return self.times.multiprocessors

    def peak(self, number_format: str) -> float | None:
        """The dense rate in a number format; None where the device has no such units."""
        return self.flops_per_s.get(ALIKE.get(number_format, number_format), self.flops_per_s.get(number_format))


def device_of(gpu: Gpu) -> Device | None:
    """None where nothing is known of the GPU's kernels, or not its memory's rate."""
    times = kernel_times(gpu.name)
    if times is None or gpu.memory_bytes_per_s is None:
        return None
    power_w = float("inf") if gpu.power_w is None else gpu.power_w
    return Device(gpu.name, dict(gpu.flops_per_s), gpu.memory_bytes_per_s, power_w, times)


def named(gpu: str) -> Device | None:
    """The device of a GPU preset's name."""
    return device_of(presets.gpu(gpu))
