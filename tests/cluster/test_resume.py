"""A rank is killed, and the run goes on from its newest checkpoint: with real agents, ranks and shards.

The losses after it are those of a run that nobody disturbed, to the last bit. Not here: how checkpoints are written
(test_kill_points.py), or the pure parts (tests/executor/test_resume.py).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from agents import make_plan, run_warm
from cases import FULL, job
from hanging import HOOK
from msgspec.structs import replace
from test_launch import both_wait, run_id
from test_launch import start as start_process
from waiting import PATIENCE_S, until

from executor.folder import rundir
from executor.folder.checkpoint_policy import CheckpointSchedule
from executor.follow import attach
from executor.measure import report
from executor.run import attempts, launch, reap, resume
from executor.system.processes import processes_of
from planner.basics.errors import PlannerError
from planner.spec import Layout
from planner.spec.plan import Plan, encode_plan
from planner.spec.record import RunRecord

STEPS, EVERY, DEATH = 32, 5, 12
GIVEN = os.environ | {"EVERY": str(EVERY)} | dict.fromkeys(("DIE", "HOLD"), f"1 {DEATH} 1")
"""The environment of a resume: what runs here were given by --env stands in no folder."""
NAMED_S = 15.0
HOST = socket.gethostname()
EXECUTOR = Path(sys.executable).with_name("executor")
TWO = {"micro_batch_size": 2}
LAYOUTS = {
    "ddp": Layout(engine="ddp", dp_replicate=2, **TWO),
    "fsdp2": Layout(engine="fsdp2", dp_shard=2, zero_stage=3, **TWO),
    "zero1": Layout(engine="deepspeed", dp_shard=2, zero_stage=1, **TWO),
    "zero2": Layout(engine="deepspeed", dp_shard=2, zero_stage=2, **TWO),
    "zero3": Layout(engine="deepspeed", dp_shard=2, zero_stage=3, **TWO),
    "fsdp2-lora": Layout(engine="fsdp2", dp_shard=2, zero_stage=3, **TWO),
    "zero3-lora": Layout(engine="deepspeed", dp_shard=2, zero_stage=3, **TWO),
    "autotp-zero2": Layout(engine="deepspeed-autotp", tp=2, dp_shard=2, zero_stage=2, **TWO),
}


def plan_of(name: str) -> Plan:
    of = job("lora") if name.endswith("lora") else FULL
    of = replace(of, recipe=replace(of.recipe, steps=STEPS))
    return make_plan(LAYOUTS[name], of, nodes=1, per_node=LAYOUTS[name].world_size)


def start(plan: Plan, folder: Path, *env: str, max_restarts: int = 0) -> RunRecord:
    options = launch.RunOptions(
        run_dir=folder, nodes=1, hosts="loopback", env=(*env, f"EVERY={EVERY}"), trainer="tests.cluster.hanging",
        max_restarts=max_restarts, checkpoints=CheckpointSchedule(every=str(EVERY)),
    )  # fmt: skip
    return launch.execute(launch.prepare(plan, options, print), print)


def undisturbed(plan: Plan, folder: Path) -> tuple[float, ...]:
    """The losses of the same run, without a launcher, a checkpoint or a death."""
    done = run_warm(plan, folder, "--no-meter")
    assert set(done.exit_codes) == {0}, done.output
    return rundir.read_losses(folder)


@pytest.mark.parametrize(
    "name",
    [
        "fsdp2",
        *(pytest.param(name, marks=pytest.mark.long) for name in LAYOUTS if name != "fsdp2"),
    ],
)
def test_a_run_whose_rank_was_killed_goes_on_to_the_bit(tmp_path, name):
    plan, folder = plan_of(name), tmp_path / "run"
    first = start(plan, folder, f"DIE=1 {DEATH} 1")
    assert (first.status, first.failed_rank) == ("training failed", 1), first.message
    assert len(first.losses) == DEATH - 1

    said: list[str] = []
    plan = resume.planned(folder, None)
    options, place = resume.going(folder, plan, said.append, environment=GIVEN)
    ready = launch.prepare(plan, options, said.append)
    resume.put_aside(ready, place, said.append)
    second = launch.execute(ready, said.append)

    assert second.status == "completed", second.message
    assert place.step == 10
    assert second.losses == undisturbed(plan, tmp_path / "whole")
    (attempt,) = second.attempts
    assert (attempt.status, attempt.failed_rank, attempt.steps, attempt.resumed_from) == ("training failed", 1, 11, 10)
    assert attempt.repeated_s > 0 and attempt.down_s is not None and attempt.down_s > 0
    assert (folder / "attempts" / "1" / "logs").is_dir() and (folder / "attempts" / "1" / "failed").is_dir()
    assert [json.loads(line)["step"] for line in (folder / "attempts/1/metrics.jsonl").read_text().splitlines()] == [10]
    assert report.build(folder).attempts == second.attempts
    with pytest.raises(PlannerError, match="has completed"):
        resume.planned(folder, None)


def test_the_launcher_starts_again_by_itself_and_stops_at_the_same_failure(tmp_path):
    plan, folder = plan_of("ddp"), tmp_path / "run"
    done = start(plan, folder, f"DIE=1 {DEATH} 1", max_restarts=1)

    assert done.status == "completed", done.message
    assert done.losses == undisturbed(plan, tmp_path / "whole")
    assert [(one.failed_rank, one.steps, one.resumed_from) for one in done.attempts] == [(1, 11, 10)]
    ports = [
        json.loads((where / "launch.json").read_text())["commands"][0]["argv"]
        for where in (folder, folder / "attempts" / "1")
    ]
    assert len({argv[argv.index("--master-port") + 1] for argv in ports}) == 2

    again = start(plan, tmp_path / "again", f"DIE=1 {DEATH} 9", max_restarts=5)
    assert again.status == "training failed" and len(again.attempts) == 1
    assert again.message.endswith("it failed so at step 12 twice, so it is not started a third time")


@pytest.mark.long
def test_an_agent_that_is_killed_is_a_lost_node_and_the_run_goes_on(tmp_path):
    plan, folder, killed = plan_of("ddp"), tmp_path / "run", []

    def kill() -> None:
        until((folder / f"HOLD-{DEATH}").exists, "rank 1 to stand still")
        for pid in processes_of(run_id(folder)):
            if b"executor.worker.agent" in Path(f"/proc/{pid}/cmdline").read_bytes():
                os.kill(pid, signal.SIGKILL)
                killed.append(time.time())

    worker = threading.Thread(target=kill)
    worker.start()
    done = start(plan, folder, f"HOLD=1 {DEATH} 1", max_restarts=1)
    worker.join()

    assert done.status == "completed" and len(killed) == 1, done.message
    assert [(one.status, one.steps, one.resumed_from) for one in done.attempts] == [("node lost", 11, 10)]
    assert "the agent of" in done.attempts[0].message
    assert (folder / "attempts" / "1" / "run.json").stat().st_mtime - killed[0] < NAMED_S
    assert processes_of(run_id(folder)) == []
    assert done.losses == undisturbed(plan, tmp_path / "whole")


def test_a_run_whose_launcher_was_killed_goes_on_from_the_command_line(tmp_path):
    plan, folder = plan_of("zero1"), tmp_path / "run"
    (tmp_path / "plan.json").write_bytes(encode_plan(plan))
    words = ["run", tmp_path / "plan.json", "--run-dir", folder, "--checkpoint-every", str(EVERY), "--yes"]
    words += ["--env", "HOLD", "--env", "EVERY"]
    launcher = subprocess.Popen(
        [EXECUTOR, *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env=GIVEN | {"PYTHONPATH": str(HOOK)},
    )  # fmt: skip
    until((folder / f"HOLD-{DEATH}").exists, "rank 1 to stand still after the checkpoint of step 10")
    launcher.kill()
    launcher.wait()

    done = subprocess.run(
        [EXECUTOR, "resume", folder, "--yes", "--json"], text=True, capture_output=True, timeout=PATIENCE_S,
        check=False, env=GIVEN,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [(one["status"], one["exit_code"]) for one in found["attempts"]] == [("launcher lost", 7)]
    assert (found["attempts"][0]["steps"], found["attempts"][0]["resumed_from"]) == (11, 10)
    assert tuple(found["losses"]) == undisturbed(plan, tmp_path / "whole")
    shown = subprocess.run([EXECUTOR, "report", folder], text=True, capture_output=True, check=True).stdout
    assert "start 1: launcher lost after step" in shown and "until the next step" in shown
    assert (folder / "weights" / "config.json").is_file()


@pytest.mark.long
def test_another_layout_goes_on_within_rounding_and_a_damaged_checkpoint_is_passed_over(tmp_path):
    plan, folder = plan_of("fsdp2"), tmp_path / "run"
    start(plan, folder, f"DIE=1 {DEATH} 1")
    shard = next((folder / "checkpoints" / "step-10").glob("*.safetensors"))
    damaged = bytearray(shard.read_bytes())
    damaged[-9] ^= 1
    shard.write_bytes(damaged)

    said: list[str] = []
    other = resume.planned(folder, plan_of("zero3"))
    options, place = resume.going(folder, other, said.append, environment=GIVEN)
    ready = launch.prepare(other, options, said.append)
    assert place.step == 5 and any("skipped checkpoint step-10" in line for line in said)
    resume.put_aside(ready, place, said.append)
    done = launch.execute(ready, said.append)

    assert done.status == "completed", done.message
    whole = undisturbed(plan, tmp_path / "whole")
    assert done.losses == pytest.approx(whole, abs=1e-5) and done.losses[:5] == whole[:5]
    assert rundir.read_run_plan(folder).layout.engine == "deepspeed"


def test_the_validation_that_follows_a_checkpoint_is_made_once_in_the_whole_run(tmp_path):
    text = tmp_path / "validation.txt"
    text.write_text("so much to read " * 400)
    plan = plan_of("ddp")
    recipe = replace(plan.job.recipe, steps=12, validation_data=str(text), eval_every=EVERY)
    plan = replace(plan, job=replace(plan.job, recipe=recipe)).sealed()
    folder = tmp_path / "run"
    done = run_warm(plan, folder, "--no-meter", "--checkpoint-every", str(EVERY), "--keep-last", "9")
    assert set(done.exit_codes) == {0}, done.output
    before = [(line["step"], line.get("loss"), line.get("validation_loss")) for line in lines_of(folder)]

    attempts.set_aside(folder, EVERY)
    again = run_warm(plan, folder, "--no-meter", "--resume", str(folder / "checkpoints" / f"step-{EVERY}"))

    assert set(again.exit_codes) == {0}, again.output
    after = [(line["step"], line.get("loss"), line.get("validation_loss")) for line in lines_of(folder)]
    assert after == before and [line[0] for line in after if line[2] is not None] == [5, 10, 12]


def lines_of(folder: Path) -> list[dict[str, Any]]:
    """Steps and validations."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [line for line in found if "checkpoint_bytes" not in line]


def test_a_run_is_stopped_from_elsewhere_and_its_logs_are_read_after_its_launcher_died(tmp_path):
    folder = tmp_path / "run"
    launcher = start_process("wait", folder)
    both_wait(folder)
    with pytest.raises(PlannerError, match="is running"):
        resume.check_ended(folder)

    found = reap.stop(folder, 60)
    launcher.communicate(timeout=PATIENCE_S)

    assert (found.status, found.message, found.exit_code) == ("interrupted", "stopped by SIGTERM", 143)
    assert reap.stop(folder, 60) == found
    assert "node-1:1  rank 1 met 2" in [line.replace(HOST, "node-1") for line in attach.last_lines(folder, 1, 5)]
    with pytest.raises(PlannerError, match="--rank=2: is not a rank of a run of 2"):
        list(attach.last_lines(folder, 2, 5))
