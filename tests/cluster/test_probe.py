"""A real probe, with few sizes: two ranks over gloo measure this machine, and the planner plans with it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from executor.worker.probe.links import partitions
from planner.calibrate.probe import read_probe
from planner.spec import presets
from planner.spec.calibration import calibration

PROJECT = Path(__file__).parents[2]
TIMEOUT_S = 240


def executor(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "executor.cli", *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"},
        text=True, capture_output=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL,
    )  # fmt: skip


def test_two_ranks_measure_this_machine_and_the_planner_reads_it(tmp_path: Path):
    asked = ("probe", "-o", tmp_path, "--name", "here", "--kind", "cpu", "--nodes", 2, "--ranks", 1, "--quick")
    done = executor(*asked, "--hosts", "loopback", "--json")

    assert done.returncode == 0, done.stderr
    probe = read_probe(tmp_path / "probe.json")
    assert json.loads(done.stdout)["name"] == probe.name == "here"
    assert {one.dtype for one in probe.products} == {"fp32", "bf16"}
    assert {one.form for one in probe.products} == {"forward", "input", "weight"}
    assert {one.kind for one in probe.sweeps} == {"add", "norm", "gate", "adamw"}
    assert {one.kind for one in probe.overheads} == {"plain", "forward", "backward", "optimizer"}
    assert {(one.op, one.ranks, one.nodes) for one in probe.exchanges} == {
        (op, 2, 2) for op in ("all_reduce", "all_gather", "reduce_scatter", "send")
    }
    assert probe.attention
    assert probe.overlaps

    cluster = presets.cluster("here", folders=[tmp_path])
    known = calibration("here", (str(tmp_path),)).of("accelerate-ddp", cluster.gpu.name, cluster.gpu.kind)
    assert (cluster.nodes, cluster.gpus_per_node, cluster.gpu.kind) == (2, 1, "cpu")
    assert cluster.gpu.flops_per_s.keys() == {"fp32", "bf16"}
    assert known.curve(cluster.inter_link.name, "all_reduce").latency_s is not None

    before = (tmp_path / "probe.json").read_bytes()
    again = executor(*asked)
    assert again.returncode == 2
    assert "--force" in again.stderr
    assert (tmp_path / "probe.json").read_bytes() == before


def test_every_tier_has_its_groups_and_all_ranks_are_in_one():
    assert partitions(1, 1) == []
    assert partitions(1, 4) == [[[0, 1], [2, 3]], [[0, 1, 2, 3]]]
    assert partitions(2, 3) == [[[0, 1, 2], [3, 4, 5]], [[0, 3], [1, 4], [2, 5]], [[0, 1, 2, 3, 4, 5]]]
    assert partitions(4, 1) == [[[0, 1, 2, 3]]]
    for parts in partitions(3, 12):
        assert sorted(rank for ranks in parts for rank in ranks) == list(range(36))
