"""A GPU as its kernels see it: datasheet rates, the chip's facts, and what was fitted to kernels measured on it.

Not here: any kernel.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec

from planner.spec import Gpu, presets
from planner.spec.kernel_times import ALIKE, KernelTimes, folders, kernel_times


class Device(msgspec.Struct, frozen=True, eq=False):
    """Rates in base units. `power_w` infinite where the datasheet says none: nothing is held back then."""

    name: str
    flops_per_s: dict[str, float]
    bytes_per_s: float
    power_w: float
    times: KernelTimes
    known: dict[Any, float] = {}
    known_rows: dict[Any, float] = {}
    """Seconds of kernels that were asked for before: by their sizes alone, and by their sizes as rows of columns (the
    last digits may be others)."""

    def __repr__(self) -> str:
        """The name: `planner explain` writes a device as an input of each of its kernels."""
        return self.name

    @property
    def multiprocessors(self) -> int:
        """Parts of the chip among which a kernel's tiles are shared out."""
        return self.times.multiprocessors

    def peak(self, number_format: str) -> float | None:
        """The dense rate in a number format; None where the device has no such units."""
        return self.flops_per_s.get(ALIKE.get(number_format, number_format), self.flops_per_s.get(number_format))


def device_of(gpu: Gpu) -> Device | None:
    """None where nothing is known of the GPU's kernels, or not its memory's rate; of equal GPUs the same object."""
    if gpu.memory_bytes_per_s is None:
        return None
    power_w = float("inf") if gpu.power_w is None else gpu.power_w
    return _device(gpu.name, tuple(gpu.flops_per_s.items()), gpu.memory_bytes_per_s, power_w, folders())


@lru_cache(maxsize=64)
def _device(
    name: str, rates: tuple[tuple[str, float], ...], bytes_per_s: float, power_w: float, found_in: tuple[str, ...]
) -> Device | None:
    times = kernel_times(name, found_in)
    return None if times is None else Device(name, dict(rates), bytes_per_s, power_w, times)


def named(gpu: str) -> Device | None:
    """The device of a GPU preset's name."""
    return device_of(presets.gpu(gpu))
