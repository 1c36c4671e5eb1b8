"""`executor run --launcher slurm` and the script of its --dry-run on a real Slurm of two nodes, over gloo.

Not here: the Slurm (slurms.py), the hosts (hosts.py), or the words of a script (tests/executor/test_slurm.py).
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import slurms
from agents import make_plan
from cases import SEQUENCES, Case, Reference, job
from hosts import network, running_on, unusable
from imports import imported_case
from msgspec.structs import replace
from numpy.testing import assert_allclose
from slurms import TestSlurm, slurm
from test_join import EXECUTOR, losses
from waiting import PATIENCE_S, RANKS, until

from planner.spec import Layout, inputs
from planner.spec.plan import encode_plan

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(unusable() is not None, reason=str(unusable())),
    pytest.mark.skipif(slurms.unusable() is not None, reason=str(slurms.unusable())),
]

SHORT = replace(job("full"), recipe=replace(job("full").recipe, steps=3))
LAYOUT = Layout(engine="ddp", micro_batch_size=SEQUENCES // 2, dp_replicate=2)
NODES = ("blue", "red")
"""In Slurm's order, which is the alphabet's."""


LIMIT_S = 180
"""A time limit of a minute, and the half minute that Slurm takes to look at it."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestSlurm]:
    folder = tmp_path_factory.mktemp("slurm")
    with network(folder / "net", NODES) as hosts:
        here = hosts.hosts[0].address.rpartition(".")[0] + ".254"
        with slurm(folder / "slurm", hosts, here) as made:
            yield made


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    (tmp_path / "a b").mkdir()
    path = tmp_path / "a b" / "plan.json"
    path.write_bytes(encode_plan(inputs.resolved(make_plan(LAYOUT, SHORT, nodes=2, per_node=1))))
    return path


def executor(pair: TestSlurm, *words: object) -> subprocess.CompletedProcess[str]:
    return pair.run(EXECUTOR, *words, timeout_s=PATIENCE_S, OMP_NUM_THREADS="1")


def log_of(folder: Path) -> str:
    return "\n".join(path.read_text() for path in folder.glob("slurm-*.log"))


def record_of(folder: Path) -> dict[str, object]:
    until((folder / "run.json").is_file, "run.json", lambda: log_of(folder))
    found: dict[str, object] = json.loads((folder / "run.json").read_text())
    return found


def left_over(pair: TestSlurm) -> list[str]:
    """What runs on the hosts beside sshd, Slurm and the question itself."""
    return running_on(pair.hosts, "executor", "torch")


def check_trained(folder: Path, reference: Reference, case: Case | None = None) -> None:
    expected = reference(case or Case(LAYOUT, SHORT)).column("loss")
    assert_allclose(losses(folder), expected, rtol=1e-5)
    record = record_of(folder)
    assert (record["status"], record["launcher"], record["nodes"]) == ("completed", "slurm", 2)
    seen = [json.loads((folder / f"mesh/rank-{rank}.json").read_text()) for rank in (0, 1)]
    assert [one["host"] for one in seen] == list(NODES)
    assert {json.loads((folder / f"joined/node-{node}.json").read_text())["interface"] for node in (0, 1)} == {"eth0"}


def test_the_script_of_a_dry_run_trains_what_one_process_trains(
    pair: TestSlurm, plan: Path, reference: Reference, tmp_path: Path
) -> None:
    folder = tmp_path / "a b" / "run"
    made = executor(pair, "run", plan, "--launcher", "slurm", "--dry-run", "-o", folder)
    assert made.returncode == 0, made.stderr
    assert made.stdout == (folder / "run.sbatch").read_text()

    submitted = pair.run("sbatch", "--parsable", folder / "run.sbatch")
    assert submitted.returncode == 0, submitted.stderr
    number = submitted.stdout.strip()
    until(lambda: pair.job(number).get("JobState") in ("COMPLETED", "FAILED"), "the job", lambda: log_of(folder))

    assert pair.job(number)["JobState"] == "COMPLETED", log_of(folder)
    check_trained(folder, reference)
    assert "blue:0" in log_of(folder) and left_over(pair) == []


