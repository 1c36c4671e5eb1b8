"""A run on two hosts that ssh reaches goes on after a rank was killed: by command, and by its launcher alone.

Not here: one machine (test_resume.py), or how hosts are reached (test_ssh.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from agents import run_warm
from cases import FULL, SEQUENCES
from hosts import TestHosts, unusable
from msgspec.structs import replace
from test_ssh import EXECUTOR, alone, ended, make_plan, nothing_stays, pair, started  # noqa: F401 (fixtures)
from waiting import until

from executor.folder import checkpoints, rundir
from planner.spec import Layout, inputs

pytestmark = pytest.mark.skipif(unusable() is not None, reason=str(unusable()))
STEPS = 15
NAMED_S = 15.0


def test_a_run_over_ssh_goes_on_by_command_and_by_itself(pair: TestHosts, tmp_path: Path) -> None:  # noqa: F811
    layout = Layout(engine="fsdp2", dp_shard=2, zero_stage=3, micro_batch_size=SEQUENCES // 2)
    plan = make_plan(layout, replace(FULL, recipe=replace(FULL.recipe, steps=STEPS)), nodes=2, per_node=1)
    folder = tmp_path / "run"
    words, befalls = ("--checkpoint-every", "10", "--no-save-weights"), {"DIE": "1 12 2", "EVERY": "10"}
    first = started(pair, tmp_path, inputs.resolved(plan), folder, *words, befalls=befalls)
    code, said = ended(first)
    assert code == 5, said

    second = subprocess.Popen(
        [str(word) for word in (EXECUTOR, "resume", folder, "--yes", "--max-restarts", "1")],
        text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | befalls | {"MESHWRIGHT_SSH": f"ssh -F {pair.ssh_config}"}, start_new_session=True,
    )  # fmt: skip
    code, said = ended(second)

    assert code == 0, said
    found = json.loads((folder / "run.json").read_text())
    assert found["status"] == "completed" and found["launcher"] == "ssh"
    ends = [(one["failed_rank"], one["steps"], one["resumed_from"]) for one in found["attempts"]]
    assert ends == [(1, 11, 10), (1, 11, 10)]
    whole = run_warm(inputs.resolved(plan), tmp_path / "whole", "--no-meter")
    assert set(whole.exit_codes) == {0}, whole.output
    assert tuple(found["losses"]) == rundir.read_losses(tmp_path / "whole")
    nothing_stays(pair)


@pytest.mark.long
def test_a_host_s_agent_that_is_killed_is_a_lost_node_and_the_run_goes_on(pair: TestHosts, tmp_path: Path) -> None:  # noqa: F811
    layout = Layout(engine="ddp", dp_replicate=2, micro_batch_size=SEQUENCES // 2)
    plan = make_plan(layout, replace(FULL, recipe=replace(FULL.recipe, steps=STEPS)), nodes=2, per_node=1)
    folder = tmp_path / "run"
    words = ("--checkpoint-every", "10", "--no-save-weights", "--max-restarts", "1")
    befalls = {"HOLD": "1 13 1", "EVERY": "10"}
    one = started(pair, tmp_path, inputs.resolved(plan), folder, *words, befalls=befalls)
    until(lambda: one.poll() is not None or (folder / "HOLD-13").exists(), "rank 1 to stand still")
    assert one.poll() is None, one.communicate()
    killed = time.time()
    assert pair.hosts[1].run("pkill", "-KILL", "-f", "executor.worker.agent").returncode == 0
    code, said = ended(one)

    assert code == 0, said
    assert (folder / "attempts" / "1" / "run.json").stat().st_mtime - killed < NAMED_S
    (attempt,) = json.loads((folder / "run.json").read_text())["attempts"]
    assert (attempt["status"], attempt["resumed_from"]) == ("node lost", 10)
    assert "the agent of blue was killed by SIGKILL" in attempt["message"]
    whole = run_warm(inputs.resolved(plan), tmp_path / "whole", "--no-meter")
    assert rundir.read_losses(folder) == rundir.read_losses(whole.folder)
    nothing_stays(pair)


@pytest.mark.parametrize(
    "signals",
    [
        (signal.SIGTERM,),
        pytest.param((signal.SIGINT,), marks=pytest.mark.long),
        pytest.param((signal.SIGINT, signal.SIGINT), marks=pytest.mark.long),
    ],
)
def test_a_run_of_hosts_that_is_stopped_keeps_its_checkpoints_and_leaves_nothing(
    pair: TestHosts,  # noqa: F811
    tmp_path: Path,
    signals: tuple[signal.Signals, ...],
) -> None:
    layout = Layout(engine="ddp", dp_replicate=2, micro_batch_size=SEQUENCES // 2)
    plan = make_plan(layout, replace(FULL, recipe=replace(FULL.recipe, steps=100_000)), nodes=2, per_node=1)
    folder = tmp_path / "run"
    one = started(pair, tmp_path, inputs.resolved(plan), folder, "--checkpoint-every", "10", "--no-save-weights")
    until(lambda: one.poll() is not None or checkpoints.newest(folder)[0] is not None, "a checkpoint")
    before, _ = checkpoints.newest(folder)
    assert before is not None and one.poll() is None, one.communicate()
    for number in signals:
        one.send_signal(number)
    code, said = ended(one)

    assert code == 128 + signals[0], said
    newest, skipped = checkpoints.newest(folder)
    assert newest is not None and all(name.endswith(".partial") for name, _ in skipped), skipped
    step = checkpoints.complete(newest).step
    assert step >= int(before.name.removeprefix("step-"))
    found = json.loads((folder / "run.json").read_text())
    assert found["status"] == "interrupted" and found["message"].startswith(f"stopped by {signals[0].name}")
    if signals[0] == signal.SIGTERM:
        assert f"with the checkpoint step-{step}" in found["message"] and len(found["losses"]) == step
    nothing_stays(pair)


@pytest.mark.long
@pytest.mark.parametrize("shared", [True, False])
def test_a_rank_that_is_stopped_on_another_host_is_named(
    pair: TestHosts,  # noqa: F811
    tmp_path: Path,
    alone: Path,  # noqa: F811
    shared: bool,
) -> None:
    layout = Layout(engine="ddp", dp_replicate=2, micro_batch_size=SEQUENCES // 2)
    plan = make_plan(layout, replace(FULL, recipe=replace(FULL.recipe, steps=100_000)), nodes=2, per_node=1)
    folder = tmp_path / "run" if shared else alone / tmp_path.name
    one = started(pair, tmp_path, inputs.resolved(plan), folder, "--no-save-weights")
    until(lambda: one.poll() is not None or len(rundir.read_losses(folder)) > 5, "the ranks to train")
    assert one.poll() is None, one.communicate()
    blue = pair.hosts[1]
    assert blue.run("pkill", "-STOP", "-f", "executor.worker.train").returncode == 0  # in its own PID namespace
    stopped = time.time()
    code, said = ended(one)

    assert code == 8, said
    found = json.loads((folder / "run.json").read_text())
    assert (found["status"], found["cause"], found["failed_rank"]) == ("hung", "rank stopped", 1), found["message"]
    assert found["message"].startswith("rank 1 on blue is stopped at step")
    assert (folder / "run.json").stat().st_mtime - stopped < 15
    nothing_stays(pair)
