"""What all kernels that work tile by tile have in common: waves, a tile's time, memory beside arithmetic, and power.

Not here: which tiles a kernel has.
"""

from __future__ import annotations

from planner.basics.arith import Number, ceil_div, maximum
from planner.basics.formula import formula

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
