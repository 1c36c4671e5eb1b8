"""What all layers share of the positions: cosines and sines, ALiBi's line, masks; bytes a position or token by hand."""

from __future__ import annotations

import msgspec
import pytest

from planner.inventory.compute import Compute
from planner.inventory.ends import rotary_tables
from planner.inventory.tape import Tape
from planner.inventory.tensors import Size
from planner.spec import presets

NARROW = Compute(2, 2)
POSITIONS = [Size(per_position=8)]
"""Indices that layers are called with."""


def sizes(model: str, compute: Compute = NARROW) -> list[Size]:
    return [tensor.size for tensor in rotary_tables(Tape(), presets.model(model), compute)]


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("llama-3-8b", [Size(per_position=2 * 128)] * 2 + POSITIONS),
        ("phi-2", [Size(per_position=2 * 32)] * 2 + POSITIONS),  # 40 % of a head of 80
        # Half of a head of 64; and a mask of layers that slide beside that of the others.
        ("gpt-oss-20b", [Size(per_position=64)] * 2 + POSITIONS + [Size(per_pair=2)] * 2),
        (
            "gemma-3-1b",
            [Size(per_position=2 * 2 * 256)] * 2 + POSITIONS,
        ),  # a pair for sliding layers, one for the others
        ("deepseek-v2-lite", [Size(per_position=4 * 64), *POSITIONS]),  # complex numbers of two fp32
        ("falcon-7b", [Size(per_position=2 * 64)] * 2 + POSITIONS + [Size(per_square=1)]),  # a mask of booleans
        ("opt-125m", [Size(per_token=8)]),  # counts positions of every token
        ("bloom-560m", [Size(per_token=2 * 16), Size(per_pair=2)]),  # ALiBi's line of 16 heads, and scores' mask
        ("gpt2", []),
    ],
)
def test_tables_by_hand(model: str, expected: list[Size]) -> None:
    assert sizes(model) == expected


def test_packed_documents_have_positions_of_their_own_and_one_mask_of_numbers() -> None:
    packed = msgspec.structs.replace(NARROW, masked=True)

    assert sizes("llama-3-8b", packed) == [Size(per_token=2 * 128)] * 2 + [Size(per_pair=2)]


def test_tables_of_fp32_weights_are_twice_as_wide() -> None:
    assert sizes("llama-3-8b", Compute(4, 2, autocast=True)) == [Size(per_position=4 * 128)] * 2 + POSITIONS
