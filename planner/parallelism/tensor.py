"""Tensor parallelism: heads, ffn and vocabulary split over ranks that see the same tokens (Shoeybi et al. 2019).

A column-parallel linear is followed by a row-parallel one, whose results are summed over the ranks. Sequence
parallelism (Korthikanti et al. 2022) splits the tokens between those pairs: the sum becomes a reduce-scatter, and a
gather stands before the next pair. Which dimension of which weight is split stands with the weight
(inventory/tensors.py). Not here: what is kept for backward (inventory/compute.py).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from planner.basics.arith import Number, minimum
from planner.basics.formula import formula
from planner.parallelism.collectives import Call, ideal_call

KORTHIKANTI = "Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models), section 4.2"
PAIRS = 2
"""Column- and row-parallel pairs in a layer: attention and the MLP."""


class OverlappedCollective(NamedTuple):
    """One collective of a pair of split linears, and the product of the pair that an engine runs it beside: forward, of
    the `inputs`' gradients, or of the `weights`'. It can hide in a `part` of that product; a share `apart` of it has no
    product beside. What the forward hides, it hides where backward runs it again too.
    """

    op: str
    phase: Literal["forward", "backward"]
    linear: Literal["column", "row"]
    product: Literal["forward", "inputs", "weights"]
    part: Number = 1.0
    apart: float = 0.0


def beside_weight_gradients(*, sequence_parallel: bool, regathers: bool) -> list[OverlappedCollective]:
    """What a column-parallel linear sends while its gradients are computed: the kept part of its input is gathered
    beside the inputs' gradients, and these are summed beside the weights'."""
    found = [
        OverlappedCollective("reduce_scatter" if sequence_parallel else "all_reduce", "backward", "column", "weights")
    ]
    return [*found, OverlappedCollective("all_gather", "backward", "column", "inputs")] if regathers else found


@formula(unit="s", source="definition: a call hides beside a product as long as both last")
def beside_seconds(call_s: Number, apart: float, product_s: Number, part: Number) -> Number:
    """Seconds of one collective that run beside a product."""
    return minimum(call_s * (1 - apart), product_s * part)


@formula(unit="bytes", source=KORTHIKANTI)
def residual_bytes(tokens: Number, hidden: Number, element_bytes: Number) -> Number:
    """The residual stream of one micro-batch, whole: what every sum, gather or scatter of a layer is given."""
    return tokens * hidden * element_bytes


def layer_collectives(
    payload_bytes: Number,
    layers: Number,
    *,
    sequence_parallel: bool,
    regathers: bool,
    recomputes: bool,
    input_grads: Number = PAIRS,
    input_grad_bytes: Number | None = None,
    stops_early: bool = False,
    gathered_bytes: Number | None = None,
) -> list[Call]:
    """Collectives of `layers` layers for one micro-batch of `payload_bytes` residual, of which gathers send
    `gathered_bytes` where it is brought to a narrower format before.

    `regathers`: the kept input is this rank's part, so backward gathers it again. `recomputes`: backward runs the
    forward once more, with its collectives. `input_grads`: sums of an input's gradient in a layer, more than one a pair
    where every column-parallel linear makes its own (without sequence parallelism), of `input_grad_bytes` where they
    are wider than the results. `stops_early`: the forward that runs again ends before the layer's last sum.
    """
    each, times = PAIRS * layers, 2 if recomputes else 1
    calls = []
    if not sequence_parallel:
        calls.append(_call("all_reduce", "forward", each, payload_bytes))
        again = each * (times - 1) - (layers if recomputes and stops_early else 0)
        wide = payload_bytes if input_grad_bytes is None else input_grad_bytes
        sums = input_grads * layers
        calls.append(ideal_call("all_reduce", "tp", "backward", again * payload_bytes + sums * wide, again + sums))
        return calls
    again = each if regathers else 0
    gathered = payload_bytes if gathered_bytes is None else gathered_bytes
    calls.append(_call("all_gather", "forward", each, gathered))
    calls.append(_call("reduce_scatter", "forward", each, payload_bytes))
    calls.append(_call("all_gather", "backward", each * times + again, gathered))
    calls.append(_call("reduce_scatter", "backward", each * times, payload_bytes))
    return calls


def embedding_collectives(payload_bytes: Number, *, sequence_parallel: bool) -> list[Call]:
    """A table split by vocabulary: the looked-up parts are summed; backward gathers only what was scattered."""
    if not sequence_parallel:
        return [_call("all_reduce", "forward", 1, payload_bytes)]
    return [_call("reduce_scatter", "forward", 1, payload_bytes), _call("all_gather", "backward", 1, payload_bytes)]


def head_collectives(
    payload_bytes: Number, logits_bytes: Number, statistics_bytes: Number, *, sequence_parallel: bool, gathers: bool
) -> list[Call]:
    """A head split by vocabulary: its input's gradient is summed; logits are gathered, or the loss exchanges three
    statistics a token (maximum, sum of exponentials, the target's logit)."""
    calls = [_call("reduce_scatter" if sequence_parallel else "all_reduce", "backward", 1, payload_bytes)]
    if sequence_parallel:
        calls.append(_call("all_gather", "forward", 1, payload_bytes))
    calls.append(
        _call("all_gather", "forward", 1, logits_bytes)
        if gathers
        else _call("all_reduce", "forward", 3, statistics_bytes)
    )
    return calls


def _call(op: str, phase: str, count: Number, payload_bytes: Number) -> Call:
    return ideal_call(op, "tp", phase, count * payload_bytes, count)
