"""Claims about scenes over drawn layouts: three faces print the same numbers, a figure's key leads to it in `planner
explain --json`, ranks are those of the groups, spans end with the step, and a folded step is the same step.

Six layouts in the quick tests, 50 in the long ones. Not here: pages in a browser (test_pages.py).
"""

from __future__ import annotations

import json
import re
from itertools import combinations, islice
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest
from test_drawn_questions import drawn

import planner as library
from planner.basics.quantities import format_bytes
from planner.decide.answers import Answer, Estimate
from planner.decide.estimate_json import estimate_dict
from planner.decide.explanation import as_json_object, explain
from planner.decide.planning import plan_of
from planner.figures.timeline import timeline
from planner.parallelism.case import MESH_AXES, axis_groups
from planner.spec.spans import COMPUTE
from planner.views.cells.memory import memory_lines
from planner.views.cells.time import text
from planner.views.pages import answer_page
from planner.views.scene import Lane
from planner.views.scene.difference import difference_of
from planner.views.scene.map import cells_of, picture_of
from planner.views.scene.memory import ON_CARD, memory_of, memory_of_plan
from planner.views.scene.time import axis_of, folded, key_of
from planner.views.svg.lanes import memory_difference_svg, memory_svg
from tests.browser import Opened

COUNTS = [6, pytest.param(50, marks=pytest.mark.long)]
SIZE = re.compile(r"[\d.]+ (?:[KMG]iB|B)\b")
SCHEDULES = (
    {"runtime": "torchtitan", "pp_schedule": "gpipe"},
    {"runtime": "megatron-core", "pp_schedule": "1f1b"},
    {"runtime": "megatron-core", "pp_schedule": "interleaved", "virtual_stages": 2},
    {"runtime": "torchtitan", "pp_schedule": "zb-h1"},
)


def layouts(count: int) -> list[tuple[Answer, Estimate]]:
    answers = (found for _, found in islice(drawn(2029), count))
    return [(found, found.best or found.estimates[0]) for found in answers]


def svg_words(picture: bytes) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]


def at_key(answer: dict[str, Any], key: str) -> float:
    """A figure in `planner explain --json`: of `bytes` by phase and term, of others by names."""
    first, *rest = key.split(".")
    if first == "collectives":
        op, group = rest
        calls = answer["estimate"]["comm"]["collectives"]
        return sum(call["wire_bytes_per_rank"] for call in calls if (call["op"], call["group"]) == (op, group))
    if first == "bytes":
        phase, term = ".".join(rest[:-1]), rest[-1]
        (row,) = (row for row in answer["bytes"] if (row["phase"], row["term"]) == (phase, term))
        return row["total_bytes"]
    found: Any = answer[first]
    for name in rest:
        found = found[name]
    return found


@pytest.mark.parametrize("count", COUNTS)
def test_cells_pictures_and_pages_print_the_same_bytes(count: int) -> None:
    for found, one in layouts(count):
        memory = memory_of(one)
        totals = [format_bytes(lane.end) for lane in memory.lanes]
        lines = memory_lines(memory, 80)
        assert [SIZE.findall(line)[-1] for line in lines[:-1]] == totals
        assert all(len(line) <= 80 for line in lines[:-1])
        words = svg_words(memory_svg(memory))
        assert [word for word in words if word in totals or SIZE.fullmatch(word)] == totals
        page = Opened(answer_page(found, "planner estimate").decode(), (), frozenset())
        if found.recommended is not None:
            key = f"estimates.{found.recommended}.memory.device_bytes"
            assert page.figures[key] == one.memory.device_bytes
            assert totals[-1] in page.text
        assert memory.card.end == pytest.approx(one.memory.device_bytes, rel=1e-12)
        assert [lane.end for lane in memory.phases] == pytest.approx([phase.total for phase in one.memory.phases])
        of_plan = memory_of_plan(plan_of(one))
        assert of_plan is not None and of_plan.card.end == pytest.approx(memory.card.end)


@pytest.mark.parametrize("model", ["gemma-2-9b", "gpt-oss-20b"])
@pytest.mark.parametrize("recompute", ["full", "sac:matmul"])
def test_no_term_is_below_zero_where_masks_of_two_kinds_are_kept_by_the_graph(model: str, recompute: str) -> None:
    """Layers of both kinds save a mask, once: what the first two of them move from one term to another was counted for
    every middle layer, so activations were too high and temporaries below zero, with the right sum."""
    found = library.estimate(model=model, gpus=8, dp_shard=8, micro_batch_size=2, recompute=recompute)
    memory = found.estimates[0].memory
    assert min(size for stage in memory.stages for phase in stage.phases for size in phase.terms.values()) >= 0
    assert [lane.end for lane in memory_of(found.estimates[0]).phases] == pytest.approx(
        [phase.total for phase in memory.phases]
    )


@pytest.mark.parametrize("count", COUNTS)
def test_the_key_of_a_rectangle_leads_to_its_figure(count: int) -> None:
    for found, one in layouts(count):
        explained = as_json_object(explain(found, found.estimates.index(one)))
        whole = json.loads(msgspec.json.encode(explained | {"estimate": estimate_dict(one)}))
        lanes = [*memory_of(one).lanes, *difference_of([("one", one)]).time]
        for lane in lanes:
            for rectangle in lane.rectangles:
                assert at_key(whole, rectangle.key) == pytest.approx(rectangle.size, rel=1e-6, abs=1e-6), rectangle


