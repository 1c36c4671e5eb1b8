"""Seconds of causal attention whose scores stay on the chip, forward and backward: blocks of queries in waves over the
multiprocessors, bytes of queries, keys, values and outputs, and energy over power.

All sizes are numbers or columns. Not here: attention with scores in memory, or documents kept apart by a mask.
"""

from __future__ import annotations

from planner.basics.arith import Number, maximum, minimum, where
from planner.basics.formula import formula, unrecorded
from planner.figures.kernels.products import (
    Device,
    cold_bytes,
    fetching_seconds,
    held_back_seconds,
    tile_seconds,
    tiles_of,
    waves_of,
)
from planner.spec.kernel_times import AttentionTimes

BLOCKS = ((64, 0.8), (128, 1.0), (256, 1.0))
"""Queries of a block, and the part of the rate that blocks of this size reach."""
BACKWARD_FLOPS = 2.5
"""Of forward's: scores again, and four products instead of two (Dao 2023, FlashAttention-2, section 4)."""
ELEMENT_BYTES = 2.0


@formula(unit="1", source="fitted by size: presets/kernel_times")
def head_share(head_dim: Number, one: AttentionTimes) -> Number:
    """The share of the peak rate at a head size."""
    wide = where(head_dim <= 192, one.share_192, one.share_256)
    return where(head_dim <= 64, one.share_64, where(head_dim <= 128, one.share_128, wide))


@formula(unit="FLOP", source="two products over the pairs that a causal mask leaves, half of the square")
def causal_flops(batch: Number, seq: Number, heads: Number, head_dim: Number, value_dim: Number) -> Number:
    """Scores and weighted values of one forward."""
    return batch * heads * seq * seq * (head_dim + value_dim)


@formula(unit="bytes", source="queries and outputs of all heads, keys and values of theirs, each once")
def attention_bytes(
    batch: Number,
    seq: Number,
    heads: Number,
    kv_heads: Number,
    head_dim: Number,
    value_dim: Number,
    cached: bool = False,
) -> Number:
    """What one forward moves. `cached`: it also writes keys and values to a cache for later tokens, as inference."""
    return ELEMENT_BYTES * batch * seq * (heads + (2 if cached else 1) * kv_heads) * (head_dim + value_dim)


@formula(
    unit="s",
    source="blocks of queries in waves, then bytes (Dao 2023, FlashAttention-2, section 3.2), fitted to "
    "aiconfigurator's tables: presets/kernel_times",
)
def attention_kernel_seconds(
    batch: Number,
    seq: Number,
    heads: Number,
    kv_heads: Number,
    head_dim: Number,
    device: Device,
    one: AttentionTimes,
    value_dim: Number | None = None,
    backward: bool = False,
    sustained: bool = True,
    cached: bool = False,
) -> Number:
    """One call for `batch` sequences of `seq` tokens; keys and values of `kv_heads` heads. `cached`: see its bytes."""
    peak = device.peak("bf16")
    assert peak is not None
    values = head_dim if value_dim is None else value_dim
    times = BACKWARD_FLOPS if backward else 1.0
    rate = peak / device.multiprocessors * head_share(maximum(head_dim, values), one)
    if backward:
        assert one.backward_share is not None
        rate = rate * one.backward_share
    fastest: Number | None = None
    with unrecorded():
        for queries, reached in BLOCKS:
            blocks = tiles_of(seq, batch * heads, queries, 1)
            a_key = times * 2.0 * queries * (head_dim + values)
            # On average a block sees half of the keys and its own.
            each_s = tile_seconds(a_key, seq / 2 + queries / 2, one.ramp, rate * reached, one.tile_s)
            busy_s = waves_of(blocks, device.multiprocessors, one.stepped) * each_s
            fastest = busy_s if fastest is None else minimum(fastest, busy_s)
    assert fastest is not None
    used = times * attention_bytes(batch, seq, heads, kv_heads, head_dim, values, cached)
    moved = cold_bytes(used, used, device.times.l2_bytes)
    arriving_s = fetching_seconds(used, moved, device.bytes_per_s, one.memory_share, device.multiprocessors)
    alone_s = fastest + arriving_s
    energy_j = one.flop_j * times * causal_flops(batch, seq, heads, head_dim, values) + one.byte_j * moved
    return one.launch_s + held_back_seconds(alone_s, energy_j, device.power_w, 0.0 if sustained else one.settle_s)
