"""A plan trained by TRL under the launcher: two hosts, a rank that is killed, a resume, a report.

Not here: refusals and the files of a run (tests/executor/test_tools.py), or a person's own script (test_script.py).
"""

from __future__ import annotations

import os
import subprocess
from itertools import product
from pathlib import Path
from random import Random

import pytest
from cases import job
from hosts import TestHosts, unusable
from msgspec.structs import replace
from test_ssh import EXECUTOR, alone, ended, make_plan, nothing_stays, pair, started  # noqa: F401 (fixtures)

from executor.folder import rundir
from executor.measure import report as reports
from executor.measure.lines import Tolerances
from planner.spec import Layout, inputs
from planner.spec.plan import Plan, encode_plan

pytest.importorskip("trl", reason="TRL is not installed")
over_ssh = pytest.mark.skipif(unusable() is not None, reason=str(unusable()))
STEPS = 7
LAYOUTS = {
    "single": Layout(engine="single", micro_batch_size=2),
    "ddp": Layout(engine="ddp", dp_replicate=2, micro_batch_size=2, grad_accum=2),
    "fsdp2": Layout(engine="fsdp2", dp_shard=2, zero_stage=3, micro_batch_size=2),
    "zero1": Layout(engine="deepspeed", dp_shard=2, zero_stage=1, micro_batch_size=2),
    "zero2": Layout(engine="deepspeed", dp_shard=2, zero_stage=2, micro_batch_size=2, grad_accum=2),
    "zero3": Layout(engine="deepspeed", dp_shard=2, zero_stage=3, micro_batch_size=2),
}


def planned(layout: Layout, method: str, nodes: int) -> Plan:
    """Few steps in bf16, and no warm-up: the tool has a schedule of its own."""
    trained = replace(job(method), precision="bf16")
    short = replace(trained, recipe=replace(trained.recipe, steps=STEPS, warmup_steps=0))
    return inputs.resolved(make_plan(layout, short, nodes=nodes, per_node=layout.world_size // nodes))


@over_ssh
def test_trl_on_two_hosts_is_killed_and_resumed_from_its_own_checkpoint_and_is_measured(
    pair: TestHosts,  # noqa: F811
    tmp_path: Path,
) -> None:
    plan = planned(LAYOUTS["fsdp2"], "full", 2)
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
    assert reports.check(reports.build(folder), Tolerances()) == ()
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


def assert_measured(folder: Path, plan: Plan, tool: str = "trl") -> None:
    """World and engine are the plan's, and the peak and the bytes of collectives as predicted: within half a percent,
    for ZeRO pads the two groups of weights that the Trainer makes of one."""
    mesh = rundir.read_mesh(folder)
    assert [(seen["world_size"], seen["stepped"], seen["script"]) for seen in mesh.values()] == [
        (plan.layout.world_size, True, tool)
    ] * plan.layout.world_size
    report = reports.build(folder)
    for line in (*report.traffic.lines, report.traffic.payload):
        assert line.measured == pytest.approx(line.predicted, rel=0.005), line
    lines = {line.name: line for line in report.memory.lines}
    for name in ("backward/params", "backward/activations", "backward/logits"):
        assert lines[name].measured == pytest.approx(lines[name].predicted, rel=0.005), lines[name]


PRODUCT = [*product(sorted(LAYOUTS), ("full", "lora"), ("local", "namespaces", "join"))]
SEED = int(os.environ.get("SEED", "9"))


@pytest.mark.long
@pytest.mark.parametrize(("name", "method", "launcher"), Random(SEED).sample(PRODUCT, 6))
def test_every_engine_is_trained_by_trl_under_every_launcher(
    tmp_path: Path, name: str, method: str, launcher: str
) -> None:
    nodes = 2 if launcher == "namespaces" and name != "single" else 1
    plan, folder = planned(LAYOUTS[name], method, nodes), tmp_path / "run"
    (file := tmp_path / "plan.json").write_bytes(encode_plan(plan))
    words = ["--with", "trl", "--random-weights", "--demo-data", "--checkpoint-every", "4"]
    if launcher == "join":
        written = executor("run", file, *words, "--dry-run", "-o", folder)
        assert ended(written)[0] == 0
        code, said = ended(executor("join", folder, "--node-rank", 0))
    else:
        hosts = "loopback" if launcher == "local" else "auto"
        code, said = ended(executor("run", file, *words, "--run-dir", folder, "--yes", "--hosts", hosts))
    assert code == 0, said
    assert (folder / "output" / f"checkpoint-{STEPS}").is_dir()
    assert len(rundir.read_losses(folder)) == STEPS
    assert_measured(folder, plan)


def executor(*words: object) -> subprocess.Popen[str]:
    """A command of the executor."""
    return subprocess.Popen(
        [str(word) for word in (EXECUTOR, *words)], text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
