"""A host dies in the middle of a run: a spare takes its place, or the rest is planned for anew. Nobody helps.

Not here: ranks that die on hosts that stay (test_resume_hosts.py).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import make_plan, run_warm
from cases import FULL, SEQUENCES
from hosts import TestHost, TestHosts, network, unusable
from msgspec.structs import replace
from test_ssh import started
from waiting import until

from executor.folder import rundir
from planner.spec import Layout, inputs

pytestmark = pytest.mark.skipif(unusable() is not None, reason=str(unusable()))
NAMES = ("red", "blue", "green", "white")
STEPS = 30
LONGEST_S = 600.0


@pytest.fixture
def hosts(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TestHosts]:
    """As many hosts as the test asks for, which share every disk but their homes."""
    with network(tmp_path / "net", NAMES[: request.param]) as made:
        yield made


def die(host: TestHost) -> None:
    """End all that runs on a host, sshd too, and pull its cable: nobody is there any more to say so."""
    subprocess.run(["ip", "link", "set", host.cable, "down"], check=True)
    host.run("kill", "-KILL", "-1")


def trained_without(
    hosts: TestHosts, tmp_path: Path, nodes: int, batch: int, lost: int = 1
) -> tuple[dict[str, object], str, Path]:
    """run.json of a run on so many nodes of which one's host dies, all that was said, and its folder."""
    layout = Layout(engine="fsdp2", dp_shard=nodes, zero_stage=3, micro_batch_size=batch // nodes)
    plan = make_plan(layout, replace(FULL, recipe=replace(FULL.recipe, steps=STEPS)), nodes=nodes, per_node=1)
    folder = tmp_path / "run"
    words = ("--checkpoint-every", "10", "--no-save-weights", "--max-restarts", "2")
    one = started(hosts, tmp_path, inputs.resolved(plan), folder, *words, befalls={"HOLD": "1 13 1", "EVERY": "10"})
    held = folder / "HOLD-13"
    until(lambda: one.poll() is not None or held.exists(), "rank 1 to stand still after the checkpoint of step 10")
    assert one.poll() is None, one.communicate()
    die(hosts.hosts[lost])
    _, said = one.communicate(timeout=LONGEST_S)
    code = one.returncode

    assert code == 0, said
    whole = run_warm(inputs.resolved(plan), tmp_path / "whole", "--no-meter")
    assert set(whole.exit_codes) == {0}, whole.output
    return json.loads((folder / "run.json").read_text()), said, folder


@pytest.mark.parametrize("hosts", [3], indirect=True)
def test_a_spare_takes_a_lost_host_s_place(hosts: TestHosts, tmp_path: Path) -> None:
    found, said, folder = trained_without(hosts, tmp_path, 2, SEQUENCES)

    assert found["status"] == "completed" and found["nodes"] == 2
    assert "blue is left out" in said and "nodes are now red, green" in said
    (attempt,) = found["attempts"]  # type: ignore[misc]
    assert (attempt["status"], attempt["cause"], attempt["resumed_from"]) == ("node lost", "node lost", 10)
    assert "blue" in attempt["message"]
    assert rundir.read_losses(folder) == rundir.read_losses(tmp_path / "whole")  # the same layout: to the last bit


@pytest.mark.long
@pytest.mark.parametrize("hosts", [3], indirect=True)
def test_a_host_with_the_ranks_store_is_replaced_too(hosts: TestHosts, tmp_path: Path) -> None:
    found, said, folder = trained_without(hosts, tmp_path, 2, SEQUENCES, lost=0)

    assert found["status"] == "completed" and found["nodes"] == 2
    assert "red is left out" in said and "nodes are now blue, green" in said
    (attempt,) = found["attempts"]  # type: ignore[misc]
    assert (attempt["status"], attempt["resumed_from"]) == ("node lost", 10) and "red" in attempt["message"]
    assert rundir.read_losses(folder) == rundir.read_losses(tmp_path / "whole")


@pytest.mark.long
@pytest.mark.parametrize("hosts", [4], indirect=True)
def test_what_is_left_of_four_hosts_is_planned_for_anew(hosts: TestHosts, tmp_path: Path) -> None:
    found, said, folder = trained_without(hosts, tmp_path, 4, 12)

    assert found["status"] == "completed" and (found["nodes"], found["world_size"]) == (3, 3)
    assert "planned again for red, green, white: dp_shard=3" in said
    (attempt,) = found["attempts"]  # type: ignore[misc]
    assert (attempt["status"], attempt["nodes"], attempt["resumed_from"]) == ("node lost", 4, 10)
    assert attempt["down_s"] > 0 and attempt["steps"] >= 12
    plan = rundir.read_run_plan(folder)
    assert plan.layout.global_batch_size == 12 and plan.cluster.nodes == 3
    assert rundir.read_losses(folder) == pytest.approx(rundir.read_losses(tmp_path / "whole"), abs=1e-3)
