"""Seconds of matrix products Y[m,n] = X[m,k] W[k,n] on one GPU: tiles in waves over its multiprocessors, the fastest
tile and split of k, at least as long as operands take from memory, and as energy takes at the device's power.

m, n and k are numbers or columns. Not here: which products a layout has (work.py), experts' (experts.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from planner.basics.arith import Number, ceil_div, is_column, maximum, minimum, where
from planner.basics.formula import formula, unrecorded
from planner.spec import Gpu, presets
from planner.spec.kernel_times import ALIKE, KernelTimes, ProductTimes, TileTimes, folders, kernel_times


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


# -- The device --------------------------------------------------------------------------------------------------------

RESIDENT = 0.8
"""Of the level-2 cache, what operands may take and still be there at the next use."""
CACHE_BYTES_PER_S = 50e9
"""From the level-2 cache to each multiprocessor: guess, 32 bytes a cycle at 1.6 GHz."""
SHARPLY = 4
"""How sharply that decides: half of what takes exactly so much comes from memory."""


@formula(unit="tiles", source="definition: a matrix cut into rectangles, the last ones in part empty")
def tiles_of(rows: Number, columns: Number, height: Number, width: Number) -> Number:
    """Tiles that cover a matrix."""
    return ceil_div(rows, height) * ceil_div(columns, width)


@formula(
    unit="waves",
    source="one tile a multiprocessor at a time (NVIDIA, Matrix Multiplication Background: quantization), softened "
    "by persistent kernels and stream-k (Osama et al. 2023)",
)
def waves_of(tiles: Number, multiprocessors: Number, stepped: Number) -> Number:
    """Rounds of tiles over the multiprocessors: of the share `stepped` whole ones, of the rest as many as there are."""
    waves = tiles / multiprocessors
    return stepped * ceil_div(tiles, multiprocessors) + (1 - stepped) * maximum(waves, 1.0)


@formula(unit="s", source="definition: FLOP of a tile at its multiprocessor's rate, with what starting it costs")
def tile_seconds(flops_a_step: Number, steps: Number, ramp: Number, flops_per_s: Number, start_s: Number) -> Number:
    """One tile on one multiprocessor: a number of steps of its loop, and `ramp` more to fill the pipeline."""
    return flops_a_step * (steps + ramp) / flops_per_s + start_s


@formula(unit="s", source="roofline (Williams et al. 2009) with a rounded corner: the p-norm of both times")
def bounded_seconds(arithmetic_s: Number, memory_s: Number, sharpness: Number) -> Number:
    """Arithmetic and memory beside each other: never less than either, the sum where `sharpness` is 1."""
    return (arithmetic_s**sharpness + memory_s**sharpness) ** (1 / sharpness)


@formula(unit="bytes", source="a least-recently-used cache keeps what fits until it is used again, and little of more")
def cold_bytes(used_bytes: Number, between_bytes: Number, cache_bytes: Number) -> Number:
    """What must come from memory of bytes that are used again after `between_bytes` of others and themselves."""
    return used_bytes / (1 + (RESIDENT * cache_bytes / between_bytes) ** SHARPLY)


@formula(
    unit="s",
    source="energy over power is the least time; how fast the clock follows: fitted to kernels of 10 us to 0.3 s",
)
def held_back_seconds(alone_s: Number, energy_j: Number, power_w: Number, settle_s: Number) -> Number:
    """A kernel's seconds where its energy asks for more power than the device has.

    All of it in a long one, nothing in one much shorter than `settle_s`.
    """
    slower = maximum(energy_j / (power_w * alone_s), 1.0)
    return alone_s * (1 + (slower - 1) * alone_s / (alone_s + settle_s))


@formula(unit="s", source="bytes at the memory's rate, those found in the cache at the cache's")
def fetching_seconds(
    used_bytes: Number, from_memory: Number, bytes_per_s: Number, share: Number, multiprocessors: Number
) -> Number:
    """What operands take to arrive, of which `from_memory` are not in the cache."""
    cache_rate = maximum(multiprocessors * CACHE_BYTES_PER_S, bytes_per_s)
    return (from_memory / bytes_per_s + (used_bytes - from_memory) / cache_rate) / share


# -- Waves of tiles ----------------------------------------------------------------------------------------------------

TILES = ((256, 256), (256, 128), (128, 256), (128, 128), (128, 64), (64, 128), (64, 64))
"""Outputs of one tile, rows and columns, as the kernels of cuBLAS and CUTLASS have them."""
SPLITS = (1, 2, 3, 4, 6, 8)
"""Parts of k that different multiprocessors add up, where there are too few tiles for all of them."""
ELEMENT_BYTES = {"bf16": 2.0, "fp16": 2.0, "fp8": 1.0, "fp4": 0.5625}
"""Of 4 bits with a scale of 8 for 16 elements (NVFP4)."""
OUTPUT_BYTES = 2.0
PARTIAL_BYTES = 8.0
"""A partial sum in fp32, written and read again."""
MEASURED_COPIES = 5.0
"""Weights that the published tables' benchmark uses in turn (aiconfigurator, collector/trtllm/collect_gemm.py): as many
as fill the cache, at most five, so that small weights are found there again and large ones are not."""
ALWAYS_COLD = float("inf")
"""In a training step all other layers come between two uses of a weight."""


class Product(NamedTuple):
    """`times` products of m rows by n columns over k. In 8 or 4 bits a `converted` share of X is brought to them just
    before: not what a product before it has converted already."""

    m: Number
    n: Number
    k: Number
    times: Number = 1.0
    format: str = "bf16"
    converted: Number = 1.0


def tile_share(area: int, one: TileTimes) -> float:
    """The share of the peak that tiles of a number of outputs reach."""
    return one.share * {4096: one.share_4k, 8192: one.share_8k, 16384: one.share_16k}.get(area, 1.0)


@formula(unit="s", source="partial sums of a split k, once to memory and back at its rate")
def splitting_seconds(m: Number, n: Number, splits: Number, bytes_per_s: Number, split_s: Number) -> Number:
    """What it takes to add up the parts of k; nothing for one part."""
    return where(splits == 1, 0.0, split_s + splits * m * n * PARTIAL_BYTES / (2 * bytes_per_s))


@formula(unit="s", source="one pass over the operand: 16 bits read, 8 written")
def cast_seconds(m: Number, k: Number, bytes_per_s: Number, share: Number) -> Number:
    """Casting X to 8 bits before a product."""
    return 3 * m * k / (bytes_per_s * share)


@formula(
    unit="s",
    source="the fastest of a few tiles and splits, in waves (fitted to aiconfigurator's tables: presets/kernel_times)",
)
def kernel_seconds(
    m: Number, n: Number, k: Number, peak_flops_per_s: Number, memory_s: Number, device: Device, one: ProductTimes
) -> Number:
    """A product's arithmetic beside its memory, before power."""
    fastest: Number | None = None
    alone = not is_column(m, n, k)
    every_split = SPLITS if alone else _splits_at_once(max(getattr(size, "ndim", 0) for size in (m, n, k)))
    with unrecorded():
        for height, width in TILES:
            area = height * width
            rate = peak_flops_per_s / device.multiprocessors * tile_share(area, one)
            tiles = tiles_of(m, n, height, width)
            for splits in every_split:
                each_s = tile_seconds(2.0 * area, k / splits, one.ramp, rate, one.tile_s)
                if alone and fastest is not None and tiles * splits * each_s >= fastest * device.multiprocessors:
                    continue  # even without a last wave it is no faster
                busy_s = waves_of(tiles * splits, device.multiprocessors, one.stepped) * each_s
                taken_s = bounded_seconds(busy_s, memory_s, one.sharpness)
                taken_s = taken_s + splitting_seconds(m, n, splits, device.bytes_per_s, one.split_s)
                fastest = taken_s if fastest is None else minimum(fastest, taken_s)
    assert fastest is not None
    return fastest if alone else fastest.min(axis=0)  # type: ignore[union-attr]  # columns


