"""What a rank sends for its part of each sequence, beside figures worked out by hand for one layer of Llama 3 8B.

8,192 tokens over four ranks in bf16: 2,048 tokens a rank, of 32 query heads and 8 key heads of 128 numbers.
Not here: which engine shares sequences how (test_engines.py).
"""

from __future__ import annotations

import pytest

from planner.parallelism.context import layer_collectives

QUERIES = 16_777_216  # 2,048 tokens x 32 heads x 128 x 2 bytes
KEYS_AND_VALUES = 8_388_608  # 2,048 tokens x 8 heads x 128 x 2 bytes x 2


@pytest.mark.parametrize(
    ("method", "recomputes", "expected"),
    [
        # Three of four blocks come from others; backward passes keys and values again, and their gradients beside.
        ("ring", False, {("send", "forward"): (3, 25_165_824), ("send", "backward"): (6, 50_331_648)}),
        # A recomputed forward passes keys and values once more.
        ("ring", True, {("send", "forward"): (3, 25_165_824), ("send", "backward"): (9, 75_497_472)}),
        # All 8,192 tokens' keys and values; their gradients are reduced as wide.
        (
            "allgather",
            False,
            {
                ("all_gather", "forward"): (1, 33_554_432),
                ("all_gather", "backward"): (1, 33_554_432),
                ("reduce_scatter", "backward"): (1, 33_554_432),
            },
        ),
        (
            "allgather",
            True,
            {
                ("all_gather", "forward"): (1, 33_554_432),
                ("all_gather", "backward"): (2, 67_108_864),
                ("reduce_scatter", "backward"): (1, 33_554_432),
            },
        ),
        # Queries, keys, values and the output are dealt: 16 + 4 + 4 + 16 MiB.
        ("ulysses", False, {("all_to_all", "forward"): (4, 41_943_040), ("all_to_all", "backward"): (4, 41_943_040)}),
        ("ulysses", True, {("all_to_all", "forward"): (4, 41_943_040), ("all_to_all", "backward"): (8, 83_886_080)}),
    ],
)
def test_a_layers_collectives_are_those_worked_out_by_hand(method, recomputes, expected):
    for layers in (1, 32):
        found = layer_collectives(method, QUERIES, KEYS_AND_VALUES, 4, layers, recomputes=recomputes)

        assert {(call.op, call.phase): (call.count, call.payload_bytes) for call in found} == {
            key: (count * layers, payload * layers) for key, (count, payload) in expected.items()
        }
        assert {call.axis for call in found} == {"cp"}
