"""The parts of supervision that need no ranks: whom to blame, log following, port choice, what is passed on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from executor import supervise
from executor.launchers import local


def rank_log(folder: Path, node: int, local_rank: int, text: str, stream: str = "stderr") -> Path:
    path = folder / "logs" / f"node-{node}" / "id_x" / "attempt_0" / str(local_rank) / f"{stream}.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def agent_saw(folder: Path, node: int, *failures: tuple[int, int, int, float]) -> None:
    (folder / "failed").mkdir(exist_ok=True)
    named = [dict(zip(("rank", "local_rank", "exit_code", "time"), one, strict=True)) for one in failures]
    (folder / "failed" / f"node-{node}.json").write_text(json.dumps({"failures": named}))


def test_a_rank_that_lost_its_peer_is_not_blamed_even_when_it_ended_first(tmp_path):
    now = time.time()
    log = rank_log(tmp_path, 0, 0, "RuntimeError: [pair.cc:553] Connection closed by peer [10.0.0.2]:1\n")
    os.utime(log, (now - 10, now - 10))
    rank_log(tmp_path, 1, 0, "Traceback (most recent call last):\nValueError: nan in the data\n")
    agent_saw(tmp_path, 0, (0, 0, 1, now - 10))
    agent_saw(tmp_path, 1, (1, 0, 1, now))

    failure = supervise.first_failure(tmp_path, ranks_per_node=1)

    assert failure is not None
    assert (failure.rank, failure.message, failure.collateral) == (1, "ValueError: nan in the data", False)


def test_a_ranks_own_words_come_before_its_log_and_carry_its_exit_code(tmp_path):
    rank_log(tmp_path, 0, 1, "some other line\n")
    agent_saw(tmp_path, 0, (1, 1, 3, time.time()))
    (tmp_path / "failed" / "rank-1.json").write_text(
        '{"schema": "failed/1", "rank": 1, "exit_code": 3, "message": "no data."}'
    )

    failure = supervise.first_failure(tmp_path, ranks_per_node=2)

    assert failure is not None and (failure.rank, failure.message, failure.exit_code) == (1, "no data.", 3)


def test_a_signal_names_itself_and_nothing_known_blames_nobody(tmp_path):
    assert supervise.first_failure(tmp_path, ranks_per_node=1) is None
    agent_saw(tmp_path, 0, (0, 0, -15, 5.0), (1, 1, -9, 6.0))

    failure = supervise.first_failure(tmp_path, ranks_per_node=2)

    assert failure is not None and failure.rank == 1 and "SIGKILL" in failure.message


def test_the_last_error_line_of_a_log(tmp_path):
    log = tmp_path / "stderr.log"
    log.write_text("[rank1]: Traceback\n[rank1]: torch.cuda.OutOfMemoryError: no room\n[rank1]:   hint\n\n")
    assert supervise.last_error_line(log) == "torch.cuda.OutOfMemoryError: no room"
    log.write_text("nothing special\nlast words\n\n")
    assert supervise.last_error_line(log) == "last words"
    log.write_text("")
    assert supervise.last_error_line(log) is None


def test_following_a_log_prefixes_folds_and_waits_for_whole_lines(tmp_path):
    said: list[str] = []
    follower = supervise.LogFollower(tmp_path, "node-0", said.append)
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
    env = {supervise.RUN_ID_VARIABLE: "test-run-a1", "PATH": os.environ["PATH"]}
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], env=env)
    try:
        deadline = time.monotonic() + 20
        while supervise.processes_of("test-run-a1") != [sleeper.pid]:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert supervise.processes_of("test-run-a") == []
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


def test_only_the_allow_list_is_inherited():
    given = {
        "PATH": "/bin",
        "NCCL_DEBUG": "INFO",
        "NCCL_AUTH_TOKEN": "t",
        "AWS_SECRET_ACCESS_KEY": "s",
        "HF_TOKEN": "h",
        "LC_ALL": "C",
    }
    assert local.inherited(given) == {"PATH": "/bin", "NCCL_DEBUG": "INFO", "LC_ALL": "C"}
    assert local.is_secret("WANDB_API_KEY") and not local.is_secret("TOKENIZERS_PARALLELISM")


def test_emulated_nodes_have_their_own_addresses_and_namespaces_their_own_prefix():
    loopback, spaces = local.describe(2, "loopback"), local.describe(2, "namespaces")
    assert len({host.address for host in loopback.hosts}) == 2 or loopback.hosts[0].address == "127.0.0.1"
    assert [host.address for host in spaces.hosts] == ["10.77.0.1", "10.77.0.2"]
    assert spaces.hosts[1].prefix[:3] == ("ip", "netns", "exec")