def test_inside_an_allocation_it_simply_runs(pair: TestSlurm, plan: Path, reference: Reference, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = (EXECUTOR, "run", plan, "--launcher", "slurm", "--run-dir", folder, "--yes")
    done = pair.run("salloc", "--nodes=2", *words, timeout_s=PATIENCE_S, OMP_NUM_THREADS="1")

    assert done.returncode == 0, done.stderr
    check_trained(folder, reference)
    assert "completed in" in done.stderr and left_over(pair) == []


@pytest.mark.long
def test_an_imported_model_trains_in_an_allocation(pair: TestSlurm, reference: Reference, tmp_path: Path) -> None:
    case = imported_case("glm4_moe", LAYOUT, SHORT)
    (tmp_path / "plan.json").write_bytes(encode_plan(inputs.resolved(case.plan)))
    words = (EXECUTOR, "run", tmp_path / "plan.json", "--launcher", "slurm", "--run-dir", tmp_path / "run", "--yes")
    done = pair.run("salloc", "--nodes=2", *words, timeout_s=PATIENCE_S, OMP_NUM_THREADS="1")

    assert done.returncode == 0, done.stderr
    check_trained(tmp_path / "run", reference, case)
    assert left_over(pair) == []


def test_an_allocation_with_fewer_nodes_than_the_plan_is_refused(pair: TestSlurm, plan: Path, tmp_path: Path) -> None:
    words = (EXECUTOR, "run", plan, "--launcher", "slurm", "--run-dir", tmp_path / "run", "--yes")
    done = pair.run("salloc", "--nodes=1", *words, timeout_s=PATIENCE_S)

    said = [line for line in done.stderr.splitlines() if not line.startswith("salloc: ")]
    assert done.returncode == 3 and len(said) == 1, done.stderr
    assert "has 1 node(s), and the plan needs 2. Ask for them: salloc --nodes=2" in said[0]
    assert not (tmp_path / "run").exists()


@pytest.fixture
def waiting(pair: TestSlurm, plan: Path, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[tuple[Path, str]]:
    """A submitted job, with more words of its command as far as a test asks for them, whose ranks have met and wait
    for ever, and its number."""
    (script := tmp_path / "wait.py").write_text(RANKS)
    folder = tmp_path / "run"
    words = ("run", plan, "--launcher", "slurm", "--run-dir", folder, "--script", script)
    words += getattr(request, "param", ())
    done = executor(pair, *words, "--", "a word", "$(touch canary)")
    assert done.returncode == 0, done.stderr
    number = json.loads((folder / "slurm.json").read_text())["job"]
    until(lambda: len(list(folder.glob("waiting-*"))) == 2, "both ranks to wait", lambda: log_of(folder))
    yield folder, number
    pair.run("scancel", number)
    until(lambda: not pair.run("squeue", "-h").stdout.strip(), "Slurm to end its jobs")
    assert left_over(pair) == []


def test_a_cancelled_job_is_told_for_one(pair: TestSlurm, waiting: tuple[Path, str]) -> None:
    folder, number = waiting
    assert executor(pair, "status", folder).stdout.startswith("running")
    pair.run("scancel", number)

    record = record_of(folder)
    assert (record["status"], record["exit_code"]) == ("interrupted", 143)
    assert record["message"] == f"stopped by SIGTERM: job {number} was cancelled (scancel)"


@pytest.mark.long
@pytest.mark.parametrize("waiting", [("--sbatch", "time=1")], indirect=True)  # minutes: Slurm's smallest limit
def test_a_job_at_its_time_limit_says_so(pair: TestSlurm, waiting: tuple[Path, str]) -> None:
    folder, number = waiting
    until((folder / "run.json").is_file, "the limit", lambda: log_of(folder), patience_s=LIMIT_S)

    record = record_of(folder)
    assert record["message"] == f"stopped by SIGTERM: Slurm ended job {number} at its time limit of 00:01:00"
    assert (record["status"], record["exit_code"]) == ("interrupted", 143)
    said = executor(pair, "status", folder).stdout
    assert "at its time limit of 00:01:00" in said, said


@pytest.mark.long
def test_a_requeued_job_says_so_and_starts_in_a_folder_of_its_own(pair: TestSlurm, waiting: tuple[Path, str]) -> None:
    folder, number = waiting
    pair.run("scontrol", "requeue", number)

    message = f"Slurm put job {number} back into the queue (scontrol requeue, or a job that comes first)"
    assert record_of(folder)["message"] == f"stopped by SIGTERM: {message}"
    again = folder.with_name("run-restart-1")
    until(lambda: len(list(again.glob("waiting-*"))) == 2, "the job to start again", lambda: log_of(folder))
    assert not list(folder.parent.rglob("canary"))


def test_a_node_that_goes_down_and_one_that_is_drained_are_named(pair: TestSlurm, waiting: tuple[Path, str]) -> None:
    folder, number = waiting
    pair.set_node("red", "state=down", "reason=bad fan")
    try:
        said = (
            f"stopped by SIGTERM: Slurm ended job {number}: red is down (bad fan), and put the job back into the queue"
        )
        assert record_of(folder)["message"] == said
        pair.set_node("red", "state=resume")
        pair.set_node("red", "state=drain", "reason=new fan")
        again = folder.with_name("next")
        plan = folder / "plan.json"
        done = executor(pair, "run", plan, "--launcher", "slurm", "--run-dir", again)
        assert done.returncode == 0 and "queued: job" in done.stderr, done.stderr
        until(lambda: "(new fan)" in executor(pair, "status", again).stdout, "the reason")
        assert executor(pair, "status", again).stdout.startswith("queued: job ")
        pair.run("scancel", "--me")
        seen = executor(pair, "watch", again)
        assert seen.returncode == 7 and "cancelled: job " in seen.stdout, seen.stdout + seen.stderr
    finally:
        pair.set_node("red", "state=resume")


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_an_interrupted_run_in_an_allocation_leaves_nothing(
    pair: TestSlurm, plan: Path, tmp_path: Path, number: signal.Signals
) -> None:
    (script := tmp_path / "wait.py").write_text(RANKS)
    folder = tmp_path / "run"
    words = [EXECUTOR, "run", plan, "--launcher", "slurm", "--run-dir", folder, "--yes", "--script", script]
    environment = pair.environment | {"OMP_NUM_THREADS": "1"}
    begun = subprocess.Popen(
        ["salloc", "--nodes=2", *map(str, words)], text=True, stderr=subprocess.PIPE, env=environment
    )
    until(lambda: len(list(folder.glob("waiting-*"))) == 2, "both ranks to wait")
    pair.run("pkill", f"-{number.value}", "-f", f"bin/python.* run .*{tmp_path}")
    _, said = begun.communicate(timeout=PATIENCE_S)

    assert begun.returncode == 128 + number, said
    record = record_of(folder)
    assert (record["status"], record["message"]) == ("interrupted", f"stopped by {number.name}")
    until(lambda: left_over(pair) == [], "every process on the hosts to end")
