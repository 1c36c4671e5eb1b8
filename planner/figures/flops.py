"""FLOP of linear modules and of attention, and the elements of a product's matrices.

Not here: what one unit asks of a rank (work.py, described.py).
"""

from __future__ import annotations

from planner.basics.arith import Number
from planner.basics.formula import formula

PALM = "Chowdhery et al. 2022 (PaLM), appendix B: 6P + 12 L h s FLOP a token; causal attention needs half of the second"


@formula(unit="FLOP", source="definition: a multiplication and an addition for each weight element and token")
def matmul_flops(elements: Number, tokens: Number) -> Number:
    """One pass of `tokens` through linear modules of `elements` weights: 2 P tokens."""
    return 2 * elements * tokens


@formula(unit="FLOP", source=PALM)
def attention_flops(tokens: Number, attended: Number, width: Number, layers: Number) -> Number:
    """Scores and weighted values of one forward pass under a causal mask: half of the full square.

    `width` is the elements a token of queries and of values together, `attended` the keys a query would see without
    the mask. Flash kernels recompute the scores in backward; that is not counted.
    """
    return layers * width * attended * tokens


@formula(unit="FLOP", source=PALM)
def backward_flops(trained: Number, frozen: Number, attention: Number, tokens: Number) -> Number:
    """Backward of a micro-batch: 4 P tokens where weights are trained, 2 P where they are frozen, attention twice.

    A frozen weight (LoRA's base) needs no gradient, but its input does; the first layer's is counted though spared.
    """
    return 2 * matmul_flops(trained, tokens) + matmul_flops(frozen, tokens) + 2 * attention


@formula(unit="elements", source="the three matrices of a product (m x k) @ (k x n): mk + kn + mn")
def product_operands(rows: Number, features: Number, weight_elements: Number) -> Number:
    """Elements that products read and write: `rows` of inputs and outputs of `features` together, and the weights.

    Products of all experts that a rank has count as one of a number of rows for each expert.
    """
    return rows * features + weight_elements
