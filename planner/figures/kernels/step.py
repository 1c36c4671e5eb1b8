"""Seconds of the kernels of a training step, each size timed once: products, experts' grouped products and attention as
a layer asks for them, weights from memory and the clock settled.

Sizes are numbers or columns. Not here: which kernels a layer has (work.py), or what a step adds to them (passes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import lru_cache
from itertools import repeat
from typing import Any, NamedTuple

import msgspec

from planner.basics.arith import Number, ceil_div, is_column, maximum
from planner.basics.formula import formula, watched
from planner.figures.kernels import experts
from planner.figures.kernels.attention import BACKWARD_FLOPS, attention_kernel_seconds, causal_flops, head_share
from planner.figures.kernels.products import Device, Product, cast_seconds, held_back_seconds, product_seconds
from planner.spec.kernel_times import AttentionTimes, ExpertTimes, ProductTimes

WIDER = {"fp4": ("fp8", "bf16"), "fp8": ("bf16",)}
"""Whose numbers a format takes that was measured on no such device: as shares of its own peak, with the same power."""


class Grouped(NamedTuple):
    """`times` grouped products of `experts` experts, each of `rows` rows by n columns over k."""

    experts: Number
    rows: Number
    n: Number
    k: Number
    times: Number = 1.0
    format: str = "bf16"


class Attention(NamedTuple):
    """`times` calls of causal attention for `batch` sequences of `seq` tokens on one rank's heads."""

    batch: Number
    seq: Number
    heads: Number
    kv_heads: Number
    head_dim: Number
    value_dim: Number
    backward: bool = False
    times: Number = 1.0


KernelCall = Product | Grouped | Attention


@lru_cache(maxsize=64)
def formats_known(device: Device, formats: tuple[str, ...]) -> bool:
    """Whether the device has a rate for each number format, and numbers to time its products, experts and attention."""
    if device.peak("bf16") is None or device.times.attend(backward=True) is None:
        return False
    return all(device.peak(one) is not None and _expert_times(device, one) is not None for one in formats)


def kernels_seconds(asked: Iterable[KernelCall], device: Device, rows: Rows | None = None) -> Number:
    """Seconds of kernels one after the other. `rows` are the distinct rows of columns."""
    total: Any = 0.0
    for one in asked:
        few = one if rows is None else at_rows(one, rows.first)
        total = total + few.times * _one(few, device)
    every: Number = total[rows.place] if rows is not None and is_column(total) else total
    return every


def least_seconds(asked: Iterable[KernelCall], device: Device) -> Number:
    """A bound below the seconds of kernels, in proportion to their FLOP: full waves of the best tiles, nothing else."""
    total: Number = 0.0
    for one in asked:
        if isinstance(one, Attention):
            known = _attention_times(device, one.backward)
            peak = device.peak("bf16")
            assert known is not None and peak is not None
            flops = causal_flops(one.batch, one.seq, one.heads, one.head_dim, one.value_dim)
            flops = flops * (BACKWARD_FLOPS if one.backward else 1.0)
            share = head_share(maximum(one.head_dim, one.value_dim), known) * (
                known.backward_share or 1.0 if one.backward else 1.0
            )
        else:
            tiles = (_expert_times if isinstance(one, Grouped) else _product_times)(device, one.format)
            peak = device.peak(one.format)
            assert tiles is not None and peak is not None
            rows = one.rows * one.experts if isinstance(one, Grouped) else one.m
            flops, share = 2 * rows * one.n * one.k, tiles.share
        total = total + one.times * flops / (peak * share)
    return total


class Rows(NamedTuple):
    """Rows of columns that differ in some of the columns: the first place of each, and the place of each row among
    them."""

    first: Any
    place: Any


def distinct_rows(*columns: Number) -> Rows | None:
    """The distinct rows of columns of whole numbers; None of numbers alone."""
    if not is_column(*columns):
        return None
    import numpy as np  # columns only

    key: Any = 0.0
    span = 1.0
    wide: Iterable[Any] = filter(is_column, columns)
    for column in wide:
        values = float(column.max()) + 1.0
        if span * values > MOST_EXACT:
            _, key = np.unique(key, return_inverse=True)
            span = float(key.max()) + 1.0
        key, span = key * values + column, span * values
    _, first, place = np.unique(key, return_index=True, return_inverse=True)
    return Rows(first, place)


MOST_EXACT = 2.0**53
"""All whole numbers up to it are floats."""


def at_rows(asked: KernelCall, first: Any) -> KernelCall:
    """A kernel whose columns are those of some rows."""
    sizes: Iterable[Any] = asked
    return type(asked)(*(size[first] if is_column(size) else size for size in sizes))


