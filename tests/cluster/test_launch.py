"""The launcher with real torchrun agents over gloo: how runs end, who is blamed, and that nothing is left behind.

Not here: training (a stand-in rank is run) or the pure parts of the executor (tests/executor).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from drive import NoFiles, small_plan
from waiting import PATIENCE_S, until

from executor.backends.accelerate import CONFIG, AccelerateBackend
from executor.backends.common import in_a_process
from executor.folder import rundir
from executor.launchers import local, namespaces
from executor.run import launch
from executor.system.processes import processes_of
from executor.watch.supervise import tear_down
from planner.parallelism.backend import LaunchSpec, NodeCommand
from planner.spec.plan import read_plan

PROJECT = Path(__file__).parents[2]
NAMESPACES = pytest.mark.skipif(
    namespaces.unusable() is not None, reason=f"no network namespaces: {namespaces.unusable()}"
)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path / "run"
    for pid in processes_of(run_id(tmp_path / "run")):  # a failed test must not leave its ranks to the next one
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def start(behaviour: str, folder: Path, *, hosts: str = "loopback", meet_s: float = 60) -> subprocess.Popen[str]:
    """The launcher as a process of its own, in a process group of its own."""
    command = [sys.executable, "-m", "tests.cluster.drive", behaviour, str(folder), "2", hosts, str(meet_s)]
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_TOKEN": "hf-do-not-pass-on", "PYTHONPATH": str(PROJECT)}
    return subprocess.Popen(
        command, cwd=PROJECT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for the launcher; its stderr."""
    return process.communicate(timeout=PATIENCE_S)[1]


def run_id(folder: Path) -> str:
    launch = folder / "launch.json"
    return json.loads(launch.read_text())["commands"][0]["env"]["MESHWRIGHT_RUN_ID"] if launch.is_file() else "none"


def record(folder: Path) -> dict[str, object]:
    return json.loads((folder / "run.json").read_text())


def both_wait(folder: Path) -> None:
    until(lambda: len(list((folder / "mesh").glob("waiting-*"))) == 2, "both ranks to wait")


@pytest.mark.smoke
def test_two_emulated_nodes_leave_a_whole_record_and_see_no_secret_of_the_caller(folder):
    process = start("finish", folder)
    stderr = finish(process)

    assert process.returncode == 0, stderr
    assert "node-0:0  rank 0 met 2" in stderr
    done = record(folder)
    assert (done["status"], done["exit_code"], done["world_size"], done["nodes"]) == ("completed", 0, 2, 2)
    assert done["plan_hash"] == read_plan(folder / "plan.json").content_hash
    assert {"python", "torch", "meshwright"} <= set(done["versions"])
    for node in (0, 1):
        logs = list((folder / "logs" / f"node-{node}").glob("*/attempt_0/0/stdout.log"))
        assert [log.read_text() for log in logs] == [f"rank {node} met 2\n"]
    assert processes_of(run_id(folder)) == []

    inside = json.loads((folder / "mesh" / "rank-0.json").read_text())["env"]
    assert "PATH" in inside and "HF_TOKEN" not in inside
    assert stat.S_IMODE((folder / "launch.json").stat().st_mode) == 0o600
    assert not [path for path in folder.rglob("*") if path.is_file() and b"hf-do-not-pass-on" in path.read_bytes()]


@pytest.mark.parametrize(
    ("behaviour", "code", "words"),
    [
        pytest.param("kill 1", 5, r"rank 1 on node-1 failed first: killed by SIGKILL", marks=pytest.mark.smoke),
        ("raise 1", 5, r"rank 1 on node-1 failed first: ValueError: the trouble is on rank 1"),
        pytest.param(
            "raise 0", 5, r"rank 0 on node-0 failed first: ValueError: the trouble is on rank 0", marks=pytest.mark.long
        ),
        ("early 1", 4, r"rank 1 on node-1 failed first: ValueError: before the mesh"),
        pytest.param("leave 1", 5, r"rank 1 on node-1 failed first: exit code 9", marks=pytest.mark.long),
        ("alone", 4, r"rank 0 trained in a world of 1, the plan has 2"),
    ],
)
def test_the_rank_that_failed_first_is_named_and_all_others_are_ended(folder, behaviour, code, words):
    process = start(behaviour, folder)
    stderr = finish(process)

    assert process.returncode == code, stderr
    assert record(folder)["exit_code"] == code
    assert re.search(words, record(folder)["message"])
    assert processes_of(run_id(folder)) == []


