"""Stages and chunks with unequal layers: who holds what, what is in flight, and bounds below it.

Not here: equal stages (test_stages.py), the rules that allow a cut (test_technique_rules.py).
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from planner.decide.bounds import bound_lines
from planner.figures.memory import in_flight, memory_breakdown, peak_bytes
from planner.figures.steptime import step_time
from planner.parallelism.case import Case
from planner.parallelism.pipeline import actions, filled_by_chunk, most_layers_in_flight
from planner.spec import Layout, TrainingJob, presets
from planner.spec.calibration import calibration

CLUSTER = presets.cluster("dgx-h100", 64)
LLAMA = presets.model("llama-3-8b")
MIXTURE = presets.model("deepseek-v2-lite")
CALIBRATION = calibration("published")


def case(layers: int, *, dense: int = 0, engine: str = "megatron", **fields: Any) -> Case:
    model = msgspec.structs.replace(LLAMA, layers=layers)
    if dense:
        assert MIXTURE.moe is not None
        model = msgspec.structs.replace(
            MIXTURE, layers=layers, moe=msgspec.structs.replace(MIXTURE.moe, dense_layers=dense)
        )
    layout = Layout(**{"engine": engine, "pp_schedule": "interleaved", "grad_accum": 16, "zero_stage": 1} | fields)
    return Case(model, TrainingJob(seq_len=256), layout, CLUSTER, presets.runtime("megatron-core"))


def test_counted_ends_take_a_layer_off_the_first_and_the_last_chunk() -> None:
    both = case(10, pp=2, virtual_stages=3, counted_ends="both")

    assert both.layout.layers_by_stage(10) == (1, 2, 2, 2, 2, 1)
    assert [one.layers for one in both.chunks()] == [(0, 1), *[(0, 2)] * 4, (0, 1)]
    assert [one.layers for one in both.every_stage()] == [(0, 1 + 2 + 2), (0, 2 + 2 + 1)]
    assert [both.chunks_of(rank) for rank in (0, 1)] == [(1, 2, 2), (2, 2, 1)]
    assert case(11, pp=2, virtual_stages=2, counted_ends="embedding").layout.layers_by_stage(11) == (2, 3, 3, 3)
    assert case(11, pp=2, virtual_stages=2, counted_ends="head").layout.layers_by_stage(11) == (3, 3, 3, 2)


def test_dense_layers_are_those_of_the_models_first_chunks() -> None:
    stages = case(14, dense=5, pp=2, virtual_stages=2, stage_layers=(4, 4, 4, 2)).every_stage()

    assert [one.layers for one in stages] == [(4, 4), (1, 5)]  # ranks have chunks 0 and 2, 1 and 3


@pytest.mark.parametrize("dense", [0, 3])
@pytest.mark.parametrize("ends", ["none", "embedding", "head", "both"])
@pytest.mark.parametrize(("schedule", "virtual"), [("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zb-v", 2)])
def test_a_column_of_stages_holds_what_each_of_its_layouts_does(
    dense: int, ends: str, schedule: str, virtual: int
) -> None:
    sizes = [2, 3, 5]
    shape = {"dense": dense, "pp_schedule": schedule, "virtual_stages": virtual, "counted_ends": ends}
    column = case(31, pp=np.array(sizes, dtype=float), **shape)

    for row, pp in enumerate(sizes):
        alone = case(31, pp=pp, **shape)
        for rank in (0, 1, pp - 1):
            there = np.array([0, 1, -1])[[0, 1, pp - 1].index(rank)]
            found = column.rank_layers(column.layout.pp - 1 if there == -1 else int(there))
            here = [float(np.broadcast_to(part, len(sizes))[row]) for part in found]
            assert here == [float(part) for part in alone.rank_layers(rank)], (pp, rank)
        chunks = [sum(one.layers) for one in alone.chunks()]
        assert sum(chunks) == 31 == sum(sum(one.layers) for one in alone.every_stage())


def test_layers_in_flight_by_hand() -> None:
    # Two ranks, two chunks each, four micro-batches: rank 0 has five forwards ahead, of chunks 0 0 1 1 0, and when its
    # chunk 1 has given one back, a fourth of chunk 0.
    assert filled_by_chunk(2, 0, 4, 2) == [3, 2]
    assert most_layers_in_flight("interleaved", 2, 0, 4, (3, 1)) == 4 * 3 + 1 * 1
    assert most_layers_in_flight("interleaved", 2, 0, 4, (1, 3)) == 3 * 1 + 2 * 3
    assert filled_by_chunk(2, 1, 4, 2) == [2, 1]
    assert most_layers_in_flight("interleaved", 2, 1, 4, (1, 3)) == 2 * 1 + 3  # then they take turns


def test_layers_in_flight_are_what_counting_every_action_gives() -> None:
    for stages, batches, chunks in ((2, 32, (1, 3)), (4, 32, (0, 2, 2)), (4, 24, (3, 1, 1, 2)), (3, 5, (1, 2))):
        for rank in range(stages):
            held, most = [0] * len(chunks), 0
            for action in actions("interleaved", stages, batches, len(chunks))[rank]:
                held[action.chunk] += {"F": 1, "B": -1}[action.kind]
                most = max(most, sum(number * layers for number, layers in zip(held, chunks, strict=True)))
            assert most_layers_in_flight("interleaved", stages, rank, batches, chunks) == most
            filled = filled_by_chunk(stages, rank, batches, len(chunks))
            assert sum(number * layers for number, layers in zip(filled, chunks, strict=True)) <= most


def test_equal_chunks_in_flight_are_as_many_as_before() -> None:
    even, given = case(24, pp=4, virtual_stages=2), case(24, pp=4, virtual_stages=2, stage_layers=(3,) * 8)
    for one, other in zip(even.every_stage(), given.every_stage(), strict=True):
        assert in_flight(even.at(one)) == in_flight(given.at(other))
        assert peak_bytes(even.at(one)) == peak_bytes(given.at(other))


CUTS: tuple[dict[str, Any], ...] = (
    {"counted_ends": "both"},
    {"stage_layers": (1, 4, 4, 4, 4, 4, 4, 5)},
    {"stage_layers": (0, 6, 3, 6, 3, 6, 6, 0)},
)


@pytest.mark.parametrize("dense", [0, 3])
@pytest.mark.parametrize("virtual", [1, 2])
@pytest.mark.parametrize("cut", CUTS, ids=["counted", "given", "empty ends"])
def test_no_unevenly_cut_layout_is_below_its_bounds(cut: dict[str, Any], virtual: int, dense: int) -> None:
    schedule = "interleaved" if virtual > 1 else "1f1b"
    pp = 8 // virtual
    accums = np.array([8.0, 16.0, 64.0])
    shape = {"dense": dense, "virtual_stages": virtual, "pp_schedule": schedule} | cut
    columns = case(30, pp=np.full(3, float(pp)), grad_accum=accums, **shape)
    bounds = [np.broadcast_to(start + slope, 3) for start, slope in bound_lines(columns)]
    seconds = step_time(columns, CALIBRATION).step_s

    for row, accum in enumerate(accums):
        alone = case(30, pp=pp, grad_accum=int(accum), **shape)
        peak, step_s = peak_bytes(alone), step_time(alone, CALIBRATION).step_s
        assert max(float(one[row]) for one in bounds) <= peak * (1 + 1e-9)
        assert (0.1 if dense else 0.5) * step_s < float(np.broadcast_to(seconds, 3)[row]) <= step_s * (1 + 1e-9)


def test_an_end_that_stands_alone_is_answered() -> None:
    memory = memory_breakdown(case(8, pp=4, stage_layers=(0, 4, 4, 0), pp_schedule="1f1b", virtual_stages=1))

    held = {one.stage: one.peak.terms for one in memory.stages}
    table = 128256 * 4096  # 16-bit weights, whole and not padded: 128,256 is a multiple of 128
    assert held[0]["params"] == 2 * table
    assert held[0]["activations"] < held[1]["activations"] / 4
    assert held[3]["params"] == 2 * (table + 4096)
