"""What a described layer asks of a device beside its linear modules: sums over its operations.

Works on one layout and on columns. Not here: linear modules and experts (work.py), or what operations hold
(inventory/played.py).
"""

from __future__ import annotations

from planner.basics.arith import Number
from planner.engines import engine_of
from planner.figures.beside import Beside
from planner.figures.flops import attention_flops, matmul_flops, product_operands
from planner.figures.kernels.products import Product
from planner.figures.kernels.step import Attention
from planner.figures.unitkernels import SCORES, attention_factors, scores_products
from planner.inventory.played import described_of, program_of, size, variant_of
from planner.inventory.tensors import Size
from planner.inventory.towers import of_images
from planner.parallelism.case import Case
from planner.spec.described import Attend
from planner.spec.seeing import DescribedWithImages


def beside_described(case: Case, unit: str) -> Beside:
    """A layer's work beside its linear modules: sums over the operations of its description."""
    described, layout, job = described_of(case.model), case.layout, case.job
    program = program_of(described, engine_of(layout.engine).compute(case), unit)
    batch, seq, tp = layout.micro_batch_size, job.seq_len, layout.tp
    moved, moved_back = size(program.moved, tp), size(program.moved_back, tp)
    pairs: Number = 0.0
    longer, longer_back = attention_factors(case)
    span = job.attention_span
    sequences = batch * (seq / span)
    calls: list[Attention] = []
    products: list[Product] = []
    gradients: list[Product] = []
    attention: Number = 0.0
    masked: Number = 0.0
    flops: Number = 0.0
    operands: Number = 0.0
    for one in described.units[unit].attention:
        heads, kv_heads, width = _of_rank(one, tp)
        seen = case.model.attended(span)
        attention, share = attention + attention_flops(case.tokens, seen, width * heads, 1), seen / span
        calls.append(Attention(sequences, span, heads, kv_heads, one.width, one.value_width, False, share))
    for one in described.units[unit].scores:
        heads, _, width = _of_rank(one, tp)
        seen = case.model.attended(span)
        attention = attention + attention_flops(case.tokens, seen, width * heads, 1)
        masked = masked + attention_flops(case.tokens, 2 * span - seen, width * heads, 1)
        forward, back = scores_products(sequences * heads * span, span, one.width, one.value_width)
        products, gradients = [*products, *forward], [*gradients, *back]
        pairs = pairs + sequences * heads * span * span
        moved, moved_back = _beside_pairs(moved), _beside_pairs(moved_back)
    for product in described.units[unit].products:
        rows = size(product.rows, tp).at(batch, seq)
        elements, times = product.n * product.k, _count(product.times, batch, seq)
        flops = flops + matmul_flops(elements, rows) * times
        operands = operands + product_operands(rows, product.n + product.k, elements) * times
        products.append(Product(rows, product.n, product.k, times))
        gradients.append(Product(rows, product.k, product.n, times))
        gradients.append(Product(product.n, product.k, rows, times))
    return Beside(
        attention_flops=attention,
        masked_flops=masked,
        product_flops=flops,
        operands=operands,
        products=tuple(products),
        products_back=tuple(gradients),
        attention=tuple(one._replace(times=one.times * longer) for one in calls),
        attention_back=tuple(one._replace(backward=True, times=one.times * longer_back) for one in calls),
        attention_bytes=pairs * SCORES["eager"][0],
        attention_bytes_back=pairs * SCORES["eager"][1],
        moved_bytes=moved.at(batch, seq),
        moved_bytes_back=moved_back.at(batch, seq),
        operations=_count(program.starts, batch, seq),
        operations_back=_count(program.starts_back, batch, seq),
    )


def towers_beside(case: Case) -> Beside:
    """A model's towers on the images of a micro-batch. Attention is over whole images, one a sequence or as large as
    the model fixes them, or over windows of these; without a causal mask it is as two calls with one, whose kernels
    were measured."""
    described, element = described_of(case.model), engine_of(case.layout.engine).compute(case)
    if not isinstance(described, DescribedWithImages) or described.seeing is None:
        return Beside()
    towers, batch, seq = described.seeing, case.layout.micro_batch_size, case.job.seq_len
    program, positions = towers.programs[variant_of(element)], batch * described.images
    patches = positions * towers.patches
    flops: Number = 0.0
    operands: Number = 0.0
    attention: Number = 0.0
    started: Number = program.starts
    products: list[Product] = []
    gradients: list[Product] = []
    calls: list[Attention] = []
    for one in towers.products:
        rows, times = size(one.rows).at(1, positions), _count(one.times, 1, positions)
        flops = flops + matmul_flops(one.n * one.k, rows) * times
        operands = operands + product_operands(rows, one.n + one.k, one.n * one.k) * times
        products.append(Product(rows, one.n, one.k, times))
        gradients += [Product(rows, one.k, one.n, times), Product(one.n, one.k, rows, times)]
        started = started + times
    for each in towers.attention:
        span = each.window or towers.patches * (towers.per_image or described.images)
        attention = attention + 2 * attention_flops(patches, span, 2 * each.heads * each.width, each.times)
        count, heads, width = patches / span, each.heads, each.width
        calls.append(Attention(count, span, heads, heads, width, width, False, 2.0 * each.times))
        started = started + each.times * count
    return Beside(
        attention_flops=attention,
        product_flops=flops,
        operands=operands,
        products=tuple(products),
        products_back=tuple(gradients),
        attention=tuple(calls),
        attention_back=tuple(one._replace(backward=True) for one in calls),
        moved_bytes=of_images(described, program.moved).at(batch, seq),
        operations=started,
    )


def _of_rank(one: Attend, tp: Number) -> tuple[Number, Number, int]:
    """Heads and heads of keys on one of `tp` tensor ranks, and the widths of a query and a value head together."""
    ranks = tp if one.split else 1
    return one.heads / ranks, one.kv_heads / ranks, one.width + one.value_width


def _beside_pairs(moved: Size) -> Size:
    """Bytes moved without those of scores, which are counted by the score (SCORES)."""
    return moved._replace(per_pair=0.0, per_square=0.0)


def _count(of: float | tuple[float, ...], batch: Number, seq: Number) -> Number:
    """How often something is done: as often at any batch and length, or by the terms of a polynomial."""
    return Size(*of).at(batch, seq) if isinstance(of, tuple) else of