@pytest.mark.parametrize("count", COUNTS)
def test_the_keys_of_traffic_and_of_spans_lead_to_what_they_are_part_of(count: int) -> None:
    for found, one in layouts(count):
        whole = json.loads(msgspec.json.encode({"estimate": estimate_dict(one)}))
        for load in picture_of(plan_of(one)).loads or ():
            sent = sum(at_key(whole, key) for key in load.keys)
            assert load.inside_bytes + load.outside_bytes == pytest.approx(sent, rel=1e-6), load
        step = timeline(one.case, found.question.calibration)
        if step is None or one.case.pipelined:
            continue
        parts: dict[str, float] = {}
        for span in axis_of(one.case, step).tracks[0].spans:
            parts[key_of(span)] = parts.get(key_of(span), 0.0) + span.seconds
        for key in ("estimate.time.compute_s", "estimate.time.optimizer_s"):
            assert parts.get(key, 0.0) == pytest.approx(at_key(whole, key), rel=1e-6, abs=1e-9), key


@pytest.mark.parametrize("count", COUNTS)
def test_ranks_of_a_map_form_the_groups_of_the_mesh(count: int) -> None:
    for _, one in layouts(count):
        layout, picture = one.case.layout, picture_of(plan_of(one))
        nodes = range(picture.nodes) if picture.nodes <= 64 else ()
        cells = [cell for node in nodes for cell in cells_of(layout, MESH_AXES, picture.gpus_per_node, node)]
        for axis in picture.axes:
            if axis not in MESH_AXES or not cells:
                continue
            groups: dict[tuple[int, ...], list[int]] = {}
            for cell in cells:
                groups.setdefault(tuple(at for name, at in cell.place.items() if name != axis), []).append(cell.rank)
            assert sorted(map(tuple, groups.values())) == sorted(map(tuple, axis_groups(layout, axis)))


@pytest.mark.parametrize("count", COUNTS)
def test_spans_end_with_the_step(count: int) -> None:
    for found, one in layouts(count):
        step = timeline(one.case, found.question.calibration)
        if step is None:
            continue
        axis = axis_of(one.case, step)
        ends = [span.end_s for track in axis.tracks for span in track.spans]
        assert max(ends) <= step.step_s * (1 + 1e-9)
        parts = difference_of([("one", one)]).time[0]
        assert parts.end == pytest.approx(step.step_s, rel=1e-9)


@pytest.mark.parametrize("options", SCHEDULES, ids=lambda one: one["pp_schedule"])
def test_a_folded_step_is_the_step_without_whole_cycles(options: dict[str, Any]) -> None:
    for batches in (4, 64):
        found = library.estimate(model="7b", gpus=4, pp=4, micro_batch_size=1, grad_accum=batches, **options)
        one = found.estimates[0]
        step = timeline(one.case, found.question.calibration)
        assert step is not None
        axis = axis_of(one.case, step)
        fold = folded(axis)
        left_s = sum(part.cycles * part.period_s for part in fold.folds)
        assert fold.axis.end_s == pytest.approx(axis.end_s - left_s)
        assert bool(fold.folds) == (batches == 64)
        for track, short in zip(axis.tracks, fold.axis.tracks, strict=True):
            passes, kept = ([span for span in some.spans if span.stream == COMPUTE] for some in (track, short))
            busy_s, kept_s = (sum(span.seconds for span in some) for some in (passes, kept))
            assert (len(kept) < len(passes)) == bool(fold.folds) and busy_s - kept_s <= left_s * (1 + 1e-9)
            for before, after in zip(sorted(kept, key=lambda span: span.start_s),
                                     sorted(kept, key=lambda span: span.start_s)[1:], strict=False):  # fmt: skip
                assert before.end_s <= after.start_s + 1e-9, "passes of a stage never overlap"
        drawn_text = text(axis, (), 80, 80)
        for part in fold.folds:
            assert f"{part.cycles} cycles of" in " ".join(drawn_text.split())
        assert ("⋯" in drawn_text) == bool(fold.folds)


def test_schedules_look_different_at_80_columns() -> None:
    drawn_texts = []
    for options in SCHEDULES:
        found = library.estimate(model="7b", gpus=4, pp=4, micro_batch_size=1, grad_accum=8, **options)
        one = found.estimates[0]
        step = timeline(one.case, found.question.calibration)
        assert step is not None
        drawn_texts.append([line.rsplit("  ", 1)[0] for line in text(axis_of(one.case, step), (), 80, 80).split("\n")
                            if " compute " in line])  # fmt: skip
    assert all(one != other for one, other in combinations(drawn_texts, 2))


def test_layouts_side_by_side_are_on_one_scale_in_their_order() -> None:
    found = library.estimate(model="7b", gpus=16)
    sides = [(one.name, one) for one in found.estimates]
    both = difference_of(sides)
    assert [lane.name for lane in both.memory] == [one.name for one in found.estimates]
    assert [lane.end for lane in both.memory] == pytest.approx([one.memory.device_bytes for one in found.estimates])
    words = svg_words(memory_difference_svg(both))
    assert [word for word in words if SIZE.fullmatch(word)] == [format_bytes(lane.end) for lane in both.memory]
    assert memory_of(found.estimates[0]).card.name == ON_CARD and Lane("none", ()).end == 0.0
