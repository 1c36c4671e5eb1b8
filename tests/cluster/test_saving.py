"""Training that writes checkpoints: it computes the same, keeps what it should, and ends with one when it is asked to.

Not here: kills (test_kill_points.py, test_kills.py), or going on from a checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from agents import make_plan, run_warm
from cases import BASE, FULL
from msgspec.structs import replace
from test_faults import ROOT
from test_launch import PROJECT, run_id
from waiting import PATIENCE_S, until

from executor.folder import alive, checkpoints, rundir
from executor.system.processes import processes_of
from planner.spec import Layout
from planner.spec.plan import Plan, encode_plan


def tiny(layout: Layout, steps: int) -> Plan:
    job = replace(FULL, recipe=replace(FULL.recipe, steps=steps))
    return make_plan(replace(layout, micro_batch_size=2), job, nodes=1, per_node=layout.world_size)


def losses(folder: Path) -> list[float]:
    return json.loads((folder / "result.json").read_text())["losses"]


@pytest.mark.parametrize("name", ["fsdp2", pytest.param("zero3", marks=pytest.mark.long)])
def test_checkpoints_change_no_loss_and_the_last_two_and_every_fourth_step_stay(name, tmp_path):
    plan = tiny(BASE[name], 10)
    without = run_warm(plan, tmp_path / "without", "--no-meter")
    found = run_warm(plan, tmp_path / "run", "--no-meter", "--checkpoint-every", "2", "--keep-every", "4")

    assert (without.exit_codes, found.exit_codes) == ((0,), (0,)), found.output
    assert losses(found.folder) == losses(without.folder)
    logged = rundir.read_checkpoints(found.folder)
    told = [one.step for one in logged]
    assert len(rundir.read_losses(found.folder)) == 10
    assert told == sorted(told) and told[-1] == 10 and not any(one.error for one in logged)
    assert all(0 < one.pause_s < 5 and one.write_s > 0 for one in logged)
    kept = {path.name for path in (found.folder / "checkpoints").iterdir()}
    assert kept == {f"step-{step}" for step in checkpoints_kept(told)}
    newest, skipped = checkpoints.newest(found.folder)
    assert (newest.name, skipped) == ("step-10", [])
    whole = checkpoints.complete(newest)
    assert whole.plan_hash == plan.content_hash and len(whole.files) == plan.layout.world_size
    assert logged[-1].bytes == whole.bytes
    assert 1 < whole.bytes / checkpoints.expected_bytes(plan) < 1.05  # the shards' heads


def checkpoints_kept(told: list[int]) -> list[int]:
    return [step for step in told if step not in checkpoints.retention(told, 2, 4)]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 3 MiB: room for one checkpoint of this model, and not for two."""
    place = tmp_path / "run" / "checkpoints"
    place.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(place)], check=True)
    yield tmp_path / "run"
    subprocess.run(["umount", "-l", str(place)], check=True)


@ROOT
def test_a_full_disk_is_said_with_its_bytes_and_ends_no_training(small_disk):
    found = run_warm(tiny(BASE["ddp"], 6), small_disk, "--no-meter", "--checkpoint-every", "2")

    assert found.exit_codes == (0,), found.output
    assert len(losses(small_disk)) == 6
    logged = {one.step: one for one in rundir.read_checkpoints(small_disk)}
    written = [step for step, one in logged.items() if not one.error]
    assert len(written) == 1 and len(logged) > 1
    assert all("bytes) free" in one.error for one in logged.values() if one.error)
    assert "no checkpoint: it needs" in found.output
    assert [path.name for path in (small_disk / "checkpoints").iterdir()] == [f"step-{written[0]}"]
    assert checkpoints.newest(small_disk)[0].name == f"step-{written[0]}"


def test_a_rank_that_cannot_write_its_part_is_named_and_training_goes_on(tmp_path):
    run = tmp_path / "run"
    found = run_warm(tiny(BASE["ddp"], 5), run, "--no-meter", "--checkpoint-every", "2", module="limited")

    assert found.exit_codes == (0,), found.output
    assert len(losses(run)) == 5
    assert {one.error for one in rundir.read_checkpoints(run)} == {"rank 1: File too large"}
    assert checkpoints.newest(run)[0] is None
    assert [path for path in (run / "checkpoints").rglob("*") if path.is_file()] == []


def test_a_checkpoint_is_due_by_the_clock_too(tmp_path):
    """However fast this machine trains: as many as the whole seconds allow, at steps that nobody named."""
    run = tmp_path / "run"
    found = run_warm(tiny(BASE["ddp"], 12), run, "--no-meter", "--checkpoint-every", "1s")

    assert found.exit_codes == (0,), found.output
    times = [line["time"] for line in found.lines if "loss" in line]
    written = rundir.read_checkpoints(run)
    assert len(written) <= times[-1] - times[0] + 1
    assert written or times[-1] - times[0] < 2


def start(folder: Path, plan: Plan, *words: str) -> subprocess.Popen[str]:
    (folder / "plan.json").write_bytes(encode_plan(plan))
    command = [sys.executable, "-m", "executor.cli", "run", str(folder / "plan.json"), "--yes", "--hosts", "loopback"]
    command += ["--run-dir", str(folder / "run"), *words]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
    return subprocess.Popen(command, cwd=PROJECT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


@pytest.mark.parametrize(("whom", "number"), [("launcher", signal.SIGTERM), ("every process", signal.SIGUSR1)])
def test_a_schedulers_signal_is_answered_by_a_checkpoint_and_the_end(whom, number, tmp_path):
    plan = tiny(replace(BASE["ddp"], dp_replicate=2), 100_000)
    process = start(tmp_path, plan, "--checkpoint-every", "signal", "--no-save-weights")
    run = tmp_path / "run"
    until(lambda: process.poll() is not None or len(rundir.read_losses(run)) > 2, "three steps")
    others = processes_of(run_id(run)) if whom == "every process" else []
    for pid in (process.pid, *others):
        os.kill(pid, number)
    said, _ = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 128 + number, said
    newest, skipped = checkpoints.newest(run)
    assert newest is not None and skipped == []
    step = checkpoints.complete(newest).step
    assert len(rundir.read_losses(run)) == step
    record = rundir.read_record(run)
    assert (record.status, record.exit_code) == ("interrupted", 128 + number)
    assert record.message.startswith(f"stopped by {number.name}: ")
    assert f"after step {step} of 100000, with the checkpoint step-{step}" in record.message
    assert processes_of(run_id(run)) == []


def test_a_signal_to_one_rank_ends_all_of_them_at_one_step(tmp_path):
    plan = tiny(replace(BASE["ddp"], dp_replicate=2), 100_000)
    process = start(tmp_path, plan, "--checkpoint-every", "1h", "--no-save-weights")
    run = tmp_path / "run"
    until(lambda: process.poll() is not None or len(rundir.read_losses(run)) > 2, "three steps")
    os.kill(int(alive.read(run, 1).process.partition(":")[0]), signal.SIGUSR1)
    said, _ = process.communicate(timeout=PATIENCE_S)

    assert process.returncode == 128 + signal.SIGTERM, said
    step = checkpoints.complete(checkpoints.newest(run)[0]).step
    record = rundir.read_record(run)
    assert (record.status, len(record.losses)) == ("interrupted", step)
    assert f"step-{step}" in record.message
