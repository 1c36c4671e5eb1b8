"""How starts end whose agents are shell scripts: a launcher's, a node's that joins by itself, and a host's that a
launcher reaches.

Not here: real agents and ranks (tests/cluster/test_launch.py, test_join.py), ssh (tests/cluster/test_ssh.py), or
several hosts (test_several_hosts.py).
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from kept import checkpoint, record
from msgspec.structs import replace as replace_record
from scripted import Agents

from executor.folder import checkpoints, rundir
from executor.folder.checkpoint_policy import CheckpointSchedule
from executor.hosts import ssh_run
from executor.hosts.fleet import Fleet
from executor.hosts.hosts import HostEntry
from executor.launchers import local
from executor.run import attempts, dryrun, join, launch, slurm_run
from executor.run.prepare import PreparedRun, RunOptions
from executor.system import environment, processes
from planner.basics.errors import PlannerError
from planner.spec.record import RunRecord

HOST = socket.gethostname()
ONE = (HostEntry(HOST),)
Start = Callable[[PreparedRun, list[str]], RunRecord]


def launched(ready: PreparedRun, told: list[str]) -> RunRecord:
    return launch.run(ready, told.append)


def joined(ready: PreparedRun, told: list[str]) -> RunRecord:
    """Node 0 of one, which somebody's own loop starts in a folder that waits for it."""
    folder, port = ready.options.run_dir, local.hold_port(ready.hosts, ready.run_id)
    port.close()
    dryrun.write(dryrun.DryRun(ready, launch.launch_spec(ready, port.number, {}), port.number, {}), folder)
    asked = join.NodeRequest(0, env=ready.options.env, meet_s=ready.options.meet_s)
    return join.join(folder, asked, told.append)[1]


def over_ssh(ready: PreparedRun, told: list[str]) -> RunRecord:
    """On one host, which has the launcher's disk."""
    return ssh_run.run(ready, Fleet(ONE), told.append)


def apart(ready: PreparedRun, told: list[str]) -> RunRecord:
    """On one host, which has not, and makes a folder in a place of its own."""
    return over_ssh(ready, told)


@pytest.fixture(autouse=True)
def host(request: pytest.FixtureRequest, here: Callable[[bool], None]) -> None:
    """This process is the host that a launcher reaches."""
    spec = getattr(request.node, "callspec", None)
    here(spec is None or spec.params.get("start") is not apart)


def ready_for(agents: Agents, start: Start, **options: object) -> PreparedRun:
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
    agents: Agents,
    start: Start,
    words: str,
) -> None:
    agents.do(words)
    ready, before = ready_for(agents, start), signal.getsignal(signal.SIGINT)

    ended = start(ready, [])

    status, code, message, rank = ENDS[words]
    assert (ended.status, ended.exit_code, ended.failed_rank) == (status, code, rank), ended
    said = ended.message.replace(HOST, "HOST").removeprefix("HOST: ")
    assert said.startswith(message) and bool(message) == bool(said)
    assert rundir.read_record(agents.place / "run") == ended
    assert ended.launcher == {launched: "local/loopback", joined: "join"}.get(start, "ssh")
    assert processes.processes_of(ready.run_id) == [] and list(agents.place.glob("there/*")) == []
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("start", [launched, joined, over_ssh, apart])
def test_agents_are_told_what_the_backend_s_file_means_and_what_ranks_say_is_passed_on(
    agents: Agents,
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
    agents: Agents,
    start: Start,
) -> None:
    agents.do(MEETS, reads="other")
    ready = ready_for(agents, start)

    ended = start(ready, [])

    assert (ended.status, ended.exit_code) == ("launch failed", 4)
    assert "plain reads it differently from the plan: it is other" in ended.message
    assert not (agents.place / "run" / "environment-0.json").exists()
    assert processes.processes_of(ready.run_id) == []