def test_ranks_that_do_not_meet_in_time_are_a_failed_launch(folder):
    process = start("never", folder, meet_s=12)
    said = finish(process)

    assert process.returncode == 4
    late = "ranks 0, 1 on node-0, node-1"
    assert str(record(folder)["message"]).startswith(f"after 12 s {late} were ")  # on a busy machine not even started
    assert "Look at logs/node-0, logs/node-1, or at its stack" in str(record(folder)["message"])
    assert f"waiting: {late}: importing PyTorch, " in said
    assert processes_of(run_id(folder)) == []


def test_a_port_that_is_taken_between_choosing_and_listening_is_replaced_by_the_next(folder, monkeypatch):
    (folder.parent / "behaviour.txt").write_text("finish\n" + "x" * 40)
    options = launch.RunOptions(run_dir=folder, nodes=2, hosts="loopback", meet_s=60, trainer="tests.cluster.standin")
    said: list[str] = []
    with socket.socket() as thief:
        thief.bind(("", 0))
        thief.listen()
        taken = thief.getsockname()[1]
        choose = local.hold_port

        def choose_the_taken_one_first(hosts, run_id, refused=frozenset()):
            return choose(hosts, run_id, refused) if taken in refused else local.HeldPort(taken, None)

        monkeypatch.setattr(local, "hold_port", choose_the_taken_one_first)
        ready = launch.prepare(small_plan(folder.parent / "behaviour.txt"), options, said.append, NoFiles())
        done = launch.execute(ready, said.append)

    assert done.status == "completed", done.message
    assert f"port {taken} was taken meanwhile, trying the next" in said


def test_a_start_whose_ranks_lose_each_other_is_tried_once_more_with_debugging_on_and_the_first_is_kept(folder):
    (data := folder.with_name("data.txt")).write_text("x" * 99)
    options = launch.RunOptions(run_dir=folder, nodes=1, hosts="loopback", meet_s=60, trainer="tests.cluster.shy")
    said: list[str] = []
    done = launch.run(launch.prepare(small_plan(data), options, said.append, NoFiles()), said.append)

    assert done.status == "completed", done.message
    first = folder / "attempts" / "1"
    assert (record(first)["exit_code"], record(first)["cause"]) == (4, "not met")
    logs = [
        log.with_name("stderr.log") for log in rundir.rank_logs(first)
    ]  # a rank may be ended before it writes its own
    assert any("the other is gone" in log.read_text() for log in logs if log.is_file())
    assert [one.cause for one in done.attempts] == ["not met"]
    assert len([line for line in said if "once more with NCCL_DEBUG and TORCH_DISTRIBUTED_DEBUG on" in line]) == 1

    added = tuple(
        f"{name}={value}" for name, value in {"NCCL_DEBUG": "WARN", "TORCH_DISTRIBUTED_DEBUG": "INFO"}.items()
    )
    asked = replace(options, run_dir=folder.with_name("asked"), env=added)
    done = launch.run(launch.prepare(small_plan(data), asked, said.append, NoFiles()), said.append)
    assert (done.exit_code, done.cause) == (4, "not met") and done.attempts == ()


def test_a_start_that_fails_for_a_reason_that_torch_names_is_not_tried_again(folder):
    (folder.with_name("behaviour.txt")).write_text("finish\n" + "x" * 40)
    env = ("GLOO_SOCKET_IFNAME=nosuch0",)
    options = launch.RunOptions(folder, 2, hosts="loopback", meet_s=60, trainer="tests.cluster.standin", env=env)
    said: list[str] = []
    ready = launch.prepare(small_plan(folder.with_name("behaviour.txt")), options, said.append, NoFiles())
    done = launch.run(ready, said.append)

    assert (done.exit_code, done.cause) == (4, "network"), done.message
    assert "an interface that NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names is not there (" in done.message
    assert done.message.endswith("Leave the variable out, or give the interface on the way to node 0")
    assert done.attempts == ()


