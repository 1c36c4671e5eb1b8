"""What FSDP2 gathers, and which buffers it has beside, moment by moment: three layers, worked out by hand.

A layer is 10 bytes gathered and 7 as gradients, the embedding 30 and 21, the tail 100 and 70; a tied tail holds the
table. Not here: how many bytes a unit of a model has (test_by_hand.py).
"""

from __future__ import annotations

import pytest

from planner.engines.fsdp2 import Communication, UnitSizes, kept, kept_with_table, resharded, table_in_root
from planner.inventory import Moment

UNITS = UnitSizes({"embed": 30, "layer": 10, "tail": 100}, {"embed": 21, "layer": 7, "tail": 70}, ("layer",) * 3)


def at(phase: str, unit: str, layer: int = -1, *, entering: bool = False) -> Moment:
    return Moment(phase, unit, layer, (), 0, 0, entering)


@pytest.mark.parametrize(
    ("habit", "moment", "gathered", "buffers"),
    [
        # One unit at a time: its weights with the gather's output, and on entering the output of the one before.
        (resharded, at("forward", "embed"), 30, 30),
        (resharded, at("forward", "layer", 0, entering=True), 10, 10 + 30),
        (resharded, at("forward", "layer", 1, entering=True), 10, 10 + 10),
        (resharded, at("forward", "layer", 1), 10, 10),
        (resharded, at("forward", "tail", entering=True), 100, 100 + 10),
        (resharded, at("forward", "loss"), 100, 100),
        # The tail stays for backward; the gather of the next unit has begun, the reduction of the last is under way.
        (resharded, at("backward", "loss"), 100, 0),
        (resharded, at("backward", "tail"), 100, 10),
        (resharded, at("backward", "layer", 2), 10, 10 + 70),
        (resharded, at("backward", "layer", 1), 10, 10 + 7),
        (resharded, at("backward", "layer", 0), 10, 30 + 7),
        (resharded, at("backward", "embed"), 30, 7),
        # A tied table is in the root: there from the first lookup to the end, reduced last.
        (table_in_root, at("forward", "embed"), 100, 100),
        (table_in_root, at("forward", "layer", 0, entering=True), 110, 10 + 100),
        (table_in_root, at("forward", "layer", 1, entering=True), 110, 10 + 10),
        (table_in_root, at("forward", "layer", 1), 110, 10),
        (table_in_root, at("forward", "tail", entering=True), 100, 10),
        (table_in_root, at("backward", "loss"), 100, 0),
        (table_in_root, at("backward", "tail"), 100, 10),
        (table_in_root, at("backward", "layer", 2), 110, 10),
        (table_in_root, at("backward", "layer", 1), 110, 10 + 7),
        (table_in_root, at("backward", "layer", 0), 110, 7),
        (table_in_root, at("backward", "embed"), 100, 7),
        # Kept after forward: gathered units pile up, and nothing is gathered again.
        (kept, at("forward", "embed"), 30, 30),
        (kept, at("forward", "layer", 0, entering=True), 30 + 10, 10 + 30),
        (kept, at("forward", "layer", 1), 30 + 20, 10),
        (kept, at("forward", "tail", entering=True), 30 + 30 + 100, 100 + 10),
        (kept, at("forward", "loss"), 30 + 30 + 100, 100),
        (kept, at("backward", "tail"), 30 + 30 + 100, 0),
        (kept, at("backward", "layer", 2), 30 + 30, 70),
        (kept, at("backward", "layer", 1), 30 + 20, 7),
        (kept, at("backward", "embed"), 30, 7),
        (kept_with_table, at("forward", "layer", 0, entering=True), 100 + 10, 10 + 100),
        (kept_with_table, at("forward", "layer", 2), 100 + 30, 10),
        (kept_with_table, at("forward", "tail"), 100 + 30, 10),
        (kept_with_table, at("backward", "tail"), 100 + 30, 0),
        (kept_with_table, at("backward", "layer", 2), 100 + 30, 0),
        (kept_with_table, at("backward", "layer", 1), 100 + 20, 7),
        (kept_with_table, at("backward", "embed"), 100, 7),
    ],
)
def test_what_is_gathered_and_in_buffers_is_what_is_worked_out_by_hand(
    habit: Communication, moment: Moment, gathered: int, buffers: int
) -> None:
    assert habit(UNITS, moment) == (gathered, buffers)


def test_kinds_of_layers_by_turns_have_their_own_sizes_and_neighbours() -> None:
    kinds = ("dense", "dense", "layer", "dense", "layer")
    units = UnitSizes({"embed": 1, "dense": 5, "layer": 10, "tail": 100}, {}, kinds)

    assert [units.up_to(layer) for layer in range(5)] == [5, 10, 20, 25, 35]
    assert units.all_gathered == 1 + 35 + 100
    assert [units.before(at("forward", "layer", layer)) for layer in range(5)] == ["embed", *kinds[:4]]
    assert [units.after(at("forward", "layer", layer)) for layer in range(5)] == [*kinds[1:], "tail"]
