"""Seconds of a unit's passes on one device: products, bytes moved, what the host starts, and waiting for its groups.

Not here: a whole step with its pipeline and reductions (steptime.py), or FLOP and bytes of the work (work.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from itertools import repeat
from typing import NamedTuple

import msgspec

from planner.basics.arith import Number, is_column, maximum
from planner.basics.formula import formula
from planner.engines import engine_of
from planner.figures.beside import element_bytes_of
from planner.figures.comm import Traffic, collective_seconds, traffic
from planner.figures.kernels.products import Device
from planner.figures.kernels.products import device_of as chip_of
from planner.figures.kernels.step import (
    Attention,
    KernelCall,
    Rows,
    at_rows,
    distinct_rows,
    formats_known,
    kernels_seconds,
    least_seconds,
)
from planner.figures.tensorhiding import hidden_of
from planner.figures.work import Load, Work, work_categories
from planner.parallelism.case import Case
from planner.spec.calibration import Calibration, Coefficients, ComputeCoefficients
from planner.spec.described import TOWER

WITHIN = ("tp", "cp", "ep")
"""Axes whose collectives stand in the way of every micro-batch's compute."""
KERNEL_SPLITS = ("micro_batch_size", "tp", "cp", "ep")
"""Numbers of a layout on which the kernels of one occurrence of a unit depend."""
SPLITS = (*KERNEL_SPLITS, "grad_accum")
"""Numbers on which passes through it depend."""


@formula(unit="FLOP/s", source="two kinds of matrix products one after the other: a harmonic mean by their FLOP")
def blended_rate(fast_share: Number, fast_flops_per_s: Number, slow_flops_per_s: Number) -> Number:
    """Rate of work of which `fast_share` runs at the first rate, the rest at the second."""
    return 1 / (fast_share / fast_flops_per_s + (1 - fast_share) / slow_flops_per_s)


@formula(
    unit="s", source="share * size / (size + half size) of the peak rate; size: harmonic mean of m, n and k, over 3"
)
def matmul_seconds(
    flops: Number, operands: Number, peak_flops_per_s: Number, share: Number, half_size: Number
) -> Number:
    """Matrix products at a share of the device's dense peak rate that falls with their size.

    1/size = 1/m + 1/n + 1/k, so that 2 mnk / size is twice the elements of the three matrices: products of several
    sizes add up, and the time that small ones lose is in proportion to the memory they touch.
    """
    return (flops + 2 * half_size * operands) / (peak_flops_per_s * share)


@formula(unit="s", source="roofline: kernels that do little arithmetic are bound by device memory")
def memory_seconds(moved_bytes: Number, bytes_per_s: Number, share: Number) -> Number:
    """Work that only moves bytes, at a share of the memory's rate."""
    return moved_bytes / (bytes_per_s * share)


@formula(
    unit="s", source="a share of the dense peak rate by the FLOP of the causal mask, without what flash recomputes"
)
def attention_seconds(flops: Number, peak_flops_per_s: Number, share: Number) -> Number:
    """Scores and weighted values, forward or backward."""
    return flops / (peak_flops_per_s * share)


@formula(unit="s", source="fitted to training steps: measured kernels, one after the other, times what a step adds")
def paced_seconds(products_s: Number, attention_s: Number, pace: Number, attention_pace: Number) -> Number:
    """Kernels in a training step: what they take alone, times a factor of the software, and one of its attention."""
    return (products_s + attention_s * attention_pace) * pace


@formula(unit="s", source="definition: each operation is started by the host, one after the other")
def starting_seconds(operations: Number, operation_s: Number) -> Number:
    """What the host takes to start operations, whatever they do."""
    return operations * operation_s


def peak_flops(case: Case) -> float | None:
    """The device's dense rate in the format most matrix products run in; None when unknown."""
    return case.cluster.gpu.flops_per_s.get(case.job.product_rate)