@pytest.mark.parametrize("start", [launched, joined])
def test_ranks_that_do_not_meet_in_time_end_the_start_and_are_named(agents: Agents, start: Start) -> None:
    agents.do("exec sleep 60")

    ended = start(ready_for(agents, start, meet_s=0.05), [])

    assert (ended.status, ended.exit_code) == ("launch failed", 4)
    assert ended.message.startswith(
        f"after 0.05 s ranks 0, 1 on {HOST} were not started: the agent of the node is still"
    )


# -- a launcher's starts ----------------------------------------------------------------------------------------------

FIRST = "test -e attempts || "


def test_a_start_that_failed_is_followed_by_another_as_often_as_asked(agents: Agents) -> None:
    agents.do(FIRST + "{ met 2; failed 1 7; }; met 2")

    ended = launch.run(agents.ready(max_restarts=1), lambda _: None)

    assert ended.status == "completed"
    assert [(one.status, one.failed_rank) for one in ended.attempts] == [("training failed", 1)]


def test_a_port_that_was_taken_meanwhile_is_given_up_for_another(agents: Agents) -> None:
    agents.do("test -e tried || { touch tried; echo error: EADDRINUSE; exit 1; }; met 2")
    told: list[str] = []

    ended = launch.run(agents.ready(), told.append)

    taken = int(told[0].split()[1])
    command = msgspec.json.decode((agents.place / "run" / rundir.LAUNCH).read_bytes())["commands"][0]["argv"]
    assert ended.status == "completed" and told[0] == f"port {taken} was taken meanwhile, trying the next"
    assert int(command[command.index("--master-port") + 1]) > taken


def test_ranks_that_came_and_did_not_meet_are_started_once_more_with_debugging_on(agents: Agents) -> None:
    came = """mkdir -p states; for rank in 0 1; do echo '{"state": "joining"}' > states/rank-$rank.json; done"""
    agents.do("exec sleep 60", first=came)
    told: list[str] = []

    ended = launch.run(agents.ready(meet_s=0.05), told.append)

    assert (ended.cause, len(ended.attempts)) == ("not met", 1)
    assert environment.NETWORK_DEBUG.items() <= agents.environment(agents.place / "run").items()
    assert "Trying once more with NCCL_DEBUG and TORCH_DISTRIBUTED_DEBUG on" in told[0]


def test_a_run_goes_on_in_its_own_folder_and_a_new_one_is_made_anew(agents: Agents) -> None:
    agents.do(MEETS)
    ready = agents.ready(checkpoints=CheckpointSchedule(every="20"))
    launch.run(ready, lambda _: None)
    folder = ready.options.run_dir
    (folder / "checkpoints").mkdir()
    place = checkpoint(folder, 20, ready.plan)
    attempts.set_aside(folder, 20)
    again = replace(ready, options=replace(ready.options, again=True, resume=place))

    ended = launch.run(again, lambda _: None)

    assert [one.resumed_from for one in ended.attempts] == [20] and ended.status == "completed"
    argv = msgspec.json.decode((folder / rundir.LAUNCH).read_bytes())["commands"][0]["argv"]
    assert argv[argv.index("--resume") + 1] == str(place)
    with pytest.raises(PlannerError, match="--run-dir"):
        launch.run(ready, lambda _: None)


