"""The connection to a host is lost in training, and the host lives: it is a lost node, and no wish of a person's.

Every way a connection ends, on two and three hosts, with run folders of their own or shared, with and without
checkpoints. Not here: hosts that die (test_lost_node.py), or ranks that do (test_resume_hosts.py).
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from collections.abc import Iterator
from dataclasses import replace as with_hosts
from pathlib import Path

import pytest
from agents import run_warm
from cases import FULL
from hosts import TestHosts, network, unusable
from msgspec.structs import replace
from test_ssh import CODE, NAMES, ended, make_plan, nothing_stays, started
from waiting import until

from executor.folder import rundir
from planner.spec import Layout, inputs
from planner.spec.plan import Plan

pytestmark = [pytest.mark.cluster, pytest.mark.skipif(unusable() is not None, reason=str(unusable()))]
STEPS = 16
FAULTS = {
    "its sshd": ("pkill", "-KILL", "-f", "notty"),
    "its Python": ("pkill", "-KILL", "-f", "^[^ ]*python3 -u -c import sys"),
    "its launcher's word": (),
}
"""What ends a connection, as a command on the host that loses it; by none the launcher stands still."""


def names_lost(message: str, hosts: TestHosts, lost: int, fault: str) -> bool:
    """Whether the host is named whose connection ended; of a launcher that stood still, which all miss, any host."""
    missed = hosts.hosts[lost : lost + 1] if FAULTS[fault] else hosts.hosts
    return any(f"{one.name} was lost: " in message for one in missed)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory, alone: Path) -> Iterator[TestHosts]:
    with network(tmp_path_factory.mktemp("hosts") / "net", NAMES[:3], own=[alone, *CODE]) as hosts:
        yield hosts


def a_plan(nodes: int) -> Plan:
    layout = Layout(engine="fsdp2", dp_shard=nodes, zero_stage=3, micro_batch_size=12 // nodes)
    short = replace(FULL, recipe=replace(FULL.recipe, steps=STEPS))
    return inputs.resolved(make_plan(layout, short, nodes=nodes, per_node=1))


def lose(hosts: TestHosts, lost: int, fault: str, launcher: int) -> None:
    """End the connection to a host, and no process of the run there."""
    if FAULTS[fault]:
        done = hosts.hosts[lost].run(*FAULTS[fault])
        assert done.returncode == 0, done.stderr
        return
    os.kill(launcher, signal.SIGSTOP)
    until(lambda: hosts.hosts[lost].run("pgrep", "-f", "executor.worker").stdout == "", "the host to miss its launcher")
    os.kill(launcher, signal.SIGCONT)


SAMPLE = [("its sshd", 2, 1, False)]
WHOLE = [  # each fault on two and three hosts, and each pair of who is lost and whose folder it is
    (fault, nodes, (nodes - 1) * (number % 2), number % 4 < 2)
    for number, (fault, nodes) in enumerate(itertools.product(FAULTS, (2, 3)))
]


@pytest.mark.parametrize(
    ("fault", "nodes", "lost", "shared"),
    [*SAMPLE, *(pytest.param(*one, marks=pytest.mark.long) for one in WHOLE if one not in SAMPLE)],
)
def test_a_run_whose_connection_is_lost_is_started_again_and_ends_as_undisturbed(
    three: TestHosts, alone: Path, tmp_path: Path, fault: str, nodes: int, lost: int, shared: bool
) -> None:
    plan, hosts = a_plan(nodes), with_hosts(three, hosts=three.hosts[:nodes])
    folder, mark = (tmp_path / "run" if shared else alone / tmp_path.name), tmp_path / "told"
    words = ("--checkpoint-every", "5", "--no-save-weights", "--max-restarts", "1")
    one = started(hosts, tmp_path, plan, folder, *words, befalls={"TOLD": f"{lost} 12 {mark}"})
    until(lambda: one.poll() is not None or mark.exists(), "the rank to come to step 12")
    assert one.poll() is None, one.communicate()
    lose(hosts, lost, fault, one.pid)
    code, said = ended(one)

    assert code == 0, said
    found = json.loads((folder / "run.json").read_text())
    assert (found["status"], found["nodes"]) == ("completed", nodes), said
    (attempt,) = found["attempts"]
    assert (attempt["status"], attempt["cause"], attempt["exit_code"]) == ("node lost", "node lost", 7), said
    assert names_lost(attempt["message"], hosts, lost, fault), attempt
    assert attempt["resumed_from"] >= 5
    whole = run_warm(plan, tmp_path / "whole", "--no-meter")
    undisturbed = dict(enumerate(rundir.read_losses(whole.folder)))
    lines = [json.loads(line) for line in (folder / rundir.METRICS).read_text().splitlines()]
    losses = {line["step"]: line["loss"] for line in lines if "loss" in line}
    assert losses.items() <= undisturbed.items()
    unsent = range(attempt["resumed_from"]) if lost == 0 and not shared else ()  # rank 0's lines, lost with its host
    assert undisturbed.keys() - losses.keys() <= set(unsent)
    nothing_stays(hosts)


@pytest.mark.parametrize(
    ("fault", "nodes", "lost", "shared"),
    WHOLE,
)
@pytest.mark.long
def test_without_checkpoints_a_lost_connection_is_named_and_ends_the_run(
    three: TestHosts, alone: Path, tmp_path: Path, fault: str, nodes: int, lost: int, shared: bool
) -> None:
    hosts, folder = with_hosts(three, hosts=three.hosts[:nodes]), tmp_path / "run" if shared else alone / tmp_path.name
    one = started(hosts, tmp_path, a_plan(nodes), folder, "--no-save-weights", befalls={"HOLD": f"{lost} 3 1"})
    held = three.hosts[lost].inside(folder) / "HOLD-3"
    until(lambda: one.poll() is not None or (folder / "metrics.jsonl").exists(), "the ranks to train")
    assert one.poll() is None, (one.communicate(), held)
    lose(hosts, lost, fault, one.pid)
    code, said = ended(one)

    assert code == 7, said
    found = json.loads((folder / "run.json").read_text())
    assert (found["status"], found["cause"]) == ("node lost", "node lost"), said
    assert names_lost(found["message"], hosts, lost, fault), found
    nothing_stays(hosts)
