"""Collectives of split linears that run beside those linears' own products: seconds of them that no pass waits for.

Which do is the engine's (engines/base.py, `beside`). Works on one layout and on columns. Not here: seconds of
the collectives (comm.py) or of the products (passes.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from planner.basics.arith import Number, is_column
from planner.engines import engine_of
from planner.figures.flops import matmul_flops, product_operands
from planner.figures.unitkernels import product_kernels
from planner.figures.work import Load
from planner.inventory import Weight
from planner.inventory.names import names_of
from planner.parallelism.case import Case
from planner.parallelism.tensor import beside_seconds

CallSeconds = dict[tuple[str, str, str], Number]
"""Seconds of one call by unit, operation and phase."""


def hidden_of(
    case: Case, calls_s: CallSeconds, working_s: Callable[[Load], Number], share: float
) -> dict[str, tuple[Number, Number]]:
    """Seconds of its tensor group's collectives that run beside the products of one occurrence of a unit, forward and
    backward: `share` of what could. Experts' products have no collective beside them."""
    split = is_column(case.layout.tp) or case.layout.tp > 1
    if not split or not share:
        return {}
    whole = case.unsplit
    beside = engine_of(case.layout.engine).beside(whole)
    again = ("forward", "backward") if case.layout.recompute == "full" else ("forward",)
    found: dict[str, tuple[Number, Number]] = {}
    for unit in case.kinds:
        hidden: dict[str, Number] = {"forward": 0.0, "backward": 0.0}
        for pair in pairs_of(whole, unit):
            products: dict[tuple[str, str], Number] = {}
            for one in beside:
                call_s = calls_s.get((unit, one.op, one.phase))
                if call_s is None:
                    continue
                product = one.linear, one.product
                if product not in products:
                    products[product] = working_s(_load(whole, unit, pair[one.linear], one.product))
                seconds = share * beside_seconds(call_s, one.apart, products[product], one.part)
                for phase in again if one.phase == "forward" else ("backward",):
                    hidden[phase] = hidden[phase] + seconds
        found[unit] = hidden["forward"], hidden["backward"]
    return found


def pairs_of(case: Case, unit: str) -> list[dict[str, list[Weight]]]:
    """The pairs of split linears of a layer, attention's and the MLP's where that has no experts: weights split by
    their outputs ("column") and by their inputs ("row")."""
    if case.model.described is not None:
        return []
    inside = f"{names_of(case.model.family).attention_module}."
    weights = [one for one in case.units()[unit] if len(one.shape) == 2 and one.split is not None]
    mixture = any(one.expert for one in case.units()[unit])
    attention = [one for one in weights if one.name.startswith(inside)]
    rest = [] if mixture else [one for one in weights if not one.name.startswith(inside)]
    return [
        {
            "column": [one for one in pair if one.split == int(one.transposed)],
            "row": [one for one in pair if one.split != int(one.transposed)],
        }
        for pair in (attention, rest)
        if pair
    ]


def _load(case: Case, unit: str, weights: Iterable[Weight], product: str) -> Load:
    """One pass of a micro-batch's tokens through weights: forward, or for the gradients of inputs or of weights."""
    tokens, made = case.tokens, Load()
    for weight in weights:
        if product == "weights" and not weight.trainable:
            continue
        forward, gradients = product_kernels(weight, tokens, case.job.product_rate)
        kernel = forward[0] if product == "forward" else gradients[product == "weights"]
        alone = Load(
            product_flops=matmul_flops(weight.elements, tokens),
            operands=product_operands(tokens, sum(weight.features), weight.elements),
            kernels=(kernel,),
        )
        made = made.and_again(alone)
    return made