def test_every_node_of_this_machine_has_its_own_agent_and_address(agents: Agents) -> None:
    agents.do("met 4; while [ $(ls mesh | wc -l) -lt 4 ]; do sleep 0.01; done")
    ready = agents.ready(nodes=2)

    ended = launch.run(ready, lambda _: None)

    commands = msgspec.json.decode((agents.place / "run" / rundir.LAUNCH).read_bytes())["commands"]
    words = [dict(zip(one["argv"], one["argv"][1:], strict=False)) for one in commands]
    assert (ended.status, ended.nodes, ended.world_size) == ("completed", 2, 4)
    assert [one["--node-rank"] for one in words] == ["0", "1"]
    assert {(one["--nnodes"], one["--nproc-per-node"], one["--rdzv-id"]) for one in words} == {("2", "2", ready.run_id)}
    assert len({one["--local-addr"] for one in words}) == len({one.address for one in ready.hosts.hosts})
    assert {one["--master-addr"] for one in words} == {ready.hosts.hosts[0].address}
    cores = len(os.sched_getaffinity(0))
    assert {one["env"]["OMP_NUM_THREADS"] for one in commands} == {str(max(1, cores // 4))}


def test_a_dry_run_says_what_each_node_would_start_and_makes_nothing(agents: Agents) -> None:
    plan = agents.plan(nodes=2)
    options = RunOptions(agents.place / "run", 2, hosts="loopback", env=("MINE=1",))

    found = dryrun.dry_run(plan, options, lambda _: None)

    assert not options.run_dir.exists() and not found.elsewhere and found.ready.hosts == local.describe(2, "loopback")
    assert [(one.node, one.env["PLAIN"], one.env["MINE"]) for one in found.spec.commands] == [
        (node, str(options.run_dir), "1") for node in (0, 1)
    ]
    assert "MINE" in found.commands[0].env and found.commands[0].env["MINE"] != "1"
    agents.do("", reads="other")
    assert (
        "it is other"
        in dryrun.dry_run(agents.plan(nodes=1), replace(options, nodes=1), print).unchecked["configuration"]
    )


# -- how agents are ended ---------------------------------------------------------------------------------------------

LOOPS = "while :; do sleep 0.01; done"


@pytest.mark.parametrize(("start", "nodes"), [(launched, 1), (launched, 2), (joined, 1)])
def test_an_agent_is_asked_to_end_before_it_is_made_to(agents: Agents, start: Start, nodes: int) -> None:
    asks = "[ $node != 0 ] || kill -INT $PPID"
    agents.do(f"trap 'sleep 0.1; echo heard > heard; exit 1' TERM; {MEETS} {asks}; {LOOPS}")

    ended = start(agents.ready(nodes=nodes, processes=2 // nodes), [])

    assert ended.exit_code == 130 and (agents.place / "run" / "heard").read_text() == "heard\n"


def test_other_agents_say_what_they_saw_after_one_that_says_nothing(agents: Agents) -> None:
    agents.do(
        "met 4; if [ $node = 0 ]; then touch gone; exit 1; fi; while ! [ -e gone ]; do :; done; sleep 0.3; failed 3 7"
    )

    ended = launch.run(agents.ready(nodes=2), lambda _: None)

    assert (ended.failed_rank, ended.exit_code) == (3, 5) and "failed first: exit code 7" in ended.message


def test_an_agent_that_hears_nothing_is_killed_with_its_ranks_once_a_person_asks_twice(agents: Agents) -> None:
    agents.do(f"trap '' TERM; {MEETS} setsid sleep 60 & wait_for_it=$!; kill -INT $PPID; kill -TERM $PPID; {LOOPS}")
    ready = agents.ready()

    ended = launch.run(ready, lambda _: None)

    assert ended.exit_code == 130 and processes.processes_of(ready.run_id) == []


def test_a_scheduler_s_signal_leaves_ranks_that_write_checkpoints_the_time_for_one(agents: Agents) -> None:
    words = {"message": "stopped after step 20", "exit_code": 143, "kind": "x", "cause": "interrupted", "refusal": True}
    stop, listening = (f"checkpoints/{name}" for name in (checkpoints.STOP, checkpoints.LISTENING))
    agents.do(f"""
        {MEETS} while [ -e {stop} ]; do sleep 0.01; done  # what an earlier start left is forgotten
        touch {listening}; kill -TERM $PPID
        while ! [ -e {stop} ]; do sleep 0.01; done
        echo {shlex.quote(json.dumps(words))} > failed/rank-0.json; failed 0 143
    """)
    ready = agents.ready(checkpoints=CheckpointSchedule(every="20"), again=True)
    rundir.create(ready.options.run_dir, ready.plan, {})
    (ready.options.run_dir / "checkpoints").mkdir()
    (ready.options.run_dir / stop).touch()

    ended = launch.run(ready, lambda _: None)

    assert (ended.exit_code, ended.message) == (143, "stopped by SIGTERM: stopped after step 20")


# -- an allocation of Slurm's -----------------------------------------------------------------------------------------


@pytest.fixture
def srun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Makes srun a script that writes down its words, and does what a shell's words say."""
    (tmp_path / "bin").mkdir()
    (path := tmp_path / "bin" / "srun").touch(0o700)
    monkeypatch.setenv("PATH", f"{path.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    return lambda words: path.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/words\n{words}\n') and None


def test_a_run_in_an_allocation_is_joined_by_its_nodes_and_ends_as_node_0_wrote(
    agents: Agents,
    srun: Callable[[str], None],
) -> None:
    options = RunOptions(agents.place / "run", 2, env=("MINE=1",), meet_s=7.0)
    plan = agents.plan(nodes=2)
    done = replace_record(record("training failed", 5), plan_hash=plan.content_hash)
    (agents.place / "record").write_bytes(msgspec.json.encode(done))
    srun(f"cp {agents.place}/record {options.run_dir}/run.json; exit 1")

    ready, found = slurm_run.run(plan, options, lambda _: None)

    words = (agents.place / "words").read_text().split()
    assert found == done and ready.plan == plan
    assert words[:4] == ["--nodes=2", "--ntasks-per-node=1", "--cpu-bind=none", "--kill-on-bad-exit=0"]
    assert words[4] == f"--job-name={ready.run_id}"
    assert words[-4:] == ["join", str(options.run_dir), "--slurm", "--meet-timeout=7"]
    assert attempts.read_asked(options.run_dir).launcher == "slurm"


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        ("exit 9", 7, "node 0 wrote no record, and srun ended with 9: Slurm no longer knows job 12"),
        ("kill -TERM $PPID; exec sleep 60", 143, "stopped by SIGTERM"),
    ],
)
def test_a_run_in_an_allocation_of_which_node_0_wrote_nothing_is_written_down_here(
    agents: Agents,
    srun: Callable[[str], None],
    words: str,
    code: int,
    message: str,
) -> None:
    srun(words)

    _, found = slurm_run.run(agents.plan(nodes=2), RunOptions(agents.place / "run", 2), lambda _: None)

    assert (found.exit_code, found.message) == (code, message)
    assert rundir.read_record(agents.place / "run") == found


@pytest.mark.parametrize("nodes", ["1", "", "many"])
def test_an_allocation_with_too_few_nodes_is_refused(
    agents: Agents,
    srun: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    nodes: str,
) -> None:
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", nodes)
    with pytest.raises(PlannerError, match="and the plan needs 2") as refused:
        slurm_run.run(agents.plan(nodes=2), RunOptions(agents.place / "run", 2), print)
    assert refused.value.exit_code == 3


def test_a_signal_ends_the_step_of_a_run_once_through_slurm_and_is_how_it_ended(
    agents: Agents,
    srun: Callable[[str], None],
) -> None:
    options, plan = RunOptions(agents.place / "run", 2), agents.plan(nodes=2)
    by_slurm = replace_record(record("interrupted", 143), message="stopped by SIGTERM; after step 20", failed_rank=None)
    (agents.place / "record").write_bytes(msgspec.json.encode(by_slurm))
    asked, name = (
        agents.place / "asked",
        '"$(sed "s/.*--job-name=\\([^ ]*\\).*/\\1/" ' + str(agents.place / "words") + ')"',
    )
    for program, words in {
        "squeue": f'echo "12.1 another"; echo 12.2 {name}',
        "scancel": f'echo "$@" >> {asked}; kill -USR1 $(cat {agents.place}/pid)',
    }.items():
        (path := agents.place / "bin" / program).write_text(f"#!/bin/sh\n{words}\n")
        path.chmod(0o700)
    written = f"cp {agents.place}/record {options.run_dir}/run.json"
    srun(f"echo $$ > {agents.place}/pid; trap '{written}; exit 1' USR1; kill -INT $PPID; {LOOPS}")

    _, found = slurm_run.run(plan, options, lambda _: None)

    assert asked.read_text() == "--signal=TERM 12.2\n"
    assert (found.exit_code, found.message) == (130, "stopped by SIGINT: after step 20")
    assert rundir.read_record(options.run_dir) == found
