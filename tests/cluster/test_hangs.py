"""A run that hangs is found, named and ended; a slow one is let be. With real agents and the real trainer over gloo.

Not here: ranks that end (test_launch.py), or the pure parts (tests/executor/test_hangs.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
from agents import make_plan
from cases import FULL
from msgspec.structs import replace
from test_launch import NAMESPACES
from waiting import until

from executor.folder import alive
from executor.launchers import namespaces
from executor.run import launch, reap
from executor.system.processes import processes_of
from executor.worker.world.timeouts import GROUP_S
from planner.spec import Layout
from planner.spec.record import RunRecord

NAMED_S = 15.0
STALL_S = 5.0


def run(
    folder: Path,
    *env: str,
    steps: int = 6,
    stall_s: float | None = STALL_S,
    nodes: int = 1,
    max_restarts: int = 0,
    **recipe: object,
) -> RunRecord:
    """Two ranks of the trainer that hang or are slow as `env` says; of two nodes each in a namespace."""
    job = replace(FULL, recipe=replace(FULL.recipe, steps=steps, **recipe))
    plan = make_plan(Layout(engine="ddp", dp_replicate=2, micro_batch_size=2), job, nodes=nodes, per_node=2 // nodes)
    options = launch.RunOptions(
        run_dir=folder, nodes=nodes, hosts="loopback" if nodes == 1 else "namespaces", env=env,
        trainer="tests.cluster.hanging", stall_s=stall_s, max_restarts=max_restarts,
    )  # fmt: skip
    return launch.execute(launch.prepare(plan, options, print), print)


def silent(folder: Path) -> float:
    """Seconds between the last step's end and the launcher's record."""
    last = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["time"]
    return (folder / "run.json").stat().st_mtime - float(last)


def run_id(folder: Path) -> str:
    return json.loads((folder / "launch.json").read_text())["commands"][0]["env"]["MESHWRIGHT_RUN_ID"]


def test_a_stuck_rank_is_named_with_its_place_and_with_those_who_wait_for_it(tmp_path):
    folder = tmp_path / "run"
    found = run(folder, "HOLD=1 4 9")

    assert (found.status, found.cause, found.exit_code, found.failed_rank) == ("hung", "rank stuck", 8, 1)
    assert "is stuck in hold (hanging.py:" in found.message and "at step 4, silent for" in found.message
    assert "rank 0 is in backward" in found.message or "rank 0 waits in" in found.message
    assert silent(folder) < STALL_S + NAMED_S
    stacks = (folder / "alive" / "rank-0.stacks").read_text()
    assert "Current thread" in stacks and "train.py" in stacks
    assert len(found.losses) == 3 and processes_of(run_id(folder)) == []
    assert reap.standing(folder).status == "hung"


def test_a_stopped_rank_is_named_whatever_the_stall_timeout(tmp_path):
    folder, stopped = tmp_path / "run", []

    def stop() -> None:
        until(lambda: (said := alive.read(folder, 1)) is not None and said.step >= 3, "rank 1 to train")
        said = alive.read(folder, 1)
        assert said is not None
        os.kill(int(said.process.partition(":")[0]), signal.SIGSTOP)
        stopped.append(time.time())

    worker = threading.Thread(target=stop)
    worker.start()
    found = run(folder, steps=100_000, stall_s=None)
    worker.join()

    assert (found.status, found.cause, found.exit_code, found.failed_rank) == ("hung", "rank stopped", 8, 1)
    assert "rank 1 on" in found.message and "is stopped at step" in found.message
    assert (folder / "run.json").stat().st_mtime - stopped[0] < NAMED_S
    assert processes_of(run_id(folder)) == []


@pytest.mark.long
def test_a_rank_that_is_stuck_at_the_same_step_again_is_not_started_a_third_time(tmp_path):
    found = run(tmp_path / "run", "HOLD=1 4 9", max_restarts=4)

    assert (found.status, found.exit_code) == ("hung", 8)
    assert found.message.endswith("it failed so at step 4 twice, so it is not started a third time")
    assert [(one.status, one.steps, one.resumed_from) for one in found.attempts] == [("hung", 3, 0)]
    assert len(found.losses) == 3


@NAMESPACES
@pytest.mark.long
def test_a_link_that_is_down_for_a_moment_is_let_be_and_one_that_stays_down_is_found(tmp_path):
    folder, seen = tmp_path / "run", []

    def cut() -> None:
        until(lambda: (said := alive.read(folder, 1)) is not None and said.step >= 3, "rank 1 to train")
        link = ["ip", "-n", namespaces.namespace(os.getpid(), 1), "link", "set", namespaces.INSIDE]
        subprocess.run([*link, "down"], check=True)
        until(lambda: time.time() - (folder / "metrics.jsonl").stat().st_mtime > 5, "the ranks to wait")
        subprocess.run([*link, "up"], check=True)
        before = (folder / "metrics.jsonl").stat().st_size
        until(lambda: (folder / "metrics.jsonl").stat().st_size > before, "the ranks to go on")
        subprocess.run([*link, "down"], check=True)
        seen.append(time.time())

    worker = threading.Thread(target=cut)
    worker.start()
    found = run(folder, steps=1_000_000, stall_s=20.0, nodes=2)
    worker.join()

    assert seen and (found.status, found.cause, found.failed_rank) == ("hung", "rank stuck", None), found.message
    assert "check the network between them" in found.message
    assert (folder / "run.json").stat().st_mtime - seen[0] < 20.0 + NAMED_S


def test_a_slow_first_step_and_a_long_validation_are_no_hang(tmp_path):
    text = tmp_path / "validation.txt"
    text.write_text("so much to read " * 400)
    slow_s = 2 * STALL_S
    found = run(tmp_path / "run", f"SLOW_S={slow_s}", validation_data=str(text), eval_every=3)

    assert found.status == "completed", found.message
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    third = next(line for line in lines if line["step"] == 2)
    validated = next(line for line in lines if "validation_loss" in line)
    assert lines[0]["step_s"] > STALL_S and validated["time"] - third["time"] > STALL_S


@pytest.mark.smoke
def test_every_process_group_of_a_framework_has_the_timeout(split_run):
    for name in ("ddp-accum1", "fsdp2-accum1", "zero2-accum1", "tp2-fsdp2-accum1", "pp2-dp2-zero1"):
        mesh = json.loads((split_run(name).folder / "mesh" / "rank-0.json").read_text())
        assert mesh["timeouts_s"] == [GROUP_S], name
