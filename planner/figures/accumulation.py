"""Memory traffic of gradients that are added up over micro-batches: by autograd, or inside the products that make them.

Works on one layout and on columns. Not here: the products' own seconds (kernels/), or memory held (memory.py).
"""

from __future__ import annotations

from collections.abc import Iterable

from planner.basics.arith import Number
from planner.basics.formula import formula
from planner.inventory import Weight
from planner.parallelism.case import Case

FUSED_BYTES = {"fp32": (2.5, 7.0), "bf16": (0.0, 2.0)}
"""Bytes an element by which a weight gradient's product that adds to its buffer takes longer than one that does not,
of plain linears and of experts: for the former the rest of what it reads and writes is hidden behind its arithmetic.

Of SimuMax's operators at 4,096 tokens (tests/truth/kernels/training_ops.csv): products into fp32 take 1.065 times
those that add in bf16 on a B200 and 1.05 times the inputs' gradients on an A100, those in bf16 as long as the inputs';
experts' take 5.6 to 9.7 bytes an element longer in fp32 and 1.6 to 4 in bf16.
"""


@formula(unit="bytes", source="autograd adds a micro-batch's gradient to the earlier ones': two reads, one write")
def accumulation_bytes(trained: Number, element_bytes: Number, micro_batches: Number) -> Number:
    """Memory traffic of a micro-batch's backward for gradients that are added up, on average over the step."""
    return 3 * trained * element_bytes * (micro_batches - 1) / micro_batches


@formula(unit="bytes", source="measured operators of a training step (FUSED_BYTES)")
def fused_accumulation_bytes(plain: Number, plain_bytes: float, expert: Number, expert_bytes: float) -> Number:
    """The same where products add to the buffer themselves: each micro-batch's, the first one's too."""
    return plain * plain_bytes + expert * expert_bytes


def added_up_bytes(case: Case, trained: Iterable[Weight], element_bytes: float) -> Number:
    """Of the trained weights of one occurrence of a unit, in one micro-batch."""
    counts: dict[bool, Number] = {True: 0.0, False: 0.0}
    for weight in trained:
        counts[weight.expert] = counts[weight.expert] + weight.elements
    if not case.layout.facts.fuses_accumulation:
        return accumulation_bytes(counts[False] + counts[True], element_bytes, case.layout.grad_accum)
    plain_bytes, expert_bytes = FUSED_BYTES["bf16" if case.job.narrow_gradients else "fp32"]
    return fused_accumulation_bytes(counts[False], plain_bytes, counts[True], expert_bytes)
