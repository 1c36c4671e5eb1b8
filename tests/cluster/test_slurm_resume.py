"""Checkpoints of jobs of a real Slurm: written when it ends a job, and gone on from, by command and by Slurm alone.

Not here: jobs that write none (test_slurm.py), or what a checkpoint is (test_saving.py).
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import slurms
from agents import make_plan, run_warm
from cases import FULL, SEQUENCES
from hanging import HOOK
from hosts import network, unusable
from msgspec.structs import replace
from slurms import TestSlurm, slurm
from test_join import EXECUTOR
from test_slurm import executor, log_of, pair, record_of  # noqa: F401 (pair is a fixture)
from waiting import until

from executor.folder import alive, checkpoints, rundir
from planner.spec import Layout, inputs
from planner.spec.plan import Plan, encode_plan

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(unusable() is not None, reason=str(unusable())),
    pytest.mark.skipif(slurms.unusable() is not None, reason=str(slurms.unusable())),
]

STEPS = 60
LAYOUT = Layout(engine="fsdp2", dp_shard=2, zero_stage=3, micro_batch_size=SEQUENCES // 2)
OPTIONS = ("--checkpoint-every", "10", "--no-save-weights")
LOST_S = 10
LONGEST_S = 300


@pytest.fixture
def plan(tmp_path: Path) -> Plan:
    job = replace(FULL, recipe=replace(FULL.recipe, steps=STEPS))
    made = inputs.resolved(make_plan(LAYOUT, job, nodes=2, per_node=1))
    (tmp_path / "plan.json").write_bytes(encode_plan(made))
    return made


def submitted(one: TestSlurm, folder: Path, *options: str, **added: str) -> str:
    """The number of the job that runs the plan beside a folder in it, with more variables around it."""
    words = (EXECUTOR, "run", folder.parent / "plan.json", "--launcher", "slurm", "--run-dir", folder, *OPTIONS)
    done = one.run(*words, *options, timeout_s=LONGEST_S, OMP_NUM_THREADS="1", **added)
    assert done.returncode == 0, done.stderr
    return job_of(folder)


def job_of(folder: Path) -> str:
    return str(json.loads((folder / "slurm.json").read_text())["job"])


def trains(folder: Path, step: int) -> None:
    """Wait until rank 1 has begun a step."""

    def begun() -> bool:
        said = alive.read(folder, 1)
        return said is not None and said.step >= step

    until(begun, f"step {step}", lambda: log_of(folder))


def ended(one: TestSlurm, folder: Path) -> dict[str, Any]:
    """run.json, once Slurm has nothing left to do."""
    until(lambda: not one.run("squeue", "-h").stdout.strip(), "the job's end", lambda: log_of(folder))
    return record_of(folder)


def check_undisturbed(folder: Path, plan: Plan) -> None:
    """Its losses are those of a run that nobody disturbed, to the last bit."""
    whole = run_warm(plan, folder.with_name("whole"), "--no-meter")
    assert set(whole.exit_codes) == {0}, whole.output
    assert len(rundir.read_losses(folder)) == plan.job.recipe.steps
    assert rundir.read_losses(folder) == rundir.read_losses(folder.with_name("whole"))


def test_a_cancelled_job_leaves_a_checkpoint_and_resume_submits_it_again(
    pair: TestSlurm,  # noqa: F811
    plan: Plan,
    tmp_path: Path,
) -> None:
    folder = tmp_path / "run"
    number = submitted(pair, folder)
    trains(folder, 12)
    early = executor(pair, "resume", folder)
    assert early.returncode == 3 and f"is running as job {number}" in early.stderr, early.stderr
    pair.run("scancel", number)
    found = ended(pair, folder)

    place, skipped = checkpoints.newest(folder)
    assert place is not None and not skipped
    step = checkpoints.complete(place).step
    assert (found["status"], found["exit_code"]) == ("interrupted", 143) and step > 10 and step % 10
    words = f"job {number} was cancelled (scancel); run: ended on request after step {step} of {STEPS}, with"
    assert found["message"] == f"stopped by SIGTERM: {words} the checkpoint step-{step}."

    again = executor(pair, "resume", folder)
    assert again.returncode == 0 and "queued: job" in again.stderr, again.stderr
    assert job_of(folder) != number
    found = ended(pair, folder)
    assert (found["status"], found["launcher"]) == ("completed", "slurm"), found["message"]
    assert [one["resumed_from"] for one in found["attempts"]] == [step]
    check_undisturbed(folder, plan)
    done = executor(pair, "resume", folder)
    assert done.returncode == 3 and "has completed" in done.stderr, done.stderr


@pytest.mark.long
def test_a_requeued_job_goes_on_in_its_folder(pair: TestSlurm, plan: Plan, tmp_path: Path) -> None:  # noqa: F811
    folder = tmp_path / "run"
    number = submitted(pair, folder)
    trains(folder, 12)
    pair.run("scontrol", "requeue", number)
    found = ended(pair, folder)

    assert found["status"] == "completed" and job_of(folder) == number
    (attempt,) = found["attempts"]
    assert attempt["message"].startswith(f"stopped by SIGTERM: Slurm put job {number} back into the queue (scontrol")
    assert attempt["resumed_from"] > 10 and not list(tmp_path.glob("run-restart-*"))
    check_undisturbed(folder, plan)


@pytest.fixture
def three(tmp_path: Path) -> Iterator[TestSlurm]:
    """A Slurm of three nodes that finds a lost one within seconds."""
    with network(tmp_path / "net", ("blue", "green", "red")) as hosts:
        here = hosts.hosts[0].address.rpartition(".")[0] + ".254"
        with slurm(tmp_path / "slurm", hosts, here, LOST_S) as made:
            yield made


@pytest.mark.long
def test_a_job_whose_node_has_no_slurmd_any_more_goes_on_on_another(
    three: TestSlurm, plan: Plan, tmp_path: Path
) -> None:
    """Rank 1 stands still until then."""
    job = replace(plan.job, recipe=replace(plan.job.recipe, steps=15))
    plan = replace(plan, job=job).sealed()
    (tmp_path / "plan.json").write_bytes(encode_plan(plan))
    folder = tmp_path / "run"
    stands = ("--env", "HOLD=1 13 1", "--env", "EVERY=10", "--stall-timeout", "3600")
    number = submitted(three, folder, *stands, PYTHONPATH=str(HOOK))
    until((folder / "HOLD-13").exists, "rank 1 to stand still after the checkpoint of step 10", lambda: log_of(folder))
    lost = three.hosts[1]
    assert lost.run("pkill", "-KILL", "-x", "slurmd").returncode == 0
    found = ended(three, folder)

    assert found["status"] == "completed" and job_of(folder) == number, found["message"]
    hosts = [json.loads((folder / f"mesh/rank-{rank}.json").read_text())["host"] for rank in (0, 1)]
    assert hosts == [one.name for one in three.hosts if one != lost]
    (attempt,) = found["attempts"]
    said = f"{lost.name} is down (Not responding), and put the job back into the queue"
    assert said in attempt["message"] and attempt["resumed_from"] == 10, attempt
    check_undisturbed(folder, plan)


@pytest.mark.long
def test_a_run_in_an_allocation_goes_on_in_another(pair: TestSlurm, plan: Plan, tmp_path: Path) -> None:  # noqa: F811
    folder = tmp_path / "run"
    words = (EXECUTOR, "run", tmp_path / "plan.json", "--launcher", "slurm", "--run-dir", folder, "--yes", *OPTIONS)
    begun = subprocess.Popen(
        [str(word) for word in ("salloc", "--nodes=2", *words)],
        text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=pair.environment | {"OMP_NUM_THREADS": "1"}, start_new_session=True,
    )  # fmt: skip
    trains(folder, 12)
    pair.run("pkill", "-TERM", "-f", f"bin/python.* run .*{tmp_path}")
    _, said = begun.communicate(timeout=LONGEST_S)
    found = record_of(folder)
    assert begun.returncode == 143, said
    assert found["message"].startswith("stopped by SIGTERM: run: ended on request after step"), found["message"]

    words = (EXECUTOR, "resume", folder, "--yes")
    done = pair.run("salloc", "--nodes=2", *words, timeout_s=LONGEST_S, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    assert len(record_of(folder)["attempts"]) == 1
    check_undisturbed(folder, plan)