def matmul_rate(case: Case, work: dict[str, Work]) -> Number | None:
    """The rate that a step's matrix products could reach; None when unknown.

    Recipes of 8 or 4 bits multiply the layers' linear modules in them, attention and the head in bf16.
    """
    fast = peak_flops(case)
    if not case.job.narrows:
        return fast
    slow = case.cluster.gpu.flops_per_s.get("bf16")
    if fast is None or slow is None:
        return None
    times = case.whole_repeats
    all_flops = sum(times[unit] * one.forward.flops for unit, one in work.items())
    eight_bit = sum(times[unit] * one.linear_flops for unit, one in work.items())
    return blended_rate(eight_bit / all_flops, fast, slow)


class DeviceSpeed(msgspec.Struct, frozen=True):
    """What the device could do, and how near the software comes to it. `waits` where the host itself computes, or
    starts no operation before the last is done.

    `kernels` are measured kernels of it, or of its like; None where its products are timed by shares of the peak.
    `rows` are the rows of columns that differ in what kernels depend on.
    """

    peak_flops_per_s: Number
    bytes_per_s: float
    element_bytes: float
    waits: bool
    known: ComputeCoefficients
    kernels: Device | None = None
    rows: Rows | None = None


def device_of(case: Case, work: dict[str, Work], known: Coefficients) -> DeviceSpeed | None:
    """None where the device's rates are unknown."""
    gpu, peak = case.cluster.gpu, matmul_rate(case, work)
    if peak is None or gpu.memory_bytes_per_s is None:
        return None
    chip, layout = kernels_of(case, known.compute), case.layout
    rows = distinct_rows(*(getattr(layout, axis) for axis in KERNEL_SPLITS)) if chip else None
    waits = gpu.kind == "cpu"
    return DeviceSpeed(peak, gpu.memory_bytes_per_s, element_bytes_of(case), waits, known.compute, chip, rows)


def kernels_of(case: Case, known: ComputeCoefficients) -> Device | None:
    """The measured kernels by which a calibration times the case's products; None where it does by shares of the peak,
    or nobody measured kernels of its number format on such a device."""
    chip = chip_of(case.cluster.gpu) if known.pace else None
    formats = ("bf16", case.job.product_rate) if case.job.narrows else (case.job.product_rate,)
    return chip if chip is not None and formats_known(chip, formats) else None


class Passes(NamedTuple):
    """Seconds of one micro-batch's forward and backward."""

    forward_s: Number
    backward_s: Number


def coefficients(case: Case, known: Calibration) -> Coefficients:
    """What a calibration knows about the case's runtime on its devices."""
    return known.of(case.runtime.name, case.cluster.gpu.name, case.cluster.gpu.kind)


class LoadSeconds(NamedTuple):
    """What the device works on one occurrence of a unit in one pass, and what the host takes to start it."""

    busy_s: Number
    start_s: Number


def loads_of(
    one: Work, device: DeviceSpeed, kernels_s: tuple[Number, Number] | None = None
) -> tuple[LoadSeconds, LoadSeconds]:
    """Forward, and backward with what it computes again; `kernels_s` are the seconds of their kernels, where known."""
    known = (None, None) if kernels_s is None else kernels_s
    forward, backward = (
        LoadSeconds(working_seconds(load, device, one_s), starting_seconds(load.operations, device.known.operation_s))
        for load, one_s in zip((one.forward, one.backward.and_again(one.again)), known, strict=True)
    )
    return forward, backward


