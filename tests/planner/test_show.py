"""`planner show`: who stands where, what the links carry, and drawings that stay small and readable at any size."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import msgspec
import pytest

from planner.ask.options import question
from planner.ask.question import case_of
from planner.basics import command
from planner.basics.quantities import format_bytes
from planner.cli import planner
from planner.decide.planning import plan_of
from planner.decide.strategies import answer
from planner.figures.comm import comm_volume
from planner.parallelism.case import axis_groups, coordinates
from planner.spec import Layout
from planner.spec.plan import Collective, Plan, Prediction, encode_plan
from planner.views.cells.map import print_plan
from planner.views.scene.map import cells_of, picture_of
from planner.views.svg.map import svg_of

SVG = "{http://www.w3.org/2000/svg}"


@cache
def fsdp(gpus: int, model: str = "7b") -> Plan:
    """FSDP over that many H100s, as the command plans it."""
    found = answer(question({"model": model, "gpus": str(gpus), "dp_shard": str(gpus), "micro_batch_size": "1"}))
    return plan_of(found.estimates[0])


def planned(layout: Layout, *calls: Collective, model: str = "13b") -> Plan:
    """A layout that no engine plans yet, with the collectives it would have."""
    base = plan_of(answer(question({"model": model, "gpus": str(layout.world_size), "strategy": "fsdp"})).estimates[0])
    told = msgspec.structs.replace(base.prediction, collectives=calls)
    return msgspec.structs.replace(base, layout=layout, prediction=told)


def call(op: str, group: str, ranks: int, payload_bytes: float) -> Collective:
    return Collective(
        op=op, group=group, ranks=ranks, unit="layer", phase="forward", count=1, payload_bytes=payload_bytes
    )


def sixty_four() -> Plan:
    """2 pipeline x 8 data x 4 tensor: the layout of the issue."""
    layout = Layout(engine="fsdp2", zero_stage=3, pp=2, dp_shard=8, tp=4, grad_accum=8)
    return planned(layout, call("all_reduce", "tp", 4, 8e9), call("all_gather", "dp_shard", 8, 16e9))


def large(gpus: int = 512) -> Plan:
    layout = Layout(engine="fsdp2", zero_stage=3, pp=8, dp_replicate=2, dp_shard=gpus // 128, tp=8, grad_accum=16)
    return planned(layout, call("all_reduce", "tp", 8, 8e9), call("all_reduce", "dp_replicate", 2, 1e9), model="70b")


def uneven() -> Plan:
    """tp of 3 on nodes of 8: groups are cut by node borders."""
    return planned(Layout(engine="fsdp2", zero_stage=3, pp=4, dp_shard=4, tp=3), call("all_reduce", "tp", 3, 1e9))


EVERY = {
    "one GPU": lambda: plan_of(answer(question({"model": "tiny", "cluster": "localhost", "gpus": "1"})).estimates[0]),
    "8 GPUs": lambda: fsdp(8, "1b"),
    "32 GPUs, HSDP": lambda: plan_of(answer(question({"model": "7b", "gpus": "32", "dp_replicate": "4"})).estimates[0]),
    "64 GPUs, 3D": sixty_four,
    "48 GPUs, uneven": uneven,
    "512 GPUs, FSDP": lambda: fsdp(512),
    "512 GPUs, 4D": large,
    "16384 GPUs": lambda: large(16384),
}
every_plan = pytest.mark.parametrize("make", EVERY.values(), ids=EVERY.keys())


# -- what there is to draw -----------------------------------------------------------------------------------------


def test_stages_hold_all_layers_once_and_stand_on_their_own_nodes():
    first, second = picture_of(sixty_four()).stages

    assert (first.layers, second.layers) == (((0, 19),), ((20, 39),))
    assert (first.ranks, first.nodes, second.ranks, second.nodes) == ((0, 31), (0, 3), (32, 63), (4, 7))
    assert (first.embedding, first.head, second.embedding, second.head) == (True, False, False, True)


def test_uneven_stages_hold_the_layers_they_were_given():
    layout = Layout(engine="torchtitan", pp=3, dp_shard=4, tp=4, zero_stage=3, stage_layers=(14, 14, 12))

    assert [stage.layers for stage in picture_of(planned(layout)).stages] == [((0, 13),), ((14, 27),), ((28, 39),)]


def test_virtual_stages_go_round_the_pipeline(capsys):
    plan = planned(Layout(engine="torchtitan", pp=2, dp_shard=4, pp_schedule="interleaved", virtual_stages=2))
    print_plan(plan)

    assert [stage.layers for stage in picture_of(plan).stages] == [((0, 9), (20, 29)), ((10, 19), (30, 39))]
    assert "embedding, layers 0-9 and 20-29" in capsys.readouterr().out


def test_groups_are_those_of_the_rank_map():
    plan = sixty_four()
    groups = {group.axis: group for group in picture_of(plan).groups}

    assert groups["tp"].first == (0, 1, 2, 3)
    assert groups["dp_shard"].first == tuple(axis_groups(plan.layout, "dp_shard")[0])
    assert {axis: (group.groups, group.nodes) for axis, group in groups.items()} == {
        "pp": (32, 2),
        "dp_shard": (8, 4),
        "tp": (16, 1),
    }


def test_a_group_that_a_node_border_cuts_anywhere_reaches_two_nodes():
    assert {group.axis: group.nodes for group in picture_of(uneven()).groups}["tp"] == 2


def test_expert_groups_are_neighbours_inside_stage_and_replica():
    plan = planned(Layout(engine="fsdp2", zero_stage=3, dp_replicate=2, dp_shard=16, ep=8))
    picture = picture_of(plan)

    assert {group.axis: (group.ranks, group.groups, group.first) for group in picture.groups}["ep"] == (
        8, 4, tuple(range(8)),
    )  # fmt: skip
    assert [cell.place["ep"] for cell in picture.patterns[0].cells] == list(range(8))


@every_plan
def test_patterns_stand_for_every_node_once_and_shift_their_first(make):
    plan = make()
    picture = picture_of(plan)
    seen: list[int] = []
    for pattern in picture.patterns:
        nodes = [node for low, high in pattern.nodes for node in range(low, high + 1)]
        assert len(nodes) == pattern.count
        seen += nodes
        for node in (nodes[0], nodes[-1]):
            cells = cells_of(plan.layout, picture.axes, picture.gpus_per_node, node)
            for axis in picture.axes:
                shift = cells[0].place[axis] - pattern.cells[0].place[axis]
                expected = [cell.place[axis] + shift for cell in pattern.cells]
                assert [coordinates(plan.layout, cell.rank)[axis] for cell in cells] == expected
    assert sorted(seen) == list(range(picture.nodes))


def test_a_cluster_of_equal_nodes_is_one_pattern_and_an_uneven_one_three():
    assert [len(picture_of(plan).patterns) for plan in (large(), fsdp(512), uneven())] == [1, 1, 3]


# -- bytes on the links --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [{"dp_shard": "32"}, {"dp_replicate": "4"}, {"dp_replicate": "32"}])
def test_links_carry_what_the_planner_predicts(given):
    asked = question({"model": "7b", "gpus": "32", **given})
    plan = plan_of(answer(asked).estimates[0])
    volume, picture = comm_volume(case_of(asked, plan.layout)), picture_of(plan)

    assert picture.outside_bytes == pytest.approx(volume.inter_node_bytes_per_rank)
    assert picture.inside_bytes + picture.outside_bytes == pytest.approx(volume.wire_bytes_per_rank)


def test_a_group_inside_a_node_sends_nothing_out_of_it():
    loads = {load.axis: load for load in picture_of(sixty_four()).loads}

    assert (loads["tp"].inside_bytes, loads["tp"].outside_bytes) == (2 * 8e9 * 3 / 4, 0)
    # 8 shards as 2 on each of 4 nodes: half of the 16 GB inside, three quarters of the other half between nodes.
    assert (loads["dp_shard"].inside_bytes, loads["dp_shard"].outside_bytes) == (16e9 / 2, 16e9 / 2 * 3 / 4)


def test_a_pipeline_s_hand_overs_and_the_shards_over_context_ranks_are_groups_too():
    layout = Layout(engine="torchtitan", zero_stage=3, pp=2, dp_shard=2, cp=2, tp=8)
    plan = planned(layout, call("send", "pp", 2, 3e9), call("all_gather", "dp_shard_cp", 4, 8e9))
    picture = picture_of(plan)

    assert [group.axis for group in picture.groups] == ["pp", "dp_shard", "dp_shard_cp", "cp", "tp"]
    assert {load.axis: load.inside_bytes + load.outside_bytes for load in picture.loads} == {
        "pp": 3e9, "dp_shard_cp": 8e9 * 3 / 4,
    }  # fmt: skip


@pytest.mark.parametrize("cluster", ["dgx-h100", "gb200-nvl72", "frontier", "dgx-h100-tapered"])
def test_the_tiers_of_a_network_carry_together_what_a_gpu_sends(cluster, capsys):
    gpus = {"gb200-nvl72": 144, "dgx-h100-tapered": 512}.get(cluster, 32)
    asked = {"model": "7b", "cluster": cluster, "gpus": str(gpus), "dp_shard": str(gpus), "micro_batch_size": "1"}
    plan = plan_of(answer(question(asked)).estimates[0])
    picture = picture_of(plan)
    print_plan(plan)
    out = capsys.readouterr().out

    assert [tier.name for tier in picture.tiers] == [level.name for level in plan.cluster.levels]
    assert sum(tier.sent_bytes for tier in picture.tiers) == pytest.approx(picture.inside_bytes + picture.outside_bytes)
    assert all(tier.sent_bytes > 0 and tier.link in out for tier in picture.tiers)
    assert picture.domain == ("NVLink rack" if cluster == "gb200-nvl72" else "node")


def test_a_plan_without_prediction_has_unknown_links_not_empty_ones(capsys):
    bare = msgspec.structs.replace(fsdp(8, "1b"), prediction=Prediction())
    print_plan(bare)

    assert picture_of(bare).loads is None
    assert "n/a, the plan has no prediction" in capsys.readouterr().out
    assert b"n/a" in svg_of(bare)


def test_a_checkpoint_stands_above_the_drawing_with_what_is_known_of_it(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "300")
    plan = fsdp(8, "1b")
    print_plan(plan)
    advice = plan.prediction.checkpoint
    assert advice is not None
    size = format_bytes(advice.bytes)
    assert f"a checkpoint takes {size} (--storage-gb-per-s gives the time)\n" in capsys.readouterr().out

    known = msgspec.structs.replace(advice, seconds=90.0, interval_s=7200.0)
    told = msgspec.structs.replace(plan, prediction=msgspec.structs.replace(plan.prediction, checkpoint=known))
    assert picture_of(told).subtitle.endswith(
        f"a checkpoint takes {size} and 1.5 min to write; the best interval is 2.0 h of training"
    )


# -- in the terminal -----------------------------------------------------------------------------------------------


@every_plan
def test_the_drawing_is_at_most_eighty_columns_wide_and_fits_a_few_screens(make, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    print_plan(make())
    lines = capsys.readouterr().out.splitlines()

    assert max(map(len, lines)) <= 80
    assert len(lines) <= 60


def test_the_terminal_drawing_shows_ranks_groups_bytes_and_stages(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "110")
    print_plan(sixty_four())
    out = capsys.readouterr().out

    assert re.search(r"node 0 +\[ +0 +1 +2 +3\]\[ +4 +5 +6 +7\]", out)
    assert "nodes 1-7 like node 0, shifted: in all pp 0-1, dp_shard 0-7" in out
    assert re.search(r"^tp +12\.00 GB +0 B +all_reduce *$", out, re.MULTILINE)
    assert re.search(r"^dp_shard +8\.00 GB +6\.00 GB +all_gather *$", out, re.MULTILINE)
    assert re.search(r"^1 +layers 20-39, norm and head +32-63 +4-7 *$", out, re.MULTILINE)


def test_512_gpus_fold_to_one_node_and_its_shift(capsys):
    print_plan(fsdp(512))

    assert "nodes 1-63 like node 0, shifted: in all dp_shard 0-511" in capsys.readouterr().out


def test_nothing_is_coloured_when_piped_and_stages_are_when_asked(capsys, monkeypatch):
    print_plan(sixty_four())
    assert "\x1b" not in capsys.readouterr().out

    monkeypatch.setenv("FORCE_COLOR", "1")
    print_plan(sixty_four())
    assert "\x1b[36m" in capsys.readouterr().out


# -- as a picture --------------------------------------------------------------------------------------------------


def texts(svg: bytes) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(f"{SVG}text"))


def boxes(svg: bytes, stroke_width: str) -> list[ElementTree.Element]:
    """Cells are drawn 0.8 wide, the outlines of groups in large nodes 2.4."""
    return [box for box in ElementTree.fromstring(svg).iter(f"{SVG}rect") if box.get("stroke-width") == stroke_width]


@every_plan
def test_the_picture_is_well_formed_self_contained_and_inside_its_frame(make):
    svg = svg_of(make())
    root = ElementTree.fromstring(svg)
    width, height = float(root.get("width")), float(root.get("height"))

    assert root.tag == f"{SVG}svg"
    assert not any(key.endswith(("href", "src")) for element in root.iter() for key in element.attrib)
    assert not {element.tag.removeprefix(SVG) for element in root.iter()} & {"script", "image", "style", "use"}
    for box in root.iter(f"{SVG}rect"):
        if box.get("x") is not None:
            assert 0 <= float(box.get("x")) <= float(box.get("x")) + float(box.get("width")) <= width
            assert 0 <= float(box.get("y")) <= float(box.get("y")) + float(box.get("height")) <= height
    for text in texts(svg):
        assert float(text.get("font-size")) >= 8
        assert 0 < float(text.get("x")) < width
        assert 0 < float(text.get("y")) < height


@pytest.mark.parametrize("make", [lambda: fsdp(8, "1b"), sixty_four, large, uneven], ids=["8", "64", "512", "uneven"])
def test_every_gpu_has_its_cell_and_cells_do_not_overlap(make):
    plan = make()
    svg = svg_of(plan)
    written = [text.text for text in texts(svg)]
    cells = boxes(svg, "0.8")
    corners = {(box.get("x"), box.get("y")) for box in cells}

    assert {str(rank) for rank in range(plan.layout.world_size)} <= set(written)
    assert len(corners) == len(cells) >= plan.layout.world_size


def test_stages_have_colours_of_their_own_and_the_legend_says_which():
    plan = sixty_four()
    written = [text.text for text in texts(svg_of(plan))]
    fills = {box.get("fill") for box in boxes(svg_of(plan), "0.8")}

    assert len(fills) == 2
    assert {"stage 0", "stage 1", "outlined: a tp group of 4", "layers 20-39, norm and head"} <= set(written)


def test_tensor_groups_are_outlined_where_experts_are_split_too(capsys):
    print_plan(planned(Layout(engine="fsdp2", zero_stage=3, dp_shard=4, tp=2, ep=2)))

    (ranks,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("node 0"))
    assert re.findall(r"\[[ 0-9]*\]", ranks) == ["[  0    1]", "[  2    3]", "[  4    5]", "[  6    7]"]


def test_tensor_groups_are_outlined_one_by_one():
    outlines = [box for box in boxes(svg_of(sixty_four()), "2.4") if float(box.get("width")) > 30]

    assert len(outlines) == 16


def test_what_a_node_sends_stands_at_its_link_and_what_its_gpus_exchange_inside_it():
    written = [text.text for text in texts(svg_of(sixty_four()))]

    assert written.count("48.00 GB a step") == 8  # 6 GB of each of 8 GPUs
    assert written.count("NVLink 4: 20.00 GB a GPU and step") == 8


def test_sixteen_thousand_gpus_stay_a_small_picture():
    assert len(svg_of(large(16384))) < 200_000


def test_names_cannot_break_out_of_the_picture_or_the_terminal(capsys):
    plan = fsdp(8, "1b")
    hostile = msgspec.structs.replace(plan, model=msgspec.structs.replace(plan.model, name="<b>&\x1b[31m]]>\x00"))
    title = next(ElementTree.fromstring(svg_of(hostile)).iter(f"{SVG}title")).text
    print_plan(hostile)

    assert title.startswith("<b>&]]>\\x00 on 8 GPUs")
    assert "\x1b" not in capsys.readouterr().out


# -- the command ---------------------------------------------------------------------------------------------------


@pytest.fixture
def plan_file(tmp_path: Path) -> str:
    path = tmp_path / "plan.json"
    path.write_bytes(encode_plan(sixty_four()))
    return str(path)


def run(*arguments: str) -> int:
    return command.exit_code(planner, ["show", *arguments], name="planner")


def test_json_is_one_object_of_the_figures_drawn(plan_file, capsys):
    assert run(plan_file, "--json") == 0
    told = json.loads(capsys.readouterr().out)

    assert told["schema"] == "show/1"
    assert told["outside_bytes"] == 6e9
    assert [stage["layers"] for stage in told["stages"]] == [[[0, 19]], [[20, 39]]]


def test_a_picture_is_written_beside_the_drawing_and_not_over_another(plan_file, tmp_path, capsys):
    target = tmp_path / "plan.svg"

    assert run(plan_file, "--svg", str(target)) == 0
    assert "node 0" in capsys.readouterr().out
    assert target.read_bytes() == svg_of(sixty_four())
    assert run(plan_file, "--svg", str(target)) == 2
    assert capsys.readouterr().err.startswith(f"error: svg={target}"[:30])
    assert run(plan_file, "--svg", str(target), "--force") == 0


def test_a_folder_that_is_not_there_is_refused_in_one_line(plan_file, tmp_path, capsys):
    assert run(plan_file, "--svg", str(tmp_path / "no" / "plan.svg")) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_a_collective_of_another_version_is_refused_in_one_line(tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_bytes(encode_plan(planned(sixty_four().layout, call("teleport", "tp", 4, 1e9))))

    assert run(str(path)) == 2
    assert "teleport" in capsys.readouterr().err
