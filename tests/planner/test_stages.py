"""Which stage has which layers and ends, for numbers and for columns of layouts alike, worked out by hand.

Not here: the order of their passes (test_schedules.py), or how long they take (test_makespan.py).
"""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

from planner.engines.fsdp2 import gathered
from planner.figures import memory
from planner.figures.memory import LinesByStage, memory_lines, peak_at
from planner.parallelism.case import Case, StageClass
from planner.spec import Layout, ModelSpec, TrainingJob, presets

CLUSTER = presets.cluster("dgx-h100", 64)
RUNTIME = presets.runtime("torchtitan")


def model(layers: int, dense: int = 0) -> ModelSpec:
    """Of a mixture of experts the first `dense` layers have none."""
    if not dense:
        return replace(presets.model("tiny"), layers=layers)
    mixture = presets.model("deepseek-v2-lite")
    assert mixture.moe is not None
    return replace(mixture, layers=layers, moe=replace(mixture.moe, dense_layers=dense))


def case(spec: ModelSpec, pp: object, schedule: str = "1f1b", virtual: int = 1) -> Case:
    layout = Layout(engine="torchtitan", pp=pp, grad_accum=8, pp_schedule=schedule, virtual_stages=virtual)  # type: ignore[arg-type]
    return Case(spec, TrainingJob(seq_len=64), layout, CLUSTER, RUNTIME)


def test_one_stage_has_both_ends_and_all_layers() -> None:
    assert list(case(model(5), 1).stages()) == [StageClass(True, True, 0, (0, 5))]
    assert list(case(model(5, 2), 1).stages()) == [StageClass(True, True, 0, (2, 3))]


def test_layers_are_dealt_evenly_in_order_with_the_dense_ones_first() -> None:
    stages = case(model(8, 3), 4).every_stage()

    assert [one.layers for one in stages] == [(2, 0), (1, 1), (0, 2), (0, 2)]
    assert [one.first for one in stages] == [True, False, False, False]
    assert [one.last for one in stages] == [False, False, False, True]
    assert [one.place for one in stages] == [0, 1, 2, 3]


def test_the_first_rank_of_zb_v_has_the_models_last_part() -> None:
    stages = case(model(8), 4, "zb-v").every_stage()

    assert [(one.first, one.last) for one in stages] == [(True, True), *[(False, False)] * 3]


def test_stages_of_one_kind_are_named_once_at_their_first_place() -> None:
    assert [one.place for one in case(model(8), 4).stages()] == [0, 1, 3]
    assert [one.place for one in case(model(8), 4, "zb-v").stages()] == [0, 1]
    assert [one.place for one in case(model(8), 2).stages()] == [0, 1]


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zb-v"])
def test_a_column_has_the_ends_that_each_of_its_layouts_has(schedule: str) -> None:
    sizes = [2, 4, 8]
    first, other = case(model(16), np.array(sizes, dtype=float), schedule).stages()

    for row, pp in enumerate(sizes):
        alone = case(model(16), pp, schedule).every_stage()
        assert (first.first, first.last) == (alone[0].first, alone[0].last)
        assert (other.first, other.last) == (alone[-1].first, alone[-1].last)
        assert other.place[row] == alone[-1].place
        assert [float(part[row]) for part in first.layers] == [float(part) for part in alone[0].layers]


def test_chunks_of_virtual_stages_go_through_the_model_in_order() -> None:
    chunks = case(model(8), 2, "interleaved", virtual=2).chunks()

    assert [one.layers for one in chunks] == [(0, 2)] * 4
    assert [(one.first, one.last) for one in chunks] == [(True, False), (False, False), (False, False), (False, True)]


def test_a_figure_of_a_unit_is_kept_for_all_stages_that_have_the_unit() -> None:
    for pp in (4, np.array([2.0, 4.0])):
        whole = case(model(8), pp)
        first, last = (whole.at(stage) for stage in list(whole.stages())[:: len(list(whole.stages())) - 1])
        assert gathered(first, "embed") > 0 == gathered(last, "embed")
        assert gathered(last, "tail") > 0 == gathered(first, "tail")
        assert gathered(first, "layer") == gathered(last, "layer") == gathered(case(model(8), pp), "layer") > 0
        assert first.units()["layer"] is last.units()["layer"]


def test_the_largest_of_the_stages_peaks_is_the_layouts() -> None:
    for one in (
        case(model(7, 2), 4),
        case(model(6), 4, "interleaved", 2),
        case(model(8), 4, "zb-v"),
        case(model(5), 1),
    ):
        lines, known = LinesByStage(one), memory_lines(one)

        assert len(list(lines.peaks(1))) == len(list(one.stages()))
        for micro in (1, 3):
            assert max(lines.peaks(micro)) == peak_at(known, micro)


def test_stages_are_looked_at_no_further_than_asked_and_those_with_most_experts_first(monkeypatch) -> None:
    looked_at: list[StageClass] = []
    kept = memory._stage_lines

    def watching(here: Case):
        looked_at.append(here.here)
        return kept(here)

    monkeypatch.setattr(memory, "_stage_lines", watching)
    lines = LinesByStage(case(model(8, 3), 4))
    first = next(lines.peaks(1))
    assert [one.layers for one in looked_at] == [(0, 2)]

    assert next(lines.peaks(2)) > first and len(looked_at) == 1
    assert len(list(lines.peaks(1))) == 4 == len(looked_at)
