"""The script of a Slurm job, and what a task reads of its variables.

Not here: a real Slurm (tests/cluster/test_slurm.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from test_cli import assert_refused, plan_file, run  # noqa: F401  # a fixture
from test_rundir import make_plan

from executor.launchers import slurm
from planner.basics.errors import PlannerError
from planner.spec import Layout
from planner.spec.plan import Plan

TASK = {"SLURM_JOB_ID": "12", "SLURM_NODEID": "1", "SLURM_NNODES": "2", "SLURM_NTASKS": "2"}
NASTY = ("two words", "$(touch canary)", "`touch canary`", "'", '"', "\\", ";touch canary", "-x", "*")
ECHO = '#!/bin/sh\nexec {python} -c \'import json, sys; print(json.dumps(sys.argv[1:]))\' "$0" "$@" >>{log}\n'


@pytest.fixture
def plan() -> Plan:
    return make_plan(Layout(engine="ddp", dp_replicate=2))


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """Programs called executor and srun that write down how they are called, a line of JSON each, in calls."""
    (tmp_path / "bin").mkdir()
    for name in ("executor", "srun"):
        path = tmp_path / "bin" / name
        path.write_text(ECHO.format(python=sys.executable, log=tmp_path / "calls"))
        path.chmod(0o700)
    return tmp_path / "bin"


def calls(programs: Path, script: str, **environment: str) -> list[list[str]]:
    """What bash calls of a script, name and words."""
    path = f"{programs}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], env={"PATH": path} | environment, cwd=programs, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in (programs.parent / "calls").read_text().splitlines()]
    return [[Path(line[0]).name, *line[1:]] for line in lines]


@pytest.mark.parametrize("nasty", [word for word in NASTY if word not in ('"', "\\")])
def test_names_of_folders_and_words_of_a_script_reach_programs_as_they_are(
    programs: Path, plan: Plan, nasty: str
) -> None:
    folder = Path("/runs", f"a{nasty}b")
    text = slurm.script(plan, folder, again=("--script", nasty, "--", *NASTY), call=("executor",))

    (first,) = calls(programs, text)
    assert first[0] == "srun" and first[-4:] == ["executor", "join", str(folder), "--slurm"]
    _, again, second = calls(programs, text, SLURM_RESTART_COUNT="2")
    next_folder = f"{folder}-restart-2"
    assert again[:6] == ["executor", "run", f"{folder}/plan.json", "--launcher", "slurm", "--dry-run"]
    assert again[6:] == ["-o", next_folder, "--script", nasty, "--", *NASTY]
    assert second[-2:] == [next_folder, "--slurm"]
    assert not list(programs.parent.rglob("canary"))


def test_a_job_of_a_run_with_checkpoints_is_the_same_however_often_it_starts(programs: Path, plan: Plan) -> None:
    text = slurm.script(plan, Path("/runs/a b"), call=("executor",))
    _, again = calls(programs, text), calls(programs, text, SLURM_RESTART_COUNT="2")
    assert again[0] == again[1] and again[0][-4:] == ["executor", "join", "/runs/a b", "--slurm"]
    assert len(again) == 2


def test_each_srun_of_each_start_of_a_job_is_another_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slurm, "_ask", lambda *words: "blue\nred\n")
    variables: list[dict[str, str]] = [{}, {"SLURM_RESTART_COUNT": "1"}, {"SLURM_STEP_ID": "3"}, {"SLURM_JOB_ID": "13"}]
    words = [slurm.part(TASK | changed).start for changed in variables]
    assert words == ["12.0.0", "12.1.0", "12.0.3", "13.0.0"]


def test_a_job_asks_for_the_plans_nodes_and_gpus_and_a_person_for_more(plan: Plan) -> None:
    cluster = replace(plan.cluster, nodes=3, gpus_per_node=8, gpu=replace(plan.cluster.gpu, kind="cuda"))
    made = slurm.script(
        replace(plan, cluster=cluster), Path("/r/100% of it"), ("partition=gpu", "time=4:00:00", "mem=1G")
    )
    lines = [line.removeprefix("#SBATCH --") for line in made.splitlines() if line.startswith("#SBATCH ")]
    assert {"nodes=3", "ntasks-per-node=1", "gpus-per-node=8", "partition=gpu", "time=4:00:00", "mem=1G"} <= set(lines)
    assert 'output="/r/100%% of it/slurm-%j.log"' in lines and "mem=0" not in lines
    assert "srun --nodes=3 --ntasks-per-node=1" in made
    assert not any(line.startswith("gpus") for line in slurm.directives(plan, Path("/r"), ()))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("Partition=x", "must be NAME or NAME=VALUE"),
        ("-p x", "must be NAME or NAME=VALUE"),
        ("nodes=4", "is decided by the plan"),
        ("wrap=true", "is decided by the plan"),
        ("comment=a\n#SBATCH --nodes=9", "has a line break"),
        ('comment="', "has a quote"),
    ],
)
def test_options_that_would_make_another_job_are_refused(plan: Plan, given: str, words: str) -> None:
    with pytest.raises(PlannerError, match=words) as caught:
        slurm.script(plan, Path("/r"), (given,))
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"SLURM_NODEID": ""}, "needs a task that srun has started"),
        ({"SLURM_NTASKS": "16"}, "has 16 tasks on 2 nodes, and the agent of a node is one task"),
        ({"SLURM_JOB_ID": "x"}, "needs a task that srun has started"),
    ],
)
def test_a_process_that_is_no_nodes_task_is_refused(changed: dict[str, str], words: str) -> None:
    with pytest.raises(PlannerError, match=words):
        slurm.part(TASK | changed)


@pytest.mark.slow
def test_without_slurm_each_command_says_so_in_a_line(plan_file: Path, tmp_path: Path) -> None:  # noqa: F811
    empty = tmp_path / "none"
    empty.mkdir()
    words = ("run", plan_file, "--launcher", "slurm", "--run-dir", tmp_path / "run")
    refused = run(*words, cwd=tmp_path, PATH=str(empty))
    assert_refused(refused, 3, "slurm=sbatch: is not installed here. Run it where Slurm's commands are")
    assert not (tmp_path / "run").exists()
    assert_refused(run("join", tmp_path, cwd=tmp_path), 2, "give --node-rank (and --master, --start), or --slurm")
    assert_refused(run("join", tmp_path, "--slurm", cwd=tmp_path), 2, "--slurm: needs a task that srun has started")
    assert_refused(run("run", plan_file, "--sbatch", "time=1", cwd=tmp_path), 2, "add --launcher slurm")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("00:10:00", 600),
        ("1-00:00:00", 86_400),
        ("10:00:00", 36_000),
        ("2-03:04:05", 183_845),
        ("UNLIMITED", None),
        ("Partition_Limit", None),
        ("", None),
    ],
)
def test_times_are_compared_by_seconds_and_not_by_their_letters(text: str, seconds: int | None) -> None:
    assert slurm.seconds(text) == seconds


def test_a_job_far_from_its_limit_of_days_was_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"JobState": "CANCELLED", "RunTime": "10:00:00", "TimeLimit": "1-00:00:00"}
    monkeypatch.setattr(slurm, "show", lambda job: said)
    monkeypatch.setattr(slurm, "node_states", lambda nodes=(): [])
    assert slurm.why("7") == "job 7 was cancelled (scancel)"
    said |= {"JobState": "RUNNING", "RunTime": "23:58:00"}
    assert slurm.why("7", number=signal.SIGUSR1) == "job 7 was sent SIGUSR1 120 s before its time limit of 1-00:00:00"
    assert slurm.why("7") == "the step of job 7 was cancelled"
    said |= {"JobState": "CANCELLED", "RunTime": "1-00:00:12"}
    assert slurm.why("7") == "Slurm ended job 7 at its time limit of 1-00:00:00"
