"""Who launched a run, as far as it can be seen from somewhere; leftovers that are real are in tests/cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from test_rundir import make_plan

from executor.folder import rundir
from executor.run import reap
from executor.system import processes
from planner.basics.errors import PlannerError
from planner.spec import Layout


def ended() -> str:
    """The identity of a process that is not a more."""
    child = subprocess.Popen(["true"])
    identity = processes.identity(child.pid)
    child.wait()
    return identity


def test_a_process_is_known_by_its_number_and_its_start():
    me = processes.identity()
    pid, _, start = me.partition(":")

    assert processes.alive(me) and int(start) > 0
    assert not processes.alive(f"{pid}:{int(start) + 1}")  # the number was used again
    assert not processes.alive(ended())
    assert not processes.alive("nobody")


def test_a_launcher_is_alive_or_gone_only_where_that_can_be_seen(tmp_path, monkeypatch):
    (tmp_path / "machine-id").write_text("this machine")  # a container may have none
    monkeypatch.setattr(reap, "MACHINE_ID", tmp_path / "machine-id")
    here = reap.this_launcher("run", in_namespaces=False)
    replace = msgspec.structs.replace

    assert reap.seen(here) == "alive"
    assert reap.seen(replace(here, process=ended())) == "gone"
    assert reap.seen(replace(here, namespace="pid:[1]")) == "elsewhere"  # another container of this machine
    assert reap.seen(replace(here, boot="another")) == "gone"  # this machine was started anew
    assert reap.seen(replace(here, boot="another", host="another")) == "elsewhere"
    assert reap.seen(replace(here, boot="another", machine="another")) == "elsewhere"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rundir.create(tmp_path / "run", make_plan(Layout(engine="ddp", dp_replicate=2)), {})
    (tmp_path / "run" / "metrics.jsonl").write_text('{"step": 0, "loss": 6.5}\n')
    return tmp_path / "run"


def launched(folder: Path, **changed: str) -> None:
    launcher = reap.this_launcher("a-run-of-nobody", in_namespaces=False)
    rundir.write_json(folder / rundir.LAUNCHER, msgspec.structs.replace(launcher, **changed))


def test_a_run_whose_launcher_lives_runs_and_one_elsewhere_is_left_alone(folder):
    launched(folder)
    assert reap.standing(folder) == reap.Standing("running", "0 processes", processes=0)

    launched(folder, namespace="pid:[1]", process=ended())
    stands = reap.standing(folder)
    assert stands.status == "running" and "not visible from here" in stands.message
    assert rundir.read_record(folder) is None


def test_a_run_whose_launcher_is_gone_is_written_down_once_with_what_it_had(folder):
    launched(folder, process=ended())
    seen = reap.standing(folder)
    assert (seen.status, seen.exit_code) == ("launcher lost", 7)
    assert seen.message.endswith(f"was killed; executor stop {folder} ends its remaining processes")
    assert rundir.read_record(folder) is None  # asking writes nothing

    first = reap.buried(folder)

    assert (first.status, first.exit_code) == ("launcher lost", 7) and first.message.endswith("was killed")
    record = rundir.read_record(folder)
    assert record is not None and record.losses == (6.5,)
    assert reap.standing(folder) == first


def test_a_folder_of_an_earlier_version_is_told_without_a_launcher_and_one_half_made_is_said_to_be(folder):
    assert reap.standing(folder) == reap.Standing("ended without a record", "its launcher was killed")
    (folder / ".lock").touch()
    half = "its launcher was killed while it made the folder: delete it"
    assert reap.standing(folder) == reap.Standing("ended without a record", half)


def test_ending_processes_asks_first_and_then_does_not(tmp_path):
    script = (
        "import signal, time, sys; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(1, flush=True); time.sleep(99)"
    )
    env = {processes.RUN_ID_VARIABLE: f"deaf-{os.getpid()}", "PATH": os.environ["PATH"]}
    deaf = subprocess.Popen([sys.executable, "-c", script], env=env, stdout=subprocess.PIPE)
    assert deaf.stdout is not None and deaf.stdout.read(1) == b"1"

    told = processes.end(lambda: processes.processes_of(f"deaf-{os.getpid()}"), grace_s=0.3)

    assert told == {deaf.pid} and deaf.wait(timeout=30) == -9


def test_a_launcher_that_lives_is_asked_to_end_and_what_it_could_not_write_is_written(folder):
    lock = folder / ".lock"
    lock.touch()
    with lock.open() as opened:
        launcher = subprocess.Popen(["sleep", "60"], stdin=opened)
    try:
        launched(folder, process=processes.identity(launcher.pid))
        told: list[tuple[Path, str]] = []
        assert reap.stop(folder, 60.0, lambda *asked: told.append(asked) or []).status == "launcher lost"
        assert launcher.wait(60) == -signal.SIGTERM and told == []  # it had no hosts

        rundir.write_json(folder / rundir.HOSTS, {})
        (folder / rundir.RECORD).unlink()
        reap.stop(folder, 60.0, lambda *asked: told.append(asked) or ["2 processes on red ended"])
        record = rundir.read_record(folder)
        assert told == [(folder, "a-run-of-nobody")]
        assert record is not None and record.message.endswith("was killed; 2 processes on red ended")
        assert record.launcher == "ssh"
    finally:
        launcher.kill()
        launcher.wait()


@pytest.mark.parametrize(
    ("changed", "why"),
    [({"namespace": "pid:[1]"}, "was not started here"), ({}, "as its launcher, which does not hold its lock")],
)
def test_a_launcher_that_is_elsewhere_or_not_of_this_run_is_not_ended(folder, changed, why):
    (folder / ".lock").touch()
    launched(folder, **changed)
    with pytest.raises(PlannerError, match=why) as refused:
        reap.stop(folder, 60.0)
    assert refused.value.exit_code == 3 and rundir.read_record(folder) is None
