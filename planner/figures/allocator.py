"""What the caching allocator and the device hold beside live tensors, part by part.

Not here: live tensors (memory.py), or how large the coefficients are (spec/calibration.py).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

import msgspec

from planner.basics.arith import Number, is_column, maximum, minimum, where
from planner.basics.formula import watched
from planner.basics.quantities import BYTES
from planner.engines import engine_of
from planner.engines.base import Blocks
from planner.parallelism.case import Case
from planner.spec import Layout

R = TypeVar("R")

RESERVED_PARTS = ("workspace", "fragmentation", "churn", "apart", "blocks")
DEVICE_PARTS = ("context", "communicators", "pending")
"""What reserved memory has beside live bytes, and the device beside reserved memory. Pending blocks are reserved too,
while the host is ahead: sources log reserved memory with as many as their hosts left."""


def parts_beside(case: Case, allocated: Number) -> dict[str, Number]:
    """Bytes beside `allocated` live ones, by part; none on CPU, which has no such allocator."""
    if case.cluster.gpu.kind == "cpu":
        return dict.fromkeys((*RESERVED_PARTS, *DEVICE_PARTS), 0.0)
    known = case.runtime.allocator
    # Of expandable segments free pages are unmapped when memory is short, wherever they lie, and mapped elsewhere
    # (torch 2.13, c10/cuda/CUDACachingAllocator.cpp, release_blocks and unmap_block).
    holes = not case.runtime.expandable_segments
    return {
        "workspace": known.workspace_bytes,
        "fragmentation": holes * (allocated + known.workspace_bytes) * known.fragmentation,
        "churn": holes * known.churn and known.churn * (allocated - lasting_bytes(case, allocated)),
        "apart": bytes_beside(case, allocated),
        "blocks": block_bytes(case, allocated),
        "context": known.context_bytes,
        "communicators": known.communicator_bytes * more_communicators(case.layout),
        "pending": pending_bytes(case) if _knows_stages(case) else 0.0,
    }


def _knows_stages(case: Case) -> bool:
    """Whether stages are known one by one; where pipelines are columns they are taken as equal: a bound from below."""
    return not (case.pipelined and is_column(case.layout.pp))


def reserved_bytes(case: Case, allocated: Number) -> Number:
    """What PyTorch's caching allocator reserves for `allocated` live bytes; on CPU there is none."""
    beside = parts_beside(case, allocated)
    return allocated + sum(beside[part] for part in RESERVED_PARTS)


def device_bytes(case: Case, allocated: Number) -> Number:
    """What the device shows as used at most: reserved memory, the context, communicators, and blocks that are pending
    while a host that never waits is ahead."""
    return allocated + sum(parts_beside(case, allocated).values())


GIVEN_BACK = ("fragmentation", "churn", "blocks", "pending")
"""Parts that hold no tensor. When PyTorch is short of memory itself, it waits for pending blocks, gives free ones back
to the device and asks again before it gives up (torch 2.13, c10/cuda/CUDACachingAllocator.cpp, malloc:
release_cached_blocks, synchronize_and_free_events). It gives back whole segments alone; published runs' ends are
predicted best as if no hole stayed (decision 47). For others it gives nothing back: not for connections that NCCL makes
at the first call of an algorithm (nccl 5067397, src/init.cc, NCCL_RUNTIME_CONNECT), nor for kernels that CUDA loads at
their first launch (CUDA_MODULE_LOADING). What the device shows, of which a share is kept free, has these parts."""


def needed_bytes(case: Case, allocated: Number) -> Number:
    """What the device must have for `allocated` live bytes: all that it shows but what is given back."""
    beside = parts_beside(case, allocated)
    return allocated + sum(size for part, size in beside.items() if part not in GIVEN_BACK)


def lasting_bytes(case: Case, allocated: Number) -> Number:
    """What stays between steps on the stage that has most of it, as far as it is among `allocated` bytes.

    Where pipelines are columns, whose stages are taken as equal, it is all of these: a bound from below has nothing
    that passes.
    """
    if is_column(case.layout.pp):
        return allocated
    return minimum(allocated, maximum(0.0, *(_resident_bytes(case.at(stage)) for stage in case.stages())))


def _once_a_stage(figure: Callable[[Case], R]) -> Callable[[Case], R]:
    """A figure of a stage that the micro-batch's size does not change, worked out once for all sizes that share
    `of_every_stage`. Under a trace, and of columns, it runs each time."""

    @wraps(figure)
    def known(case: Case) -> R:
        if watched():
            return figure(case)
        key = figure, case.stage, msgspec.structs.replace(case.layout, micro_batch_size=1)
        try:
            found = case.of_every_stage.get(key)
        except TypeError:  # columns have no hash
            return figure(case)
        if found is None:
            found = case.of_every_stage[key] = figure(case)
        return found

    return known


