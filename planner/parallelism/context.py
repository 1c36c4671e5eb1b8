"""Context parallelism: every rank has a part of each sequence, and attention sees the others' keys and values.

Three ways to let it: a ring passes blocks of keys and values on (Liu et al. 2023), an all-gather fetches them all
(Llama 3, Grattafiori et al. 2024), Ulysses deals heads instead of positions by all-to-all (Jacobs et al. 2023).
The ranks hold the same weights, so states are sharded over them too. Not here: what attention holds meanwhile
(inventory/compute.py).
"""

from __future__ import annotations

from planner.basics.arith import Number
from planner.basics.formula import formula
from planner.parallelism.base import Call, ideal_call

RING = "Ring Attention, Liu et al. 2023: ranks - 1 blocks of keys and values pass each rank"


@formula(unit="bytes", source=RING)
def ring_bytes(key_value_bytes: Number, ranks: Number) -> Number:
    """Bytes a rank passes on in one layer's forward; `key_value_bytes` is its own part of keys and values."""
    return key_value_bytes * (ranks - 1)


@formula(unit="bytes", source="the gathered whole of all parts")
def gathered_bytes(key_value_bytes: Number, ranks: Number) -> Number:
    """Keys and values of the whole sequence, from one rank's part."""
    return key_value_bytes * ranks


def layer_collectives(
    method: str, query_bytes: Number, key_value_bytes: Number, ranks: Number, layers: Number, *, recomputes: bool
) -> list[Call]:
    """Collectives of `layers` layers for one micro-batch; bytes are of one rank's part of queries, keys and values.

    Backward of a ring passes keys, values and their gradients; of a gather, gathers again and scatters gradients.
    """
    times = 2 if recomputes else 1
    if method == "ring":
        passed = ring_bytes(key_value_bytes, ranks)
        return [
            _call("send", "forward", layers * (ranks - 1), layers * passed),
            _call("send", "backward", layers * (ranks - 1) * (times + 1), layers * passed * (times + 1)),
        ]
    if method == "allgather":
        whole = gathered_bytes(key_value_bytes, ranks)
        return [
            _call("all_gather", "forward", layers, layers * whole),
            _call("all_gather", "backward", layers * times, layers * whole * times),
            _call("reduce_scatter", "backward", layers, layers * whole),
        ]
    # queries and the output each cross once, keys and values together once
    dealt = 2 * query_bytes + key_value_bytes
    return [
        _call("all_to_all", "forward", 4 * layers, layers * dealt),
        _call("all_to_all", "backward", 4 * layers * times, layers * dealt * times),
    ]


def _call(op: str, phase: str, count: Number, payload_bytes: Number) -> Call:
    return ideal_call(op, "cp", phase, payload_bytes, count)
