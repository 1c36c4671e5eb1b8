"""What a described layer asks of a device beside its linear modules: sums over its operations.

Works on one layout and on columns. Not here: linear modules and experts (work.py), or what operations hold
(inventory/played.py).
"""

from __future__ import annotations

from typing import NamedTuple

from planner.basics.arith import Number
from planner.engines import engine_of
from planner.figures.flops import attention_flops, matmul_flops, product_operands
from planner.figures.kernels.products import Product
from planner.figures.kernels.step import Attention, KernelCall
from planner.figures.unitkernels import attention_factors
from planner.inventory.played import described_of, program_of, size
from planner.inventory.tensors import Size
from planner.parallelism.case import Case


class Beside(NamedTuple):
    """Of one occurrence of a layer: FLOP of its attention and of other products, the kernels of both, bytes moved and
    operations started, forward and backward."""

    attention_flops: Number
    product_flops: Number
    operands: Number
    forward: tuple[KernelCall, ...]
    backward: tuple[KernelCall, ...]
    forward_bytes: Number
    backward_bytes: Number
    forward_operations: Number
    backward_operations: Number


def beside(case: Case, unit: str) -> Beside:
    """Sums over the operations of a layer's description."""
    described, layout, job = described_of(case.model), case.layout, case.job
    program = program_of(described, engine_of(layout.engine).compute(case), unit)
    batch, seq = layout.micro_batch_size, job.seq_len
    longer, longer_back = attention_factors(case)
    span = job.attention_span
    sequences = batch * (seq / span)
    forward: list[KernelCall] = []
    backward: list[KernelCall] = []
    attention: Number = 0.0
    flops: Number = 0.0
    operands: Number = 0.0
    for one in described.units[unit].attention:
        seen, width = case.model.attended(span), (one.width + one.value_width) * one.heads
        attention, share = attention + attention_flops(case.tokens, seen, width, 1), seen / span
        call = Attention(sequences, span, one.heads, one.kv_heads, one.width, one.value_width, False, share * longer)
        forward.append(call)
        backward.append(call._replace(backward=True, times=share * longer_back))
    for product in described.units[unit].products:
        rows = size(product.rows).at(batch, seq)
        elements, times = product.n * product.k, _count(product.times, batch, seq)
        flops = flops + matmul_flops(elements, rows) * times
        operands = operands + product_operands(rows, product.n + product.k, elements) * times
        forward.append(Product(rows, product.n, product.k, times))
        backward.append(Product(rows, product.k, product.n, times))
        backward.append(Product(product.n, product.k, rows, times))
    return Beside(
        attention,
        flops,
        operands,
        tuple(forward),
        tuple(backward),
        size(program.moved).at(batch, seq),
        size(program.moved_back).at(batch, seq),
        _count(program.starts, batch, seq),
        _count(program.starts_back, batch, seq),
    )


def _count(of: float | tuple[float, ...], batch: Number, seq: Number) -> Number:
    """How often something is done: as often at any batch and length, or by the terms of a polynomial."""
    return Size(*of).at(batch, seq) if isinstance(of, tuple) else of
