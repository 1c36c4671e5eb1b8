"""What one layer asks of a device beside its linear modules.

Not here: who fills it in (byhand.py, described.py), or linear modules and their sums (work.py).
"""

from __future__ import annotations

import msgspec

from planner.basics.arith import Number
from planner.basics.quantities import BYTES
from planner.figures.kernels.step import KernelCall
from planner.parallelism.case import Case

BACKWARD_OPERATIONS = 1.8
"""Of forward's: counted, as the others, with a dispatch mode over Transformers 5.23's Llama on a CPU, views left out:
34 forward and 63 backward in fp32, 38 and 67 in bf16."""


class Beside(msgspec.Struct, frozen=True, kw_only=True):
    """Of one occurrence of a layer in one micro-batch: FLOP of its attention (`masked_flops` on pairs that a mask
    hides) and of products beside linear modules, with the elements of their matrices (`operands`); the kernels of both;
    bytes that go through memory beside kernels, those of attention apart, and operations started. The names with _back
    are of the backward, where FLOP and operands are twice the forward's, `moved_bytes_again` what recomputation moves
    beyond its share of the forward."""

    attention_flops: Number = 0.0
    masked_flops: Number = 0.0
    product_flops: Number = 0.0
    operands: Number = 0.0
    products: tuple[KernelCall, ...] = ()
    products_back: tuple[KernelCall, ...] = ()
    attention: tuple[KernelCall, ...] = ()
    attention_back: tuple[KernelCall, ...] = ()
    attention_bytes: Number = 0.0
    attention_bytes_back: Number = 0.0
    moved_bytes: Number = 0.0
    moved_bytes_back: Number = 0.0
    moved_bytes_again: Number = 0.0
    fixed_bytes_back: Number = 0.0
    operations: Number = 0.0
    operations_back: Number = 0.0


def element_bytes_of(case: Case) -> float:
    """Bytes an element of an activation takes."""
    return float(BYTES["fp32" if case.job.precision == "fp32" else "bf16"])
