"""The largest micro-batch or length at which a row's layout fits: what `planner fit` finds where all else is given.

A row says that the next step ran out of memory, so all of the device counts, no headroom. What was measured decides
nothing: the quantity itself is taken out of the case. Not here: memory (figures/memory.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec

from planner.basics.arith import boundary
from planner.parallelism.case import Case
from planner.spec.options import DEFAULT_SEQ_STEP, LARGEST_BATCH, LARGEST_SEQ

Bytes = Callable[[Case], float]
"""Device bytes of a case."""


def largest_micro_batch(case: Case, device_bytes: Bytes) -> float | None:
    """Sequences of the largest micro-batch that fits the device; None where its memory is unknown, a half where not
    even one sequence fits."""

    def at(size: int) -> Case:
        return msgspec.structs.replace(case, layout=msgspec.structs.replace(case.layout, micro_batch_size=size))

    return _largest(case, range(1, LARGEST_BATCH + 1), at, device_bytes)


def largest_seq_len(case: Case, device_bytes: Bytes) -> float | None:
    """Tokens of the longest sequence that fits the device, in steps of `planner fit`; half of one where not even that
    fits. Only learned positions end with the model's own length."""
    most = case.model.max_seq_len if case.model.positions == "learned" else LARGEST_SEQ

    def at(seq_len: int) -> Case:
        return msgspec.structs.replace(case, job=msgspec.structs.replace(case.job, seq_len=seq_len))

    return _largest(case, range(DEFAULT_SEQ_STEP, most + 1, DEFAULT_SEQ_STEP), at, device_bytes)


def _largest(case: Case, values: Sequence[int], at: Callable[[int], Case], device_bytes: Bytes) -> float | None:
    capacity = case.cluster.gpu.memory_bytes
    if capacity is None:
        return None
    edge = boundary(len(values), lambda place: device_bytes(at(values[place])) <= capacity)
    return values[edge - 1] if edge else values[0] / 2