@lru_cache(maxsize=8)
def _splits_at_once(axes: int) -> tuple[Number]:
    """All splits of k, on an axis before those that columns of sizes have."""
    import numpy as np  # columns only

    return (np.array(SPLITS, dtype=np.float64).reshape(len(SPLITS), *[1] * axes),)


@formula(unit="s", source="launch, then the longest of arithmetic in waves, bytes from memory, and energy over power")
def product_seconds(
    m: Number,
    n: Number,
    k: Number,
    device: Device,
    one: ProductTimes,
    weight_copies: Number = ALWAYS_COLD,
    sustained: bool = True,
    output_bytes: Number = OUTPUT_BYTES,
    converted: Number = 1.0,
) -> Number:
    """One product by the numbers `one`; of 8 bits with the cast of a `converted` share of X.

    `weight_copies` come between two uses of W, X and Y are still in the cache where they fit. `sustained`: other
    kernels run before and after, so the clock has settled. `output_bytes` an output element, read and written ones.
    """
    peak = device.peak(one.format)
    assert peak is not None, one.format
    element = ELEMENT_BYTES[one.format]
    weights, others = element * n * k, element * m * k + output_bytes * m * n
    cache = device.times.l2_bytes
    moved = cold_bytes(weights, weight_copies * weights + others, cache) + cold_bytes(others, weights + others, cache)
    memory_s = fetching_seconds(weights + others, moved, device.bytes_per_s, one.memory_share, device.multiprocessors)
    alone_s = kernel_seconds(m, n, k, peak, memory_s, device, one)
    energy_j = one.flop_j * 2 * m * n * k + one.byte_j * moved
    busy_s = held_back_seconds(alone_s, energy_j, device.power_w, 0.0 if sustained else one.settle_s)
    if one.cast_share is not None:
        busy_s = busy_s + converted * cast_seconds(m, k, device.bytes_per_s, one.cast_share)
    return one.launch_s + busy_s


def products_seconds(products: Iterable[Product], device: Device) -> Number | None:
    """Seconds of products one after the other, as in a training step: weights from memory, the clock settled.

    None where a number format is unknown on the device, or was not measured on one like it.
    """
    total: Number = 0.0
    for asked in products:
        one = device.times.product(asked.format)
        if one is None or device.peak(asked.format) is None:
            return None
        total = total + asked.times * product_seconds(asked.m, asked.n, asked.k, device, one)
    return total
