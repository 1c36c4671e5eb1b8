"""How starts end whose agents are shell scripts: a launcher's, a node's that joins by itself, and a host's that a
launcher reaches.

Not here: real agents and ranks (tests/cluster/test_launch.py, test_join.py), ssh (tests/cluster/test_ssh.py), or
several hosts (test_several_hosts.py).
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest
from answering import here  # noqa: F401 (a fixture)
from kept import checkpoint
from scripted import Agents, agents  # noqa: F401 (a fixture)

from executor.folder import rundir
from executor.folder.checkpoint_policy import Policy
from executor.hosts import ssh_run
from executor.hosts.fleet import Fleet
from executor.hosts.hosts import Machine
from executor.launchers import local
from executor.run import attempts, dryrun, join, launch
from executor.run.prepare import Prepared
from executor.system import environment, processes
from planner.basics.errors import PlannerError
from planner.spec.record import RunRecord

HOST = socket.gethostname()
ONE = (Machine(HOST),)
Start = Callable[[Prepared, list[str]], RunRecord]


def launched(ready: Prepared, told: list[str]) -> RunRecord:
    return launch.run(ready, told.append)


def joined(ready: Prepared, told: list[str]) -> RunRecord:
    """Node 0 of one, which somebody's own loop starts in a folder that waits for it."""
    folder, port = ready.options.run_dir, local.free_from(local.FIRST_PORT)
    dryrun.write(dryrun.DryRun(ready, launch.launch_spec(ready, port, {}), port, {}), folder)
    asked = join.Asked(0, env=ready.options.env, meet_s=ready.options.meet_s)
    return join.join(folder, asked, told.append)[1]


def over_ssh(ready: Prepared, told: list[str]) -> RunRecord:
    """On one host, which has the launcher's disk."""
    return ssh_run.run(ready, Fleet(ONE), told.append)


def apart(ready: Prepared, told: list[str]) -> RunRecord:
    """On one host, which has not, and makes a folder in a place of its own."""
    return over_ssh(ready, told)


@pytest.fixture(autouse=True)
def host(request: pytest.FixtureRequest, here: Callable[[bool], None]) -> None:  # noqa: F811
    """This process is the host that a launcher reaches."""
    spec = getattr(request.node, "callspec", None)
    here(spec is None or spec.params.get("start") is not apart)


def ready_for(agents: Agents, start: Start, **options: object) -> Prepared:  # noqa: F811
    made = agents.ready(place=str(agents.place / "there") if start is apart else None, **options)
    return made if start in (launched, joined) else ssh_run.prepare(made.plan, made.options, ONE, lambda _: None)


MEETS = "met 2; "
ENDS = {
    MEETS: ("completed", 0, "", None),
    MEETS + "failed 1 7": ("training failed", 5, "rank 1 on HOST failed first: exit code 7", 1),
    MEETS + "failed 1 -9": ("training failed", 5, "rank 1 on HOST failed first: killed by SIGKILL (often", 1),
    "failed 0 7": ("launch failed", 4, "rank 0 on HOST failed first: exit code 7", 0),
    MEETS + "kill -KILL $$": ("node lost", 7, "the agent of HOST was killed by SIGKILL", None),
    "echo the end; exit 3": ("launch failed", 4, "an agent ended without naming a rank: the end", None),
    "met 1": ("launch failed", 4, "rank 0 trained in a world of 1, the plan has 2; rank 1 trained in", None),
    "exit 0": ("launch failed", 4, "ranks [0, 1] never reported the process group they joined", None),
    MEETS + "kill -INT $PPID; exec sleep 60": ("interrupted", 130, "stopped by SIGINT", None),
    MEETS + "kill -TERM $PPID; exec sleep 60": ("interrupted", 143, "stopped by SIGTERM", None),
}
OF_HOSTS = (MEETS, MEETS + "failed 1 -9", MEETS + "kill -KILL $$", "met 1", MEETS + "kill -INT $PPID; exec sleep 60")


@pytest.mark.parametrize(
    ("start", "words"),
    [*((start, words) for start in (launched, joined) for words in ENDS),
     *((start, words) for start in (over_ssh, apart) for words in OF_HOSTS)],
)  # fmt: skip
def test_a_run_ends_as_its_agents_say_and_nothing_of_it_is_left(
    agents: Agents,  # noqa: F811
    start: Start,
    words: str,
) -> None:
    agents.do(words)
    ready = ready_for(agents, start)

    record = start(ready, [])

    status, code, message, rank = ENDS[words]
    assert (record.status, record.exit_code, record.failed_rank) == (status, code, rank), record
    said = record.message.replace(HOST, "HOST").removeprefix("HOST: ")
    assert said.startswith(message) and bool(message) == bool(said)
    assert rundir.read_record(agents.place / "run") == record
    assert record.launcher == {launched: "local/loopback", joined: "join"}.get(start, "ssh")
    assert processes.processes_of(ready.run_id) == [] and list(agents.place.glob("there/*")) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("start", [launched, joined, over_ssh, apart])
def test_agents_are_told_what_the_backend_s_file_means_and_what_ranks_say_is_passed_on(
    agents: Agents,  # noqa: F811
    start: Start,
) -> None:
    agents.do(MEETS)
    ready, told = ready_for(agents, start, env=("MINE=1",)), list[str]()

    start(ready, told)

    ranks = agents.environment(agents.place / "run")
    folder = agents.place / "there" / ready.run_id / "node-0" if start is apart else agents.place / "run"
    assert (ranks["PLAIN"], ranks["MESHWRIGHT_RUN_DIR"]) == (str(folder), str(folder))
    assert (ranks["MINE"], ranks["MESHWRIGHT_NODE"], ranks["MESHWRIGHT_RUN_ID"]) == ("1", "0", ready.run_id)
    ranks_heard = range(1 if start is launched else 2)
    assert sorted(told) == [f"{HOST}:{rank}  rank {rank} is here" for rank in ranks_heard]