@_once_a_stage
def _resident_bytes(case: Case) -> Number:
    return sum(engine_of(case.layout.engine).resident(case).values())


@_once_a_stage
def filled_bytes(case: Case) -> Number:
    """What the engine surely holds on a stage at the end of the last forward before a backward."""
    return sum(engine_of(case.layout.engine).filled(case).values())


@_once_a_stage
def _blocks(case: Case) -> Blocks | None:
    return engine_of(case.layout.engine).blocks(case)


def bytes_beside(case: Case, allocated: Number) -> Number:
    """What the allocator keeps for good beside `allocated` live bytes, whatever its coefficients: single allocations
    that nothing freed can hold, streams' own pools, and what loading took and training does not fill."""
    engine = engine_of(case.layout.engine)
    apart = engine.apart(case) + logits_hole_bytes(case)
    pools = engine.pools(case)
    if pools is None:
        return apart
    default = maximum(allocated - pools.gathers_in_use, pools.loaded)
    return apart + maximum(default + pools.gathers - allocated, 0.0)


def block_bytes(case: Case, allocated: Number) -> Number:
    """Bytes that the allocator keeps for large single allocations outside the model code, beside `allocated` live ones.

    What forward and backward have freed by then are blocks of their own sizes, which are given as they are or cut, and
    never joined (torch 2.13, c10/cuda/CUDACachingAllocator.cpp, get_free_block and try_merge_blocks: within one
    segment), so a larger block gets a segment of its own, which stays; none does where loading took more than training.
    Where the fullest moment is the one that has these blocks, only what a forward surely holds is known of others: a
    bound. Of pipelines in columns they are none.
    """
    if case.runtime.expandable_segments or not _knows_stages(case):
        return 0.0
    lives: list[Number] = [0.0]
    loads: list[Number] = [0.0]
    kept: list[Number] = [0.0]
    beyond: list[Number] = [0.0]
    for here in map(case.at, case.stages()):
        if (blocks := _blocks(here)) is None:
            return 0.0
        freed = _logits_bytes(here)
        made = sum(where(size > freed, size, 0.0) for size in blocks.sizes)
        lives.append(blocks.live)
        loads.append(blocks.loaded)
        kept.append(made)
        beyond.append(filled_bytes(here) + made - blocks.live)
    found = where(allocated > maximum(*lives), maximum(*kept), maximum(*beyond))
    return where(allocated > maximum(*loads), found, 0.0)


WIDE_LOGITS = ("eager-fp32", "shifted-fp32", "megatron", "nanotron")
"""Losses that hold all logits in fp32."""


def _logits_bytes(case: Case) -> Number:
    """Bytes of the largest block that a backward surely frees: fp32 logits of this rank, where a loss has them."""
    parts = case.parts
    if not case.here.last or parts.loss not in WIDE_LOGITS:
        return 0.0
    split = case.layout.tp if parts.vocab_parallel and parts.loss_parallel else 1
    return BYTES["fp32"] * case.tokens * case.model.vocab / split


def logits_hole_bytes(case: Case) -> Number:
    """Bytes of 16-bit logits let go once their fp32 copy is there, where the output is fp32 (shifted-fp32): all that
    the loss makes after them is twice as large, so the allocator gives none of it their block."""
    if case.parts.loss != "shifted-fp32" or not case.here.last:
        return 0.0
    return BYTES["bf16"] * case.tokens * case.model.vocab


def pending_bytes(case: Case, forwards: Number | None = None) -> Number:
    """Bytes of freed blocks that the allocator cannot give again yet, since another stream may still read them, on the
    first stage while the host is `forwards` forward passes ahead of the device (None: as many as it can launch).

    PyTorch's collectives record their tensors on NCCL's stream, and the allocator polls it when the next block is asked
    for (docs.pytorch.org, Tensor.record_stream). Where it is short itself it waits for that stream instead.
    """
    if case.cluster.gpu.kind == "cpu":
        return 0.0
    engine, first = engine_of(case.layout.engine), case.at(next(case.stages()))
    return (engine.forwards_queued(first) if forwards is None else forwards) * engine.recorded(first)


def more_communicators(layout: Layout) -> Number:
    """NCCL communicators of a rank beside its first: one for each axis that has ranks, and that of all ranks where
    there are several axes."""
    axes: Number = 0
    for size in (layout.pp, layout.dp_replicate, layout.dp_shard, layout.cp, layout.tp, layout.ep):
        axes = axes + where(size > 1, 1, 0)
    return where(axes > 1, axes, 0)
