"""The rank map is PyTorch's: groups of both meshes equal those of init_device_mesh, and of a case done by hand."""

from __future__ import annotations

import json
import subprocess
import sys
from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.parallelism.case import EXPERT_AXES, MESH_AXES, axis_groups, axis_size, coordinates, mesh_of
from planner.spec import Layout

AXES = list(dict.fromkeys((*MESH_AXES, *EXPERT_AXES, "dp_shard_cp")))

# A default process group is one a process: the fake one lives in a child, so that no other test finds it there.
CHILD = """
import json, sys
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

for world, meshes in json.load(sys.stdin):
    dist.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    found = {}
    for sizes in meshes:
        mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        for position, axis in enumerate(sizes):
            groups = mesh.mesh.movedim(position, -1).reshape(-1, sizes[axis]).tolist()
            own = dist.get_process_group_ranks(mesh.get_group(axis))
            assert own == groups[0], (own, groups[0])  # the communicator torch made for rank 0, not only the drawing
            found[axis] = sorted(groups)
    print(json.dumps(found))
    dist.destroy_process_group()
"""

LAYOUTS = {
    "8 data x 4 tensor x 2 pipeline": Layout(engine="fsdp2", dp_shard=8, tp=4, pp=2),
    "the same with experts over all data and tensor ranks": Layout(engine="fsdp2", dp_shard=8, tp=4, pp=2, ep=32),
    "experts over two data ranks' tensor groups": Layout(engine="fsdp2", dp_shard=8, tp=4, pp=2, ep=8),
    "experts over half a tensor group": Layout(engine="fsdp2", dp_shard=8, tp=4, pp=2, ep=2),
    "hybrid sharding": Layout(engine="fsdp2", dp_replicate=4, dp_shard=16),
    "all five axes and experts": Layout(engine="fsdp2", dp_replicate=2, dp_shard=2, cp=2, tp=2, pp=4, ep=4),
    "sizes that are not powers of two": Layout(engine="fsdp2", dp_replicate=3, dp_shard=2, cp=5, pp=3, ep=10),
}


@pytest.fixture(scope="module")
def of_torch() -> dict[str, dict[str, list[list[int]]]]:
    asked = [[one.world_size, [mesh_of(one, axis) for axis in ("tp", "ep", "dp_shard_cp")]] for one in LAYOUTS.values()]
    done = subprocess.run(
        [sys.executable, "-c", CHILD], input=json.dumps(asked), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return dict(zip(LAYOUTS, map(json.loads, done.stdout.splitlines()), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_the_groups_of_every_axis_are_those_of_torch_s_device_mesh(name, of_torch):
    ours = {axis: axis_groups(LAYOUTS[name], axis) for axis in AXES}

    assert ours == of_torch[name]


def test_eight_ranks_by_hand():
    layout = Layout(engine="fsdp2", dp_shard=2, tp=2, pp=2, ep=2)

    assert axis_groups(layout, "tp") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert axis_groups(layout, "dp_shard") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert axis_groups(layout, "pp") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert axis_groups(layout, "ep") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert axis_groups(layout, "edp") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert coordinates(layout, 6) == {"pp": 1, "dp_replicate": 0, "dp_shard": 1, "cp": 0, "tp": 0}


def test_experts_over_more_than_the_tensor_ranks_join_the_nearest_data_ranks():
    layout = Layout(engine="fsdp2", dp_shard=4, tp=2, ep=4)

    assert axis_groups(layout, "ep") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert axis_groups(layout, "edp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@given(
    sizes=st.tuples(*[st.integers(1, 3)] * len(MESH_AXES)),
    pick=st.integers(0, 100),
    axis=st.sampled_from(AXES),
)
def test_the_groups_of_an_axis_hold_every_rank_once(sizes, pick, axis):
    named = dict(zip(MESH_AXES, sizes, strict=True))
    inner = named["dp_shard"] * named["cp"] * named["tp"]
    legal = [ep for ep in range(1, inner + 1) if inner % ep == 0]
    layout = Layout(engine="fsdp2", **named, ep=legal[pick % len(legal)])

    groups = axis_groups(layout, axis)

    assert sorted(rank for group in groups for rank in group) == list(range(prod(sizes)))
    assert {len(group) for group in groups} == {axis_size(layout, axis)}


def test_a_pipelines_ends_are_its_first_and_its_last_stage():
    layout = Layout(engine="deepspeed-pipeline", pp=3, dp_shard=2, tp=2, zero_stage=1)

    assert axis_groups(layout, "pp_ends") == [[0, 8], [1, 9], [2, 10], [3, 11]]
    assert axis_size(layout, "pp_ends") == 2
