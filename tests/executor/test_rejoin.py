"""Whose start a run folder is of that its nodes join: words, claims, and what is put aside. Not here: real nodes
(tests/cluster/test_rejoin.py)."""

from __future__ import annotations

import json
import os
import threading
from contextlib import nullcontext
from pathlib import Path

import pytest
from kept import checkpoint, record
from msgspec.structs import replace
from test_cli import assert_refused, plan_file, run  # noqa: F401 (plan_file is a fixture)
from test_ownership import holder

from executor.folder import joining, rundir
from executor.folder.checkpoint_policy import CheckpointSchedule
from executor.folder.joining import Joined
from executor.run import attempts, join, rejoin, resume
from executor.run.dryrun import dry_run, write
from executor.run.prepare import RunOptions
from planner.basics.errors import PlannerError
from planner.spec.plan import read_plan


@pytest.fixture
def folder(plan_file: Path, tmp_path: Path) -> Path:  # noqa: F811
    """A run of two nodes that writes checkpoints, to which none has come."""
    plan = read_plan(plan_file)
    job = replace(plan.job, recipe=replace(plan.job.recipe, steps=40))
    plan = replace(plan, job=job, cluster=replace(plan.cluster, nodes=2, gpus_per_node=1)).sealed()
    options = RunOptions(
        run_dir=tmp_path / "run", nodes=2, hosts="elsewhere", checkpoints=CheckpointSchedule(every="10")
    )
    write(dry_run(plan, options, lambda _: None, read_back=False), tmp_path / "run")
    return tmp_path / "run"


def begun(folder: Path, *steps: int) -> None:
    """What a start leaves: claims of its nodes, and checkpoints after these steps."""
    for node in (0, 1):
        joining.claim(folder, Joined(node=node, host="red", process="1:1"))
    (folder / "checkpoints").mkdir(exist_ok=True)
    for step in steps:
        checkpoint(folder, step, rundir.read_run_plan(folder))


def ready(folder: Path, node: int, word: str, wait_s: float = 0.0) -> list[str]:
    """What is said until the folder is this start's."""
    said: list[str] = []
    rejoin.ready(folder, node, word, wait_s, said.append)
    return said


def test_ranks_that_write_a_last_checkpoint_have_longer_for_it_than_others_but_not_than_slurm_gives(folder):
    spec = rundir.read_launch(folder)
    assert spec is not None
    assert spec.commands[0].argv[spec.commands[0].argv.index("--shutdown-timeout") + 1] == "20"


def test_a_first_start_gives_the_folder_its_word_and_others_wait_for_that(folder):
    with pytest.raises(PlannerError, match=r"start=7\.0\.0: node 0 has not made .* ready for it after 0 s") as caught:
        ready(folder, 1, "7.0.0")
    assert caught.value.exit_code == 4
    waiting = threading.Thread(target=lambda: (ready(folder, 1, "7.0.0", 60), came.append(1)))
    came: list[int] = []
    waiting.start()
    before = joining.read(folder)

    assert ready(folder, 0, "7.0.0") == []
    waiting.join(60)
    assert came == [1] and joining.read(folder) == replace(before, start="7.0.0")
    assert not (folder / "attempts").exists()


@pytest.mark.parametrize("writes", [False, True])
@pytest.mark.parametrize("node", [0, 1])
def test_a_node_that_comes_first_keeps_none_out_but_node_0_of_a_start_that_puts_aside(folder, writes, node):
    """Slurm gives every start a word. The first nodes to come to a run without checkpoints may be any."""
    if not writes:
        joining.write(folder, replace(joining.read(folder), checkpoints=None))
    other = holder(folder, shared=True)
    try:
        if writes and node == 1:
            joining.write(folder, replace(joining.read(folder), start="7.0.0"))
        refused = pytest.raises(PlannerError, match="is in use by process")
        asked = join.NodeRequest(node=node, start="7.0.0", meet_s=0.1)
        with refused if writes and node == 0 else nullcontext(), join._held(folder, asked, lambda _: None):
            pass
    finally:
        other.kill()
        other.wait()


def test_another_word_goes_on_from_the_newest_whole_checkpoint(folder):
    ready(folder, 0, "7.0.0")
    first = joining.read(folder)
    begun(folder, 10, 20)
    (folder / "checkpoints" / "step-20" / "rank-0.safetensors").write_bytes(b"numberz")

    said = ready(folder, 0, "7.1.0")
    assert "resuming after step 10" in said[-1] and "skipped checkpoint step-20" in said[0]
    found = joining.read(folder)
    assert (found.start, found.resume) == ("7.1.0", "checkpoints/step-10") and found.run_id != first.run_id
    assert not joining.read_joined(folder) and (folder / "config").is_dir()
    ready(folder, 1, "7.1.0")
    with pytest.raises(PlannerError, match=r"start=7\.0\.0"):
        ready(folder, 1, "7.0.0")


def test_a_start_of_the_same_word_as_the_last_is_another_where_its_nodes_had_come(folder):
    """Addresses of machines may come again."""
    ready(folder, 0, "task 10.0.0.1")
    begun(folder)
    with pytest.raises(PlannerError, match="node 0 has not made"):
        ready(folder, 1, "task 10.0.0.1")
    assert "from the beginning" in ready(folder, 0, "task 10.0.0.1")[-1]
    ready(folder, 1, "task 10.0.0.1")


def test_a_start_that_was_killed_while_it_put_things_aside_is_made_up_for(folder):
    ready(folder, 0, "7.0.0")
    begun(folder, 10)
    attempts.set_aside(folder, 10)
    assert not (folder / "join.json").exists()

    ready(folder, 0, "7.1.0")
    assert joining.read(folder).resume == "checkpoints/step-10"


def test_what_has_completed_is_refused_by_every_node_and_what_writes_no_checkpoint_has_one_start(folder):
    ready(folder, 0, "7.0.0")
    begun(folder, 10)
    rundir.write_json(folder / rundir.RECORD, record("completed", 0))
    for node in (0, 1):
        with pytest.raises(PlannerError, match="has completed: there is nothing to resume"):
            ready(folder, node, "7.1.0")
    joining.write(folder, replace(joining.read(folder), checkpoints=None))
    for node in (0, 1):
        assert ready(folder, node, "7.1.0") == []
    assert not (folder / "attempts").exists()


@pytest.mark.slow
def test_resume_makes_the_folder_ready_once_and_says_what_to_type(folder, tmp_path):
    begun(folder, 10)
    rundir.write_json(folder / rundir.RECORD, record("training failed", 5))
    assert resume.launcher_of(folder) == "join"
    (folder / "asked.json").unlink()  # made by an earlier version

    for _ in range(2):
        done = run("resume", folder, "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert found["resumed_from"] == 10 and found["join"][1].startswith(f"executor join {folder} --node-rank 1")
        wanted = joining.read(folder)
        assert (wanted.resume, wanted.start, wanted.checkpoints) == (
            "checkpoints/step-10",
            None,
            CheckpointSchedule(every="10"),
        )
        assert sorted(os.listdir(folder / "attempts")) == ["1"]
    assert attempts.read(folder)[0].status == "training failed"
    assert_refused(run("resume", folder, "--max-restarts", "1", cwd=tmp_path), 2, "--max-restarts applies to runs here")
    assert_refused(run("resume", folder, "--sbatch", "time=1", cwd=tmp_path), 2, "--sbatch applies to runs of Slurm")