@pytest.mark.parametrize("start", [launched, joined, over_ssh])
def test_a_file_that_the_backend_reads_otherwise_ends_the_start_before_any_rank(
    agents: Agents,  # noqa: F811
    start: Start,
) -> None:
    agents.do(MEETS, reads="other")
    ready = ready_for(agents, start)

    record = start(ready, [])

    assert (record.status, record.exit_code) == ("launch failed", 4)
    assert "plain reads it otherwise than planned: it is other" in record.message
    assert not (agents.place / "run" / "environment-0.json").exists()
    assert processes.processes_of(ready.run_id) == []


@pytest.mark.parametrize("start", [launched, joined])
def test_ranks_that_do_not_meet_in_time_end_the_start_and_are_named(agents: Agents, start: Start) -> None:  # noqa: F811
    agents.do("exec sleep 60")

    record = start(ready_for(agents, start, meet_s=0.05), [])

    assert (record.status, record.exit_code) == ("launch failed", 4)
    assert record.message.startswith(f"after 0.05 s ranks 0, 1 on {HOST} were not started: the agent there has not")


# -- a launcher's starts ----------------------------------------------------------------------------------------------

FIRST = "test -e attempts || "


def test_a_start_that_failed_is_followed_by_another_as_often_as_asked(agents: Agents) -> None:  # noqa: F811
    agents.do(FIRST + "{ met 2; failed 1 7; }; met 2")

    record = launch.run(agents.ready(max_restarts=1), lambda _: None)

    assert record.status == "completed"
    assert [(one.status, one.failed_rank) for one in record.attempts] == [("training failed", 1)]


def test_a_port_that_was_taken_meanwhile_is_given_up_for_another(agents: Agents) -> None:  # noqa: F811
    agents.do("test -e tried || { touch tried; echo error: EADDRINUSE; exit 1; }; met 2")
    told: list[str] = []

    record = launch.run(agents.ready(), told.append)

    taken = int(told[0].split()[1])
    command = msgspec.json.decode((agents.place / "run" / rundir.LAUNCH).read_bytes())["commands"][0]["argv"]
    assert record.status == "completed" and told[0] == f"port {taken} was taken meanwhile, trying the next"
    assert int(command[command.index("--master-port") + 1]) > taken


def test_ranks_that_came_and_did_not_meet_are_started_once_more_with_debugging_on(agents: Agents) -> None:  # noqa: F811
    came = "for rank in 0 1; do echo '{\"state\": \"joining\"}' > states/rank-$rank.json; done; exec sleep 60"
    agents.do(f"mkdir -p states; {came}")
    told: list[str] = []

    record = launch.run(agents.ready(meet_s=0.2), told.append)

    assert (record.cause, len(record.attempts)) == ("not met", 1)
    assert environment.NETWORK_DEBUG.items() <= agents.environment(agents.place / "run").items()
    assert "Trying once more with NCCL_DEBUG and TORCH_DISTRIBUTED_DEBUG on" in told[0]


def test_a_run_goes_on_in_its_own_folder_and_a_new_one_is_made_anew(agents: Agents) -> None:  # noqa: F811
    agents.do(MEETS)
    ready = agents.ready(checkpoints=Policy(every="20"))
    launch.run(ready, lambda _: None)
    folder = ready.options.run_dir
    (folder / "checkpoints").mkdir()
    place = checkpoint(folder, 20, ready.plan)
    attempts.set_aside(folder, 20)
    again = replace(ready, options=replace(ready.options, again=True, resume=place))

    record = launch.run(again, lambda _: None)

    assert [one.resumed_from for one in record.attempts] == [20] and record.status == "completed"
    argv = msgspec.json.decode((folder / rundir.LAUNCH).read_bytes())["commands"][0]["argv"]
    assert argv[argv.index("--resume") + 1] == str(place)
    with pytest.raises(PlannerError, match="--run-dir"):
        launch.run(ready, lambda _: None)


def test_every_node_of_this_machine_has_its_own_agent_and_address(agents: Agents) -> None:  # noqa: F811
    agents.do("met 4; while [ $(ls mesh | wc -l) -lt 4 ]; do sleep 0.01; done")
    ready = agents.ready(nodes=2)

    record = launch.run(ready, lambda _: None)

    commands = msgspec.json.decode((agents.place / "run" / rundir.LAUNCH).read_bytes())["commands"]
    words = [dict(zip(one["argv"], one["argv"][1:], strict=False)) for one in commands]
    assert (record.status, record.nodes, record.world_size) == ("completed", 2, 4)
    assert [one["--node-rank"] for one in words] == ["0", "1"]
    assert {(one["--nnodes"], one["--nproc-per-node"], one["--rdzv-id"]) for one in words} == {("2", "2", ready.run_id)}
    assert len({one["--local-addr"] for one in words}) == len({one.address for one in ready.hosts.hosts})
    assert {one["--master-addr"] for one in words} == {ready.hosts.hosts[0].address}
    cores = len(os.sched_getaffinity(0))
    assert {one["env"]["OMP_NUM_THREADS"] for one in commands} == {str(max(1, cores // 4))}
