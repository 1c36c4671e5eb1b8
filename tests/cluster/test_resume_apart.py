"""Runs on two hosts that share no disk write checkpoints and go on from them: by themselves, by command, in each
other's place, and past what is damaged or was not completed on one of them.

Not here: hosts that share the run folder (test_resume_hosts.py), or the ranks alone (test_apart.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import make_plan, run_warm
from cases import FULL, SEQUENCES
from hosts import TestHost, TestHosts, network, unusable
from msgspec.structs import replace
from test_checkpoints import flip
from test_ssh import CODE, EXECUTOR, NAMES, ended, host_file, nothing_stays, started
from waiting import until

from executor.folder import checkpoints, rundir
from planner.spec import Layout, inputs
from planner.spec.plan import Plan, encode_plan

pytestmark = pytest.mark.skipif(unusable() is not None, reason=str(unusable()))
STEPS = 40
FSDP2 = Layout(engine="fsdp2", dp_shard=2, zero_stage=3, micro_batch_size=SEQUENCES // 2)
DDP = Layout(engine="ddp", dp_replicate=2, micro_batch_size=SEQUENCES // 2)


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    """A folder of which each host, and this machine, has its own."""
    (folder := tmp_path / "alone").mkdir()
    return folder


@pytest.fixture
def pair(tmp_path: Path, alone: Path) -> Iterator[TestHosts]:
    """Two hosts without a checkout that share no run folder."""
    with network(tmp_path / "net", NAMES[:2], own=[alone, *CODE]) as hosts:
        yield hosts


def a_plan(layout: Layout, steps: int = STEPS) -> Plan:
    return inputs.resolved(
        make_plan(layout, replace(FULL, recipe=replace(FULL.recipe, steps=steps)), nodes=2, per_node=1)
    )


def kill_after(host: TestHost, folder: Path, one: subprocess.Popen[str], steps: int) -> None:
    """Kill the rank of a host once so many steps are logged here."""
    until(lambda: one.poll() is not None or len(rundir.read_losses(folder)) >= steps, f"{steps} steps")
    assert one.poll() is None, one.communicate()
    assert host.run("pkill", "-KILL", "-n", "-f", "executor.worker.train").returncode == 0


def resumed(hosts: TestHosts, folder: Path, *words: object) -> subprocess.Popen[str]:
    command = [EXECUTOR, "resume", folder, "--yes", *words]
    return subprocess.Popen(
        [str(word) for word in command],
        text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"MESHWRIGHT_SSH": f"ssh -F {hosts.ssh_config}"}, start_new_session=True,
    )  # fmt: skip


def part(host: TestHost) -> Path:
    """Where a host keeps its part of the only run's checkpoints: what stands for the run folder there."""
    (found,) = (host.home / ".cache" / "meshwright" / "checkpoints").iterdir()
    return found


def whole(plan: Plan, tmp_path: Path) -> tuple[float, ...]:
    """The losses of a run that nobody disturbed."""
    found = run_warm(plan, tmp_path / "whole", "--no-meter")
    assert set(found.exit_codes) == {0}, found.output
    return rundir.read_losses(found.folder)


@pytest.mark.parametrize("by", ["command", pytest.param("itself", marks=pytest.mark.long)])
def test_a_run_without_a_shared_disk_goes_on(pair: TestHosts, tmp_path: Path, alone: Path, by: str) -> None:
    folder, plan = alone / "run", a_plan(FSDP2)
    words = ("--checkpoint-every", "5", "--no-save-weights", "--max-restarts", "0" if by == "command" else "1")
    first = started(pair, tmp_path, plan, folder, *words)
    kill_after(pair.hosts[1], folder, first, 14)
    code, said = ended(first)
    assert "red, blue keep their parts of checkpoints in /root/.cache/meshwright/checkpoints/" in said
    if by == "command":
        assert code == 5, said
        assert not (folder / "checkpoints").exists()
        written = [set(checkpoints.steps_of(part(host))) for host in pair.hosts]
        code, said = ended(resumed(pair, folder))

    assert code == 0, said
    found = json.loads((folder / "run.json").read_text())
    assert found["status"] == "completed" and found["launcher"] == "ssh"
    (start,) = [one["resumed_from"] for one in found["attempts"]]
    assert start >= 5  # every fifth step, or the next where the one before is still being written
    if by == "command":
        assert max(set.intersection(*written)) <= start and start in set.union(*written)
    assert tuple(found["losses"]) == whole(plan, tmp_path)
    for rank, host in enumerate(pair.hosts):
        assert max(checkpoints.steps_of(part(host))) == STEPS and len(checkpoints.steps_of(part(host))) == 2
        newest = part(host) / "checkpoints" / f"step-{STEPS}"
        assert {path.name for path in newest.iterdir()} == {"COMPLETE", f"rank-{rank}.safetensors"}
    assert set(checkpoints.complete(newest).places.values()) == set(NAMES[:2])
    nothing_stays(pair)