@formula(unit="s", source="grouped kernel of a balanced router, held back by power as products are")
def grouped_kernel_seconds(
    rows: Number, count: Number, n: Number, k: Number, device: Device, number_format: str
) -> Number:
    """One grouped product of `count` experts with `rows` rows each, in a step: weights from memory."""
    one = _expert_times(device, number_format)
    assert one is not None, number_format
    heights = {height for height, _ in experts.GROUPED_TILES}
    given = experts.Routed(count * rows, count, {height: count * ceil_div(rows, height) for height in heights})
    alone_s = experts.grouped_seconds(given, n, k, device, one)
    energy_j = one.flop_j * 2 * count * rows * n * k + one.byte_j * experts.grouped_bytes(given, n, k, one.format, 2.0)
    return LAUNCH_S + held_back_seconds(alone_s, energy_j, device.power_w, 0.0)


LAUNCH_S = 3e-6
"""Of one kernel: an expert's numbers have the launches of all that goes on around it."""


def _one(asked: KernelCall, device: Device) -> Number:
    """Seconds of one call of a kernel: each size is timed once, and so is each row of columns."""
    try:
        found = None if watched() else device.known.get(asked)
    except TypeError:  # columns have no hash
        found = None
    if found is not None:
        return found
    times, bare = _TIMERS[type(asked)], asked._replace(times=1.0)
    if is_column(*bare):
        return _of_rows(bare, times, device)
    if watched():
        return times(bare, device)
    found = device.known.get(bare)
    if found is None:
        found = float(times(bare, device))
    if len(device.known) > MOST_KNOWN:
        device.known.clear()
    device.known[bare] = found
    if not is_column(asked.times):
        device.known[asked] = found
    return found


def _of_rows(bare: KernelCall, times: Callable[[Any, Device], Number], device: Device) -> Number:
    """Seconds of a kernel of columns, of rows that were not asked for before together."""
    import numpy as np  # columns only

    known = device.known_rows
    if len(known) > MOST_KNOWN:
        known.clear()
    sizes: Iterable[Any] = bare
    rows: list[Any] = list(zip(*(size.tolist() if is_column(size) else repeat(size) for size in sizes), strict=False))
    if missing := {row: place for place, row in enumerate(rows) if row not in known}:
        seconds = times(at_rows(bare, list(missing.values())), device)
        known.update(zip(missing, np.broadcast_to(seconds, len(missing)).tolist(), strict=True))
    return np.array([known[row] for row in rows])


MOST_KNOWN = 200_000


def _product(asked: Product, device: Device) -> Number:
    one = _product_times(device, asked.format)
    assert one is not None, asked.format
    return product_seconds(asked.m, asked.n, asked.k, device, one, converted=asked.converted)


def _grouped(asked: Grouped, device: Device) -> Number:
    took_s = grouped_kernel_seconds(asked.rows, asked.experts, asked.n, asked.k, device, asked.format)
    own = _product_times(device, asked.format)
    if own is None or own.cast_share is None:
        return took_s
    return took_s + cast_seconds(asked.rows * asked.experts, asked.k, device.bytes_per_s, own.cast_share)


def _attention(asked: Attention, device: Device) -> Number:
    one = _attention_times(device, asked.backward)
    assert one is not None
    batch, seq, heads, kv_heads, head_dim, value_dim, backward, _ = asked
    return attention_kernel_seconds(batch, seq, heads, kv_heads, head_dim, device, one, value_dim, backward)


_TIMERS: dict[type, Callable[[Any, Device], Number]] = {Product: _product, Grouped: _grouped, Attention: _attention}


@lru_cache(maxsize=64)
def _attention_times(device: Device, backward: bool) -> AttentionTimes | None:
    return device.times.attend(backward)


@lru_cache(maxsize=64)
def _product_times(device: Device, number_format: str) -> ProductTimes | None:
    found = device.times.product(number_format)
    for other in WIDER.get(number_format, ()) if found is None and device.peak(number_format) is not None else ():
        known = device.times.product(other)
        if known is not None:
            flop_j = known.flop_j * (device.peak(other) or 0.0) / (device.peak(number_format) or 1.0)
            return msgspec.structs.replace(known, format=number_format, flop_j=flop_j)
    return found


@lru_cache(maxsize=64)
def _expert_times(device: Device, number_format: str) -> ExpertTimes | None:
    """Of the nearest device whose experts were measured, with the energies of this one's products."""
    own = _product_times(device, number_format)
    for other in (number_format, *WIDER.get(number_format, ())) if own is not None else ():
        known = device.times.expert(other)
        if known is not None and own is not None:
            return msgspec.structs.replace(known, format=number_format, flop_j=own.flop_j, byte_j=own.byte_j)
    return None
