"""A plan trained by TRL under the launcher: two hosts, a rank that is killed, a resume, a report.

Not here: refusals and the files of a run (tests/executor/test_tools.py), or a person's own script (test_script.py).
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from cases import FULL, job
from hosts import TestHosts, unusable
from msgspec.structs import replace
from test_ssh import EXECUTOR, alone, ended, make_plan, nothing_stays, pair, started  # noqa: F401 (fixtures)

from executor.folder import rundir
from executor.measure import report as reports
from planner.spec import Layout, inputs
from planner.spec.plan import Plan

pytest.importorskip("trl", reason="TRL is not installed")
over_ssh = pytest.mark.skipif(unusable() is not None, reason=str(unusable()))
STEPS = 8


def planned(layout: Layout, method: str, nodes: int) -> Plan:
    """Few steps, and no warm-up: the tool has a schedule of its own."""
    trained = FULL if method == "full" else job(method)
    short = replace(trained, recipe=replace(trained.recipe, steps=STEPS, warmup_steps=0))
    return inputs.resolved(make_plan(layout, short, nodes=nodes, per_node=layout.world_size // nodes))


@over_ssh
def test_trl_on_two_hosts_is_killed_and_resumed_from_its_own_checkpoint_and_is_measured(
    pair: TestHosts,  # noqa: F811
    tmp_path: Path,
) -> None:
    plan = planned(Layout(engine="fsdp2", dp_shard=2, zero_stage=3, micro_batch_size=2), "full", 2)
    folder, befalls = tmp_path / "run", {"DIE": "1 3 1"}
    words = ("--with", "trl", "--checkpoint-every", "2")
    code, said = ended(started(pair, tmp_path, plan, folder, *words, befalls=befalls))
    assert code == 5 and "newest whole checkpoint: checkpoint-2" in said, said
    assert [one["host"] for one in rundir.read_mesh(folder).values()] == ["red", "blue"]

    code, said = resumed(pair, folder, befalls)

    assert code == 0, said
    record = rundir.read_record(folder)
    assert record is not None and (record.status, record.backend, record.launcher) == ("completed", "trl", "ssh")
    assert [(one.failed_rank, one.resumed_from) for one in record.attempts] == [(1, 2)]
    assert len(record.losses) == STEPS and record.losses[-1] < record.losses[0]
    assert_measured(folder, plan)
    nothing_stays(pair)


def resumed(hosts: TestHosts, folder: Path, befalls: dict[str, str]) -> tuple[int, str]:
    """`executor resume RUN`."""
    return ended(
        subprocess.Popen(
            [str(word) for word in (EXECUTOR, "resume", folder, "--yes")], text=True, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
            env=os.environ | befalls | {"MESHWRIGHT_SSH": f"ssh -F {hosts.ssh_config}"},
        )
    )  # fmt: skip


def assert_measured(folder: Path, plan: Plan) -> None:
    """World and engine are the plan's, bytes of collectives are as predicted, and so is each phase's memory beside
    what TRL adds to it."""
    mesh = rundir.read_mesh(folder)
    assert [(seen["world_size"], seen["stepped"], seen["script"]) for seen in mesh.values()] == [
        (plan.layout.world_size, True, "trl")
    ] * plan.layout.world_size
    report = reports.build(folder)
    for line in report.traffic.lines:
        assert line.measured == pytest.approx(line.predicted, rel=0.001), line
    lines = {line.name: line for line in (*report.memory.lines, *report.memory.small)}
    print({name: (one.predicted, one.measured) for name, one in lines.items()})
