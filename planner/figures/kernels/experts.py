"""Seconds of a mixture's experts on one rank: their products in one grouped kernel each, under balanced or skewed
routing, and the kernels that sort tokens by expert and add their answers up.

Not here: which experts a rank holds (parallelism/expert.py), or how tokens get there (collectives.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache, reduce

import msgspec

from planner.basics.arith import Number, minimum, where
from planner.basics.formula import formula, unrecorded
from planner.figures.kernels.products import (
    ELEMENT_BYTES,
    Device,
    bounded_seconds,
    cold_bytes,
    fetching_seconds,
    held_back_seconds,
    tile_seconds,
    tile_share,
    tiles_of,
    waves_of,
)
from planner.spec.kernel_times import ExpertTimes

GROUPED_TILES = ((256, 128), (128, 256), (128, 128), (128, 64), (64, 256), (64, 128), (64, 64), (16, 128))
"""Outputs of one tile of a grouped kernel."""
SMALLEST = 2048
DRAWS = 8
MOST_OF_ALL = 0.8
"""The most that one expert of the published tables may draw, of the tokens (aiconfigurator, collector/helper.py)."""


class Routed(msgspec.Struct, frozen=True):
    """Rows that the experts of one rank are given: all, experts that have any, and tiles by their height."""

    rows: Number
    busy: Number
    tiles: Mapping[int, Number]


def routed(rows: Sequence[float]) -> Routed:
    """What grouped kernels need to know of the rows of each expert."""
    heights = {height for height, _ in GROUPED_TILES}
    tiles = {height: float(sum(-(-each // height) for each in rows)) for height in heights}
    return Routed(float(sum(rows)), float(sum(each > 0 for each in rows)), tiles)


@lru_cache(maxsize=4096)
def expert_rows(tokens: int, top_k: int, experts: int, ranks: int, exponent: float = 0.0) -> tuple[float, ...]:
    """Rows of each expert on the fullest of `ranks` ranks, when each of `tokens` goes to `top_k` of `experts`.

    `exponent` 0 is balanced. Otherwise loads follow a power law between one token and most of them, as the published
    tables drew theirs: the mean of a few draws, each sorted, with fixed seeds.
    """
    here = experts // ranks
    if not exponent:
        return (tokens * top_k / experts,) * here
    import random  # of published tables' draws alone

    low, high = (1.0, MOST_OF_ALL * tokens) if tokens * top_k > experts else (0.01, 2.0)
    power = 1 - exponent
    total = [0.0] * here
    chance = random.Random(0)
    for _ in range(DRAWS):
        loads = [((high**power - low**power) * chance.random() + low**power) ** (1 / power) for _ in range(experts)]
        groups = [loads[place : place + here] for place in range(0, here * ranks, here)]
        fullest, scale = sorted(max(groups, key=sum)), tokens * top_k / sum(loads)
        # A token goes to an expert once, whatever was drawn.
        total = [before + min(scale * load, tokens) for before, load in zip(total, fullest, strict=True)]
    return tuple(float(round(load / DRAWS)) for load in total)


def grouped_share(height: int, width: int, one: ExpertTimes) -> float:
    """The share of the peak that a grouped kernel reaches on its tiles."""
    area = height * width
    return tile_share(area, one) if area > SMALLEST else one.share * one.share_2k


@formula(unit="s", source="tiles of all experts in one set of waves (CUTLASS grouped kernels); weights of busy experts")
def grouped_seconds(
    given: Routed,
    n: Number,
    k: Number,
    device: Device,
    one: ExpertTimes,
    cold_share: Number = 1.0,
    output_bytes: Number = 2.0,
    tuned: Number = 1.0,
) -> Number:
    """One grouped product of each expert's rows with its k x n weights, before power and without a launch.

    Of its bytes `cold_share` come from memory, the rest from the cache. `tuned` 0: no kernel was chosen for these
    sizes, and the first of the library's list runs.
    """
    peak = device.peak(one.format)
    assert peak is not None, one.format
    used = grouped_bytes(given, n, k, one.format, output_bytes)
    rates = device.bytes_per_s, one.memory_share, device.multiprocessors
    memory_s = fetching_seconds(used, cold_share * used, *rates)

    def busy_seconds(height: int, width: int, share: float) -> Number:
        each_s = tile_seconds(2.0 * height * width, k, one.ramp, peak / device.multiprocessors * share, one.tile_s)
        return waves_of(given.tiles[height] * tiles_of(1, n, 1, width), device.multiprocessors, one.stepped) * each_s

    with unrecorded():
        fastest = reduce(minimum, (busy_seconds(*tile, grouped_share(*tile, one)) for tile in GROUPED_TILES))
        if device.times.first_tile is not None and one.share_first is not None:
            first = busy_seconds(*device.times.first_tile, one.share * one.share_first)
            fastest = where(tuned == 0, first, fastest)
    return bounded_seconds(fastest, memory_s, one.sharpness)


@formula(unit="bytes", source="weights of every expert that has a row, and its rows in and out, once")
def grouped_bytes(given: Routed, n: Number, k: Number, number_format: str, output_bytes: Number) -> Number:
    """What a grouped product moves."""
    element = ELEMENT_BYTES[number_format]
    return element * (given.busy * n * k + given.rows * k) + output_bytes * given.rows * n


@formula(unit="bytes", source="rows gathered, gated and added up: each tensor read and written once, 16 bits")
def routing_bytes(given: Routed, tokens: Number, hidden: Number, inter: Number, gates: Number) -> Number:
    """What kernels around the two grouped products move; `gates` 2 for a gated activation."""
    return 2.0 * (2 * given.rows * hidden + given.rows * inter * (gates + 1) + given.rows * hidden + tokens * hidden)


@formula(unit="s", source="two grouped products with what goes on around them (fitted: presets/kernel_times)")
def experts_seconds(
    given: Routed,
    tokens: Number,
    hidden: Number,
    inter: Number,
    gates: Number,
    experts: Number,
    device: Device,
    one: ExpertTimes,
    again: bool = False,
    sustained: bool = True,
    tuned: Number = 1.0,
) -> Number:
    """Forward of a rank's experts: `gates` x `inter` columns, then back to `hidden`.

    `experts` are all of the layer's, over which tokens are sorted. `again`: the same call came just before, so that the
    cache holds what fits. `tuned` as for a grouped product.
    """
    used = grouped_bytes(given, gates * inter, hidden, one.format, 2.0)
    used = used + grouped_bytes(given, hidden, inter, one.format, 2.0)
    moved = cold_bytes(used, used, device.times.l2_bytes) if again else used
    up_s = grouped_seconds(given, gates * inter, hidden, device, one, moved / used, tuned=tuned)
    down_s = grouped_seconds(given, hidden, inter, device, one, moved / used, tuned=tuned)
    energy_j = one.flop_j * 2 * given.rows * hidden * inter * (gates + 1) + one.byte_j * moved
    busy_s = held_back_seconds(up_s + down_s, energy_j, device.power_w, 0.0 if sustained else one.settle_s)
    around_s = routing_bytes(given, tokens, hidden, inter, gates) / (device.bytes_per_s * one.routing_share)
    return one.launch_s + one.expert_s * experts + busy_s + around_s