def loads_by_unit(case: Case, work: dict[str, Work], device: DeviceSpeed) -> dict[str, tuple[LoadSeconds, LoadSeconds]]:
    """`loads_of` of each unit; of columns the kernels of each row that splits a micro-batch and its weights
    differently are timed once, for all blocks of a search that have it."""
    chip, rows = device.kernels, device.rows
    if chip is None or rows is None:
        return {unit: loads_of(one, device) for unit, one in work.items()}
    import numpy as np  # columns only

    timed = _timed_of(case, chip, device.known)
    numbers = (getattr(case.layout, axis) for axis in KERNEL_SPLITS)
    each = (one[rows.first].tolist() if is_column(one) else repeat(float(one)) for one in numbers)
    asked = list(zip(*each, strict=False))
    missing = [place for place, row in enumerate(asked) if row not in timed]
    if missing:
        chosen = rows.first[missing]
        alone = partial(kernels_seconds, device=chip)
        found = [
            np.broadcast_to(paced(alone, [at_rows(one, chosen) for one in kernels], device.known), len(missing))
            for one in work.values()
            for kernels in (one.forward.kernels, one.backward.kernels + one.again.kernels)
        ]
        timed.update(zip((asked[place] for place in missing), np.stack(found).T.tolist(), strict=True))
    seconds = np.array([timed[row] for row in asked]).T[:, rows.place]
    return {
        unit: loads_of(one, device, (seconds[2 * place], seconds[2 * place + 1]))
        for place, (unit, one) in enumerate(work.items())
    }


def distinct_layouts(case: Case, *axes: str) -> tuple[Case, Callable[[Number], Number]]:
    """The rows of a layout's columns that differ in some of its numbers, and what makes figures of all rows of
    theirs."""
    layout = case.layout
    rows = distinct_rows(*(getattr(layout, axis) for axis in axes))
    if rows is None:
        return case, lambda figure: figure
    numbers = {name: getattr(layout, name) for name in (*SPLITS, "pp", "dp_replicate", "dp_shard")}
    few = {name: number[rows.first] for name, number in numbers.items() if is_column(number)}
    alike = msgspec.structs.replace(case, layout=msgspec.structs.replace(layout, **few))
    return alike, lambda figure: figure[rows.place] if is_column(figure) else figure


_TIMED: dict[Hashable, dict[tuple[float, ...], list[float]]] = {}
"""Seconds of the kernels of each unit's forward and backward by micro-batch, tensor, expert and context groups; by all
else that they depend on."""
MOST_TIMED = 100_000


def _timed_of(case: Case, chip: Device, known: ComputeCoefficients) -> dict[tuple[float, ...], list[float]]:
    asked = *work_categories(case), chip, known.pace, known.attention_pace
    if asked not in _TIMED:
        if sum(map(len, _TIMED.values())) > MOST_TIMED:
            _TIMED.clear()
        _TIMED[asked] = {}
    return _TIMED[asked]


def passes_of(loads: tuple[LoadSeconds, LoadSeconds], device: DeviceSpeed, waiting: Passes | None = None) -> Passes:
    """One occurrence of a unit: its work and what it waits for, or what the host takes to start it.

    A GPU works while its host starts what comes next, so the longer of the two counts; a CPU does one after the other.
    """
    found: list[Number] = []
    for place, (busy_s, start_s) in enumerate(loads):
        taken_s = busy_s + (waiting[place] if waiting else 0.0)
        found.append(taken_s + start_s if device.waits else maximum(taken_s, start_s))
    return Passes(*found)


def working_seconds(load: Load, device: DeviceSpeed, kernels_s: Number | None = None) -> Number:
    """Matrix products, at least as long as their operands take from memory; attention; and what only moves bytes.
    `kernels_s` are the seconds of the load's kernels, where known."""
    known, memory = device.known, (device.bytes_per_s, device.known.memory_share)
    moved_s = memory_seconds(load.moved_bytes + load.fixed_bytes + load.attention_bytes, *memory)
    if (chip := device.kernels) is not None:
        if kernels_s is None:
            kernels_s = paced(partial(kernels_seconds, device=chip, rows=device.rows), load.kernels, known)
        return kernels_s + moved_s
    products_s = matmul_seconds(
        load.product_flops, load.operands, device.peak_flops_per_s, known.matmul_share, known.half_size
    )
    products_s = maximum(products_s, memory_seconds(load.operands * device.element_bytes, *memory))
    attention_s = attention_seconds(
        load.attention_flops + load.masked_flops, device.peak_flops_per_s, known.attention_share
    )
    return products_s + attention_s + moved_s