def told(answer: CompletedProcess[str]) -> tuple[int, str, str]:
    """An answer without the words that it was asked with."""
    return answer.returncode, answer.stdout, answer.stderr


def test_an_agent_reads_a_configuration_as_a_process_of_its_own_does_and_says_what_is_wrong(tmp_path):
    (good := tmp_path / "good.yaml").write_text(AccelerateBackend().files(small_plan())[CONFIG])
    (bad := tmp_path / "bad.yaml").write_text("mixed_precision: [\n")
    host = local.describe(1, "loopback")
    command = NodeCommand(node=0, argv=(sys.executable, "-m", "executor.worker.agent", "no.py"), env={})
    agents = local.start(LaunchSpec(files={}, commands=(command,)), host, tmp_path, local.HeldPort(0, None))
    try:
        read = local.reader(agents[0], [])
        assert told(read("accelerate", str(good))) == told(in_a_process("accelerate", str(good)))
        refused = read("accelerate", str(bad))
        assert refused.returncode == 1 and refused.stderr.startswith("ParserError: ")
        assert agents[0].process.poll() is None
        agents[0].process.kill()
        assert told(read("accelerate", str(bad))) == told(refused), "an agent that is gone leaves it to a process"
    finally:
        tear_down(agents, "none")


@pytest.mark.parametrize(
    ("number", "code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.smoke), (signal.SIGTERM, 143)]
)
def test_an_interrupt_ends_every_rank_even_one_deaf_to_sigterm(folder, number, code):
    process = start("wait deaf", folder)
    both_wait(folder)
    ranks = processes_of(run_id(folder))
    assert len(ranks) >= 4  # two agents, two ranks

    os.kill(process.pid, number)
    finish(process)

    assert process.returncode == code
    assert (record(folder)["status"], record(folder)["exit_code"]) == ("interrupted", code)
    assert [pid for pid in ranks if Path(f"/proc/{pid}").exists()] == []  # neither running nor zombies


def test_a_killed_agent_is_a_lost_node_and_its_orphaned_rank_is_ended(folder):
    process = start("wait deaf", folder)
    both_wait(folder)
    ranks = processes_of(run_id(folder))
    agents = [pid for pid in ranks if b"executor.worker.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()]

    os.kill(max(agents), signal.SIGKILL)
    finish(process)

    assert process.returncode == 7
    assert re.fullmatch(r"the agent of node-\d was killed by SIGKILL", record(folder)["message"])
    assert [pid for pid in ranks if Path(f"/proc/{pid}").exists()] == []


@pytest.mark.smoke
def test_a_killed_supervisor_takes_its_ranks_along(folder):
    process = start("wait", folder)
    both_wait(folder)

    process.kill()
    process.wait()

    until(lambda: processes_of(run_id(folder)) == [], "the ranks to end")
    assert not (folder / "run.json").exists()


@NAMESPACES
def test_namespaces_count_what_crosses_between_nodes_and_are_removed(folder):
    process = start("finish", folder, hosts="namespaces")
    stderr = finish(process)

    assert process.returncode == 0, stderr
    assert len(record(folder)["node_tx_bytes"]) == 2 and min(record(folder)["node_tx_bytes"]) > 1000
    hosts = {json.loads(path.read_text())["host"] for path in (folder / "mesh").glob("rank-*.json")}
    assert hosts == {"mw-node-0", "mw-node-1"}
    assert left_by(process.pid) == []


def left_by(pid: int) -> list[str]:
    """Namespaces and interfaces made by one supervisor."""
    folders = [folder for folder in (namespaces.NAMES, namespaces.LINKS) if folder.is_dir()]
    return [entry.name for folder in folders for entry in folder.iterdir() if re.match(rf"mw{pid}\D", entry.name)]
