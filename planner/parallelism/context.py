"""Context parallelism: every rank has a part of each sequence, and attention sees the others' keys and values.

Three ways to let it: a ring passes blocks of keys and values on (Liu et al. 2023), an all-gather fetches them all
(Llama 3, Grattafiori et al. 2024), Ulysses deals heads instead of positions by all-to-all (Jacobs et al. 2023).
The ranks hold the same weights, so states are sharded over them too. torch attends block by block either way, and
passes fp32 gradients of keys and values round. Not here: what attention holds meanwhile (inventory/compute.py).
"""

from __future__ import annotations

from planner.basics.arith import Number, ceil_div
from planner.basics.formula import formula
from planner.parallelism.collectives import Call, ideal_call, merged
from planner.spec import ModelSpec

RING = "Ring Attention, Liu et al. 2023: ranks - 1 blocks of keys and values pass each rank"
TORCH_RING = "torch 2.13, distributed/tensor/experimental/_context_parallel/_attention.py, of 16-bit inputs"


@formula(unit="bytes", source=RING)
def ring_bytes(key_value_bytes: Number, ranks: Number) -> Number:
    """Bytes a rank passes on in one layer's forward; `key_value_bytes` is its own part of keys and values."""
    return key_value_bytes * (ranks - 1)


@formula(unit="bytes", source="the gathered whole of all parts")
def gathered_bytes(key_value_bytes: Number, ranks: Number) -> Number:
    """Keys and values of the whole sequence, from one rank's part."""
    return key_value_bytes * ranks


def key_value_width(model: ModelSpec, tp: Number) -> Number:
    """Elements a token of the keys and values that one of `tp` tensor ranks has: in latent attention of every head."""
    each = (model.qk_width + model.v_width) / model.heads
    return each * ceil_div(model.heads if model.mla else model.kv_heads, tp)


@formula(unit="bytes", source=f"{TORCH_RING}: _SDPAMerger; operands of each operation of the last rank, which has most")
def torch_forward_bytes(results: Number, rows: Number, keys_values: Number, ranks: Number) -> Number:
    """Memory that one layer's forward moves beside the attention of its blocks.

    `results` are elements of this rank's result and `rows` of its log-sum-exps. The first block's result is widened
    and the last narrowed (6 bytes each); every other is widened (6), and merged by a difference (12), a product (8)
    and another difference (12), and its rows by six operations (60). Keys and values are laid end to end for each.
    """
    return results * (12 + 38 * (ranks - 1)) + (60 * rows + 4 * keys_values) * (ranks - 1)


@formula(unit="bytes", source=f"{TORCH_RING}: _templated_ring_attention_backward, of the last rank")
def torch_backward_bytes(queries: Number, keys_values: Number, ranks: Number) -> Number:
    """Memory that one layer's backward moves beside the attention of its blocks.

    fp32 gradients begin as zeros (4 bytes), each block's are added (10; but for the first block's, to half of the keys
    and values: 5, which are copied then: 8), and they are narrowed at the end (6). Keys and values (4) and their
    gradients (8) are laid end to end to be sent.
    """
    return queries * (10 + 10 * ranks) + keys_values * (20 + 17 * (ranks - 1) + 8 * ranks)


def layer_collectives(
    method: str,
    query_bytes: Number,
    key_value_bytes: Number,
    ranks: Number,
    layers: Number,
    *,
    recomputes: bool,
    passed_back_bytes: Number | None = None,
) -> list[Call]:
    """Collectives of `layers` layers for one micro-batch; bytes are of one rank's part of queries, keys and values.

    Backward of a ring passes keys, values and their gradients; of a gather, gathers again and scatters gradients.
    torch passes gradients of `passed_back_bytes` on as often as there are ranks, whichever way keys and values came.
    """
    times = 2 if recomputes else 1
    if method != "ulysses":
        whole = gathered_bytes(key_value_bytes, ranks)
        fetch: tuple[str, Number, Number] = "send", ranks - 1, ring_bytes(key_value_bytes, ranks)
        back = fetch
        if method == "allgather":
            fetch, back = ("all_gather", 1, whole), ("reduce_scatter", 1, whole)
        if passed_back_bytes is not None:
            back = "send", ranks, ranks * passed_back_bytes
        made = [(fetch, "forward", 1), (fetch, "backward", times), (back, "backward", 1)]
        return merged([_call(op, phase, layers * n * count, layers * n * sent) for (op, count, sent), phase, n in made])
    # queries and the output each cross once, keys and values together once
    dealt = 2 * query_bytes + key_value_bytes
    return [
        _call("all_to_all", "forward", 4 * layers, layers * dealt),
        _call("all_to_all", "backward", 4 * layers * times, layers * dealt * times),
    ]


def _call(op: str, phase: str, count: Number, payload_bytes: Number) -> Call:
    return ideal_call(op, "cp", phase, payload_bytes, count)
