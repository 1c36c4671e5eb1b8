"""The parts of supervision that need no ranks: log following, processes of a run, port choice, emulated nodes.

Not here: whom to blame (test_failures.py), or what an end is called (test_verdict.py).
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from executor import processes, supervise
from executor.launchers import local


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
    env = {processes.RUN_ID_VARIABLE: "test-run-a1", "PATH": os.environ["PATH"]}
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env)
    try:
        deadline = time.monotonic() + 20
        while processes.processes_of("test-run-a1") != [sleeper.pid]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert processes.processes_of("test-run-a") == []
    finally:
        sleeper.kill()
        sleeper.wait()


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


def test_a_refused_port_is_not_offered_again():
    hosts = local.describe(2, "namespaces")
    first = local.hold_port(hosts, "run")
    assert local.hold_port(hosts, "run", frozenset({first.number})).number == first.number + 1


def test_emulated_nodes_have_their_own_addresses_and_namespaces_their_own_prefix():
    loopback, spaces = local.describe(2, "loopback"), local.describe(2, "namespaces")
    assert len({host.address for host in loopback.hosts}) == 2 or loopback.hosts[0].address == "127.0.0.1"
    assert [host.address for host in spaces.hosts] == ["10.77.0.1", "10.77.0.2"]
    assert spaces.hosts[1].prefix[:3] == ("ip", "netns", "exec")
