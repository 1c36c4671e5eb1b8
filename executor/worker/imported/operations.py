"""Operations of a recording: which are products, what they move, and those of a unit beside its linear modules.

Not here: recording them (record.py), or programs made of them (programs.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from executor.worker.imported.record import Operation
from planner.spec.described import Attend, OtherProduct

PRODUCTS = frozenset(("mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "convolution", "convolution_backward"))
GROUPED = "_grouped_mm"
COPY = "_to_copy"
ATTENTION = "_scaled_dot_product"
FORMATS = frozenset(("_to_copy", "sum"))
"""What autograd does to give a gradient the format and the shape of its input (validate_outputs of its engine)."""
Occurrences = int | tuple[float, ...]
"""How many there are: a number, or the terms of a polynomial of batch and length."""


class UnitProducts(NamedTuple):
    """Of a unit: fused attention, products beside linear modules, and attention by two products whose scores are in
    memory."""

    attention: tuple[Attend, ...]
    others: tuple[OtherProduct, ...]
    scores: tuple[Attend, ...]


def bytes_of(op: Operation) -> list[int]:
    """Bytes of each tensor that an operation reads or writes; of an embedding's table, of the rows that it takes."""
    inputs = op.results if op.name == "embedding" else op.inputs
    return [one.bytes for one in (*inputs, *op.results)]


def columns(op: Operation) -> tuple[int, int]:
    """Columns of a product's result, and over how many elements each is summed."""
    if op.name == "convolution":
        return op.results[0].shape[1], int(np.prod(op.inputs[1].shape[1:]))
    return op.results[0].shape[-1], op.inputs[0 if op.name == GROUPED else -2].shape[-1]
