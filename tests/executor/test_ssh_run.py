"""Files and messages of a run on other hosts, without the hosts: what a node sends is what the launcher keeps.

Not here: real hosts (tests/cluster/test_ssh.py).
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from scripted import Agents

from executor.folder.checkpoint_policy import CheckpointSchedule
from executor.hosts import ssh_run
from executor.hosts.hosts import HostEntry
from executor.hosts.node import CHUNK_BYTES, OWNER, Mirror, remove_stale
from executor.hosts.remote import LauncherConnection
from executor.hosts.ssh import Connections
from executor.run.prepare import RunOptions
from executor.system import frames
from executor.system.processes import identity
from executor.watch.supervise import CHECKPOINT_S


@pytest.fixture
def run(tmp_path: Path, agents: Agents) -> ssh_run._SshRun:
    """A launcher's side of a run whose folder is there, before any host is asked."""
    machines = (HostEntry("red"),)
    ready = ssh_run.prepare(agents.plan(), RunOptions(tmp_path / "kept", 1), machines, print)
    (tmp_path / "kept").mkdir()
    said: list[str] = []
    made = ssh_run._SshRun(ready, machines, Connections(machines, said.append), said.append, "127.0.0.1:20000")
    made.said = said  # type: ignore[attr-defined]
    return made


def sent(mirror: Mirror, out: io.BytesIO, run: ssh_run._SshRun, endings: tuple[str, ...] = ("",)) -> list[str]:
    """What a node sends now, kept by the launcher; the names of the parts."""
    out.seek(0)
    out.truncate()
    mirror.send(endings)
    out.seek(0)
    names = []
    while (came := frames.read(out)) is not None:
        run._store(0, *came)
        names.append(str(came[0]["name"]))
    return names


def test_what_a_node_writes_is_what_the_launcher_keeps(tmp_path, run):
    there, out = tmp_path / "there", io.BytesIO()
    (there / "weights").mkdir(parents=True)
    mirror = Mirror(there, LauncherConnection(io.BytesIO(), out), frozenset(["plan.json"]))
    for name in ("plan.json", ".hidden", "half.tmp"):
        (there / name).write_text("x")
    (there / "metrics.jsonl").write_text("one\n")
    (there / "mesh.json").write_text("{}")
    big = os.urandom(2 * CHUNK_BYTES + 7)
    (there / "weights" / "model.safetensors").write_bytes(big)

    (there / "alive").mkdir()
    (there / "alive" / "rank-0").write_text("step 1")
    (there / "alive" / "rank-0.stacks").touch()

    assert sent(mirror, out, run, (".json", ".jsonl")) == ["alive/rank-0", "mesh.json", "metrics.jsonl"]
    assert sent(mirror, out, run, (".json", ".jsonl")) == []
    with (there / "metrics.jsonl").open("a") as lines:
        lines.write("two\n")
    (there / "mesh.json").write_text('{"rank": 1}')
    (there / "empty.json").touch()
    assert sent(mirror, out, run) == [
        "alive/rank-0.stacks", "empty.json", "mesh.json", "metrics.jsonl", *["weights/model.safetensors"] * 3
    ]  # fmt: skip

    kept = {path.relative_to(run.folder).as_posix(): path.read_bytes() for path in run.folder.rglob("*.*")}
    assert kept == {
        "alive/rank-0.stacks": b"",
        "empty.json": b"",
        "mesh.json": b'{"rank": 1}',
        "metrics.jsonl": b"one\ntwo\n",
        "weights/model.safetensors": big,
    }


@pytest.mark.parametrize(
    "name",
    ["../x", "/etc/x", "a/../../x", "plan.json", "run.json", "./plan.json", ".hidden", "a\nb", "", "a/" * 20 + "b"],
)
def test_a_host_writes_nothing_beside_the_files_of_its_ranks(tmp_path, run, name):
    before = sorted(tmp_path.rglob("*"))
    run._store(0, {"kind": "file", "name": name, "at": 0, "grows": False, "last": True}, b"x")

    assert sorted(tmp_path.rglob("*")) == before
    assert run.said[-1].startswith("note: red sent a file of another name than a run's: ")


def test_a_file_that_did_not_come_whole_is_not_there_under_its_name(run):
    run._store(0, {"kind": "file", "name": "weights/a", "at": 0, "grows": False, "last": False}, b"half")

    assert [path.name for path in (run.folder / "weights").iterdir()] == ["a.part"]


def test_folders_of_nodes_that_no_longer_live_are_removed_and_others_kept(tmp_path):
    ended = subprocess.Popen(["true"])
    gone = identity(ended.pid)
    ended.wait()
    host = os.uname().nodename
    for name, owner in (("old", f"{host} {gone}"), ("mine", f"{host} {identity()}"), ("other", f"elsewhere {gone}")):
        (tmp_path / name / "node-0").mkdir(parents=True)
        (tmp_path / name / f"node-0.{OWNER}").write_text(owner)

    assert remove_stale(tmp_path) == ["old"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "other"]


@pytest.mark.parametrize("said", [b"", b'{"kind": "beat"}', b'{"kind": "file", "bytes": 5}\nabc'])
def test_a_message_that_is_cut_short_is_the_end(said):
    assert frames.read(io.BytesIO(said)) is None


@pytest.mark.parametrize(
    "said", [b"welcome\n", b"[1]\n", b'{"bytes": -1}\n', b'{"bytes": 99999999999}\n', b'{"bytes": "x"}\n']
)
def test_what_is_no_message_is_refused(said):
    with pytest.raises(ValueError, match="message"):
        frames.read(io.BytesIO(said))


def test_a_scheduler_s_first_signal_gives_nodes_the_time_for_a_checkpoint_where_they_write_any(run):
    def patience_s(*signals: int) -> float:
        return run._patience_s(signals)

    assert patience_s(signal.SIGTERM) == patience_s(signal.SIGINT) == ssh_run.STOP_S
    run.ready = replace(run.ready, options=replace(run.ready.options, checkpoints=CheckpointSchedule(every="20")))
    assert patience_s(signal.SIGTERM) == patience_s(signal.SIGUSR1) == ssh_run.STOP_S + CHECKPOINT_S
    assert patience_s(signal.SIGINT) == patience_s(signal.SIGTERM, signal.SIGTERM) == ssh_run.STOP_S