@pytest.mark.long
@pytest.mark.parametrize("layout", [FSDP2, DDP], ids=["fsdp2", "another layout"])
def test_hosts_change_places_and_what_one_of_them_lacks_is_passed_over(
    pair: TestHosts, tmp_path: Path, alone: Path, layout: Layout
) -> None:
    folder, plan = alone / "run", a_plan(FSDP2)
    first = started(pair, tmp_path, plan, folder, "--checkpoint-every", "5", "--keep-last", "99", "--no-save-weights")
    kill_after(pair.hosts[1], folder, first, 32)
    assert ended(first)[0] == 5
    red, blue = (checkpoints.steps_of(part(host)) for host in pair.hosts)
    third, second, newest = sorted(red.keys() & blue.keys())[-3:]
    (blue[newest] / "COMPLETE").unlink()  # as if it had been killed before, and red after
    blue[newest].rename(blue[newest].with_name(f"step-{newest}.killed.partial"))
    flip(blue[second] / "rank-1.safetensors")

    changed = host_file(tmp_path, pair)
    lines = changed.read_text().splitlines()
    changed.write_text("\n".join([lines[0], *reversed(lines[1:])]) + "\n")
    (tmp_path / "other.json").write_bytes(encode_plan(a_plan(layout)))
    words = ("--hosts", changed, *(() if layout is FSDP2 else ("--plan", tmp_path / "other.json")))
    code, said = ended(resumed(pair, folder, *words))

    assert code == 0, said
    assert f"skipped checkpoint step-{newest}: was not completed (on blue)" in said
    assert f"skipped checkpoint step-{second}: rank-1.safetensors is damaged" in said
    assert f"resuming after step {third} of {STEPS}" in said
    losses = tuple(json.loads((folder / "run.json").read_text())["losses"])
    if layout is FSDP2:
        assert losses == whole(plan, tmp_path)
    else:
        assert losses == pytest.approx(whole(plan, tmp_path), rel=1e-5)
    red, blue = (checkpoints.steps_of(part(host)) for host in pair.hosts)
    assert red.keys() == blue.keys()
    for step in red:
        assert checkpoints.complete(red[step]) == checkpoints.complete(blue[step])
    nothing_stays(pair)


@pytest.mark.long
def test_a_schedulers_signal_has_every_host_write_its_part(pair: TestHosts, tmp_path: Path, alone: Path) -> None:
    folder, plan = alone / "run", a_plan(FSDP2)
    first = started(pair, tmp_path, plan, folder, "--checkpoint-every", "signal", "--no-save-weights")
    until(lambda: first.poll() is not None or len(rundir.read_losses(folder)) >= 3, "3 steps")
    assert first.poll() is None, first.communicate()
    first.send_signal(signal.SIGTERM)
    code, said = ended(first)

    assert code == 128 + signal.SIGTERM, said
    red, blue = (checkpoints.steps_of(part(host)) for host in pair.hosts)
    (step,) = red
    assert blue.keys() == {step}
    assert f"with the checkpoint step-{step}" in said
    code, said = ended(resumed(pair, folder))
    assert code == 0 and f"resuming after step {step} of {STEPS}" in said, said
    assert tuple(json.loads((folder / "run.json").read_text())["losses"]) == whole(plan, tmp_path)
    nothing_stays(pair)


@pytest.mark.long
def test_a_lost_host_s_part_is_named_before_anything_is_started(pair: TestHosts, tmp_path: Path, alone: Path) -> None:
    folder = alone / "run"
    words = ("--checkpoint-every", "5", "--no-save-weights", "--max-restarts", "1")
    first = started(pair, tmp_path, a_plan(FSDP2), folder, *words)
    until(lambda: first.poll() is not None or len(rundir.read_losses(folder)) >= 12, "12 steps")
    assert first.poll() is None, first.communicate()
    subprocess.run(["ip", "link", "set", pair.hosts[1].cable, "down"], check=True)
    pair.hosts[1].run("kill", "-KILL", "-1")
    code, said = ended(first)

    assert code == 7, said
    message = json.loads((folder / "run.json").read_text())["message"]
    assert "rank-1.safetensors was written on blue, and no host of this start has it; blue does not answer" in message
    code, said = ended(resumed(pair, folder))
    assert code == 3 and "rank-1.safetensors was written on blue" in said
    assert len(list((folder / "attempts").glob("*"))) == 0
