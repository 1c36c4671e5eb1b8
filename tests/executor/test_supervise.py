"""The parts of supervision that need no ranks: log following, processes of a run, port choice, emulated nodes.

Not here: whom to blame (test_failures.py), or what an end is called (test_verdict.py).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
from pathlib import Path

import pytest
from sleepers import sleeper

from executor.hosts import remote
from executor.launchers import local
from executor.system import processes
from executor.watch import supervise
from planner.basics.errors import PlannerError


def rank_log(folder: Path, node: int, local_rank: int, text: str, stream: str = "stderr") -> Path:
    path = folder / "logs" / f"node-{node}" / "id_x" / "attempt_0" / str(local_rank) / f"{stream}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_following_a_log_prefixes_folds_and_waits_for_whole_lines(tmp_path):
    said: list[str] = []
    follower = supervise.LogFollower(tmp_path, (supervise.Followed(0, 0, "node-0:0"),), said.append)
    follower.poll()  # no log yet
    path = rank_log(tmp_path, 0, 0, "one\nsame\nsame\nsame\nhal", "stdout")
    follower.poll()
    with path.open("a") as stream:
        stream.write("f\nend")
    follower.poll()
    assert said == ["node-0:0  one", "node-0:0  same", "node-0:0  (last line repeated x2)", "node-0:0  half"]
    follower.poll(final=True)
    assert said[-1] == "node-0:0  end"


def test_processes_of_a_run_are_found_by_its_id_alone():
    started = sleeper({processes.RUN_ID_VARIABLE: "test-run-a1", "PATH": os.environ["PATH"]})
    try:
        assert processes.processes_of("test-run-a1") == [started.pid]
        assert processes.processes_of("test-run-a") == []
    finally:
        started.kill()
        started.wait()


def test_signals_are_collected_inside_and_restored_after():
    before = signal.getsignal(signal.SIGTERM)
    with supervise.received_signals() as signals:
        os.kill(os.getpid(), signal.SIGTERM)
    assert signals == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_taken_port_is_passed_over_and_the_chosen_one_is_held():
    hosts = local.describe(1, "loopback")
    wanted = local.hold_port(hosts, "run")
    wanted.close()
    with socket.socket() as thief:
        thief.bind(("127.0.0.1", wanted.number))
        thief.listen()
        other = local.hold_port(hosts, "run")
        assert other.number != wanted.number
        with socket.socket() as late:
            assert late.connect_ex(("127.0.0.1", other.number)) != 0
            try:
                late.bind(("", other.number))
                raise AssertionError("a held port could be bound")
            except OSError:
                pass
        other.close()


def test_a_port_that_a_host_keeps_cannot_be_taken_before_its_run_starts():
    port = remote.look({"keep": True})["port"]
    for reuse in (0, 1):
        with socket.socket() as thief:
            thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
            with pytest.raises(OSError, match="in use"):
                thief.bind(("127.0.0.1", port))
    local.hold_one(port).close()
    with socket.socket() as next_one:
        next_one.bind(("127.0.0.1", port))


def test_a_named_port_that_only_ended_connections_still_have_is_not_taken():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)), server.accept()[0] as first_to_close:
            first_to_close.close()
        with pytest.raises(PlannerError, match="is taken on this host"):
            local.hold_one(port)
    with socket.socket() as plain, pytest.raises(OSError, match="in use"):
        plain.bind(("", port))
    local.hold_one(port).close()


def test_a_refused_port_is_not_offered_again():
    hosts = local.describe(2, "namespaces")
    first = local.hold_port(hosts, "run")
    assert local.hold_port(hosts, "run", frozenset({first.number})).number == first.number + 1


def test_emulated_nodes_have_their_own_addresses_and_namespaces_their_own_prefix():
    loopback, spaces = local.describe(2, "loopback"), local.describe(2, "namespaces")
    assert len({host.address for host in loopback.hosts}) == 2 or loopback.hosts[0].address == "127.0.0.1"
    assert [host.address for host in spaces.hosts] == ["10.77.0.1", "10.77.0.2"]
    assert spaces.hosts[1].prefix[:3] == ("ip", "netns", "exec")


@pytest.mark.parametrize("ends", ["a node's supervisor", "a host's end of a connection"])
def test_a_node_ends_its_own_processes_and_none_of_another_node_in_its_pid_namespace(monkeypatch, ends):
    run = f"test-two-nodes-{os.getpid()}"
    monkeypatch.setenv(processes.RUN_ID_VARIABLE, run)
    with subprocess.Popen(["sleep", "60"]) as other_supervisor:
        owners = (processes.identity(), processes.identity(other_supervisor.pid))
        mine, others = (  # a node's own is a child of its supervisor, which reaps it
            sleeper(os.environ | {processes.LAUNCHER_VARIABLE: owner}) for owner in owners
        )
        try:
            if ends == "a node's supervisor":
                supervise.tear_down([], run, grace_s=10)
            else:
                remote.end_children()
            assert processes.processes_of(run, owners[0]) == [] and processes.processes_of(run, owners[1]) == [
                others.pid
            ]
        finally:
            for one in (mine, others, other_supervisor):
                one.kill()
                one.wait()