def least_working_seconds(load: Load, device: DeviceSpeed) -> Number:
    """A bound below a load's seconds that does not depend on the size of its products."""
    if (chip := device.kernels) is None:
        return working_seconds(msgspec.structs.replace(load, operands=0.0, fixed_bytes=0.0), device)
    memory_s = memory_seconds(load.moved_bytes, device.bytes_per_s, device.known.memory_share)
    return paced(lambda some: least_seconds(some, chip), load.kernels, device.known) + memory_s


def paced(
    seconds: Callable[[Iterable[KernelCall]], Number], kernels: Sequence[KernelCall], known: ComputeCoefficients
) -> Number:
    """Seconds of kernels in a step, by what kernels take alone."""
    products = [one for one in kernels if not isinstance(one, Attention)]
    attention = [one for one in kernels if isinstance(one, Attention)]
    return paced_seconds(seconds(products), seconds(attention), known.pace, known.attention_pace)


def waiting_of(case: Case, known: Coefficients) -> dict[str, Passes]:
    """Seconds of the collectives of tensor, context and expert groups in one micro-batch's passes through one
    occurrence of each unit."""
    return by_unit(case, seconds_within(case, known))


def waited_of(case: Case, known: Coefficients, device: DeviceSpeed) -> dict[str, Passes]:
    """The same, less what runs beside the products of the linears that tensor groups split."""
    sent = seconds_within(case, known)
    waiting = by_unit(case, sent)
    each_s = {
        (call.unit, call.op, call.phase): seconds / maximum(call.count, 1.0)
        for call, seconds in sent
        if call.axis == "tp"
    }
    hidden = hidden_of(case, each_s, lambda load: working_seconds(load, device), known.overlap.hidden_share)
    for unit, beside in hidden.items():
        waiting[unit] = Passes(*(all_s - beside_s for all_s, beside_s in zip(waiting[unit], beside, strict=True)))
    return waiting


def calls_within(case: Case) -> list[Traffic]:
    """The collectives inside every micro-batch's passes, through the whole model."""
    whole = case.unsplit
    calls = engine_of(case.layout.engine).split_calls(whole)
    return traffic(whole, [call for call in calls if call.axis in WITHIN and call.unit in whole.units()])


def seconds_within(case: Case, known: Coefficients) -> list[tuple[Traffic, Number]]:
    """The same, each with the seconds that it takes."""
    return [(call, collective_seconds(call, case.cluster.levels, known)) for call in calls_within(case)]


def by_unit(case: Case, calls: list[tuple[Traffic, Number]]) -> dict[str, Passes]:
    """Seconds of a step's calls as those of one micro-batch and one occurrence of the unit that makes them."""
    times, accum = case.whole_repeats, case.layout.grad_accum
    found: dict[str, dict[str, Number]] = {unit: {"forward": 0.0, "backward": 0.0} for unit in times}
    for call, seconds in calls:
        found[call.unit][call.phase] = found[call.unit][call.phase] + seconds / (accum * times[call.unit])
    return {unit: Passes(phases["forward"], phases["backward"]) for unit, phases in found.items()}


def on_stage(case: Case, units: dict[str, Passes]) -> Passes:
    """One micro-batch's passes through the stage a case is about."""
    here = case.here
    ends = {"embed": int(here.first), "tail": int(here.last), TOWER: 1}
    counts = ends | dict(zip(case.kinds, here.layers, strict=True))
    forward_s, backward_s = (sum(counts[unit] * units[unit][place] for unit in case.units()) + 0.0 for place in (0, 1))
    return Passes(forward_s, backward_s)
