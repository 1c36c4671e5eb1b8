"""What befalls a run from outside is told for what it is, with its exit code, and nothing is left half-written.

Each fault is real: a small tmpfs that fills up, a mapped file that is cut short, a control group that runs out, a run
folder that is deleted, a launcher that is killed. Not here: ranks that fail or lose each other (test_launch.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from drive import NoFiles, small_plan
from test_launch import NAMESPACES, PROJECT, both_wait, left_by, record, run_id, start
from waiting import PATIENCE_S, until

from executor.folder import rundir
from executor.launchers import namespaces
from executor.run import launch, reap
from executor.system import processes
from executor.system.processes import processes_of
from planner.basics.errors import PlannerError

ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="mounting a file system needs root")
CGROUP = Path("/sys/fs/cgroup/memory")


def broken(behaviour: str, folder: Path, *before: str) -> subprocess.CompletedProcess[str]:
    """A run of one node whose rank 1 breaks something; `before` goes before its command line."""
    command = [sys.executable, "-m", "tests.cluster.drive", behaviour, str(folder), "1", "loopback", "60"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
    command += ["tests.cluster.faulty"]
    return subprocess.run(
        [*before, *command], cwd=PROJECT, env=env, text=True, capture_output=True, timeout=PATIENCE_S, check=False
    )


def status(folder: Path, word: str = "status") -> str:
    """What `executor status`, or another command, says, as its own process."""
    command = [sys.executable, "-m", "executor.cli", word, str(folder)]
    return subprocess.run(command, cwd=PROJECT, text=True, capture_output=True, check=True).stdout


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own with 1 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(place)], check=True)
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@ROOT
def test_a_disk_that_fills_up_fails_the_training_and_the_record_says_so(small_disk):
    folder = small_disk / "run"
    done = broken("fill", folder)

    assert done.returncode == 5, done.stderr
    found = record(folder)
    assert (found["status"], found["exit_code"], found["cause"]) == ("training failed", 5, "disk full")
    assert str(found["message"]).startswith(f"no space is left on the disk of {folder}")
    assert status(folder).startswith("training failed: no space is left")
    assert not list(folder.rglob("*.tmp")) and processes_of(run_id(folder)) == []


@ROOT
def test_a_disk_without_room_for_a_run_is_refused_and_no_folder_is_left(small_disk, tmp_path):
    (tmp_path / "data.txt").write_text("x" * 99)
    options = launch.RunOptions(run_dir=small_disk / "run", nodes=1, trainer="tests.cluster.faulty")
    ready = launch.prepare(small_plan(tmp_path / "data.txt"), options, print, NoFiles())
    (small_disk / "others").write_bytes(bytes(900_000))

    with pytest.raises(PlannerError, match="No space left on device") as caught:
        launch.execute(ready, print)

    assert caught.value.exit_code == 3
    assert [path.name for path in small_disk.iterdir()] == ["others"]


@ROOT
def test_a_record_that_finds_no_room_at_all_changes_neither_verdict_nor_exit_code(small_disk):
    folder = small_disk / "run"
    done = broken("fill all", folder)

    assert done.returncode == 5, done.stderr
    assert json.loads(done.stdout)["message"].startswith(f"no space is left on the disk of {folder}")
    assert "run.json could not be written (cannot be written (No space left on device))" in done.stderr
    assert not (folder / "run.json").exists()


@pytest.fixture
def leftovers() -> Iterator[tuple[int, str]]:
    """What a launcher that is dead left: a process of its run, and a network namespace (where these can be made)."""
    ended = subprocess.Popen(["true"])
    dead = processes.identity(ended.pid)
    ended.wait()
    env = {processes.RUN_ID_VARIABLE: "a-dead-run", processes.LAUNCHER_VARIABLE: dead, "PATH": os.environ["PATH"]}
    orphan = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=env)
    namespace = namespaces.namespace(ended.pid, 0)
    subprocess.run(["ip", "netns", "add", namespace], check=False, capture_output=True)
    yield orphan.pid, namespace
    orphan.kill()
    orphan.wait()
    subprocess.run(["ip", "netns", "del", namespace], check=False, capture_output=True)


def test_a_run_folder_that_is_deleted_is_told_and_a_run_first_ends_what_dead_launchers_left(tmp_path, leftovers):
    orphan, namespace = leftovers
    until(lambda: orphan in processes.orphans(), "the leftover process")
    folder = tmp_path / "run"
    done = broken("delete", folder)

    assert processes.orphans() == [] and not (namespaces.NAMES / namespace).exists()

    assert done.returncode == 5, done.stderr
    said = json.loads(done.stdout)
    assert said["message"] == f"{folder} was deleted while the run was under way, so nothing of it is kept"
    assert said["cause"] == "folder deleted"


def test_a_data_file_that_is_cut_short_is_named_beside_the_signal(tmp_path):
    folder = tmp_path / "run"
    done = broken("cut", folder)

    assert done.returncode == 5, done.stderr
    found = record(folder)
    data = tmp_path / "behaviour.txt"
    assert f"killed by SIGBUS: data={data} was cut short while the run read it, from" in str(found["message"])
    assert (found["failed_rank"], found["cause"]) == (1, "input changed")


@pytest.fixture
def small_group() -> Iterator[Path]:
    """A memory control group of 1 GiB (version 1)."""
    group = CGROUP / f"meshwright-test-{os.getpid()}"
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(2**30))
    except OSError as error:
        pytest.skip(f"no memory control group of version 1 can be made here ({error.strerror})")
    yield group
    group.rmdir()


def inside(group: Path) -> tuple[str, ...]:
    return "sh", "-c", f'echo $$ > {group}/cgroup.procs && exec "$@"', "sh"


def test_the_out_of_memory_killer_is_known_by_its_counter(tmp_path, small_group):
    folder = tmp_path / "run"
    done = broken("eat", folder, *inside(small_group))

    assert done.returncode == 5, done.stderr
    found = record(folder)
    assert "rank 1 on" in str(found["message"])
    assert str(found["message"]).endswith("killed by SIGKILL of the kernel's out-of-memory killer")
    assert found["cause"] == "out-of-memory killer"


@pytest.mark.long
def test_an_agent_that_the_out_of_memory_killer_took_is_no_lost_node(tmp_path, small_group):
    (small_group / "memory.limit_in_bytes").write_text(str(90 * 2**20))
    done = broken("eat", tmp_path / "run", *inside(small_group))

    assert done.returncode == 4, done.stderr
    assert "was killed by SIGKILL of the kernel's out-of-memory killer" in str(record(tmp_path / "run")["message"])


@NAMESPACES
def test_what_a_killed_launcher_left_is_named_by_status_and_ended_by_stop_which_writes_down_how_the_run_ended(tmp_path):
    folder = tmp_path / "run"
    process = start("wait deaf", folder, hosts="namespaces")
    both_wait(folder)
    assert namespaces.reap_stale() == []
    assert status(folder).startswith("running: ") and left_by(process.pid) != []

    process.kill()
    process.wait()
    assert status(folder).endswith(f"was killed; executor stop {folder} ends its remaining processes\n")
    assert not (folder / "run.json").exists()
    said = status(folder, "stop")

    assert said.startswith(f"launcher lost: its launcher (process {process.pid} on ")
    assert "; ended its remaining " in said and "its network" in said
    assert left_by(process.pid) == [] and processes_of(run_id(folder)) == []
    found = record(folder)
    assert (found["status"], found["exit_code"], found["cause"]) == ("launcher lost", 7, "launcher lost")
    assert status(folder) == said
    launcher = rundir.read_launcher(folder)
    assert launcher is not None and reap.seen(launcher) == "gone"
    until(lambda: processes_of(run_id(folder)) == [], "the ranks to end")
