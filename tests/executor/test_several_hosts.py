"""A run on several hosts as its launcher sees it: where they meet, which host is lost, which one it stops, and what it
starts next. The hosts' messages are those that a test lists.

Not here: one real node (test_scripted.py), or hosts that ssh reaches (tests/cluster/test_ssh.py).
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from answering import Said, Says
from scripted import Agents

from executor.folder import joining, rundir
from executor.folder.checkpoint_policy import CheckpointSchedule
from executor.folder.joining import Joined
from executor.hosts import node, ssh_run
from executor.hosts.checks.host import CheckReply
from executor.hosts.fleet import Fleet
from executor.hosts.hosts import HostEntry, kept_hosts
from executor.preflight.findings import Finding
from executor.run.prepare import PreparedRun
from executor.system import environment
from planner.basics.errors import PlannerError
from planner.spec.record import RunRecord

RED, BLUE, GREEN = HostEntry("red"), HostEntry("blue", user="me", port=2222), HostEntry("green")
TWO = (RED, BLUE)
OK = {"status": "completed", "exit_code": 0, "message": "", "cause": "", "rank": None, "shared": False}
BAD = OK | {"status": "training failed", "exit_code": 5, "message": "rank 3 failed first: x", "cause": "y", "rank": 3}
LOST: Said = {"kind": "lost"}


def ends(value: Mapping[str, Any] = OK) -> Said:
    return {"kind": "answer", "value": dict(value)}


def sends(name: str, text: str, **more: Any) -> Said:
    return {"kind": "file", "name": name, "at": 0, "grows": False, "last": True, "payload": text.encode()} | more


def met(place: int, world: int = 4) -> list[Said]:
    return [sends(f"mesh/rank-{rank}.json", json.dumps({"world_size": world})) for rank in (2 * place, 2 * place + 1)]


@dataclass
class Hosts:
    """What hosts say to each kind of question. `starts`: by start, what each host says to being a node; `failing`: by
    step of a check, the host of which one finding fails."""

    starts: list[Mapping[int, list[Said]]]
    stopped: Mapping[int, list[Said]] = field(default_factory=dict)
    failing: Mapping[str, int] = field(default_factory=dict)
    addresses: tuple[str, str] = ("10.0.0.1", "10.0.0.2")
    begun: dict[int, int] = field(default_factory=dict)

    def __call__(self, place: int, request: Said) -> Iterator[Said]:
        match request["kind"]:
            case "look":
                bits = 64 if ":" in self.addresses[0] else 24
                where = {self.addresses[place % 2]: ["eth0", bits]}
                yield ends({"port": 29500 + place, "addresses": where})
            case "node":
                self.begun[place] = start = self.begun.get(place, -1) + 1
                yield from self.starts[start][place]
            case "stop":
                yield from self.stopped.get(place, [ends(OK | {"status": "interrupted", "exit_code": 130})])
            case "reap":
                yield ends({"left": ["2 processes"] * (place == 0)})
            case "held":
                yield ends({"shared": True, "held": []})
            case _:
                wrong = self.failing.get(request["step"]) == place
                found = [Finding(check="reach", status="fail", rule="is wrong", fix="Mend it")] * wrong
                ranks = range(request["ranks"]) if request["step"] == "reduce" else ()
                went = {"error": "no way"} if wrong else {"seconds": 0.1, "bytes": 1e6}
                reduced = [{"rank": rank, **went} for rank in ranks]
                said = CheckReply(node=place, host="?", findings=found, reduced=reduced)
                yield ends(msgspec.to_builtins(said))


@dataclass
class Run:
    """A run on hosts, what was told to a person, and what to hosts."""

    ready: PreparedRun
    let: Callable[[Says], list[tuple[int, Said]]]
    told: list[str] = field(default_factory=list)
    asked: list[tuple[int, Said]] = field(default_factory=list)

    def on(self, hosts: Hosts, spares: tuple[HostEntry, ...] = (), master: str | None = None) -> RunRecord:
        self.asked = self.let(hosts)
        return ssh_run.run(self.ready, Fleet(TWO, spares), self.told.append, master=master)

    def nodes(self) -> list[tuple[int, Said]]:
        return [(place, one["request"]) for place, one in self.asked if one.get("request", {}).get("kind") == "node"]

    def stops(self) -> list[tuple[int, int]]:
        return [(place, one["signal"]) for place, one in self.asked if one["kind"] == "stop"]


@pytest.fixture
def two(agents: Agents, written: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Two hosts of two ranks; nothing waits for others to settle."""
    monkeypatch.setattr(ssh_run, "SETTLE_S", 0.0)

    def made(**options: object) -> Run:
        ready = agents.ready(nodes=2, **options)
        return Run(ssh_run.prepare(ready.plan, ready.options, TWO, lambda _: None), written)

    return made


DONE = {place: [*met(place), ends()] for place in (0, 1)}


def test_hosts_are_asked_to_be_their_nodes_and_what_they_send_is_kept(two: Callable[..., Run]) -> None:
    run = two(env=("MINE=1",), place="/scratch", checkpoints=CheckpointSchedule(every="20"))
    line: Said = {"kind": "line", "text": "red:0  hello"}
    keeps = [{"kind": "keeps", "folder": f"/scratch/{name}"} for name in ("red", "blue")]
    record = run.on(Hosts([{place: [keeps[place], line, *DONE[place]] for place in (0, 1)}]))

    folder = run.ready.options.run_dir
    assert (record.status, record.launcher, record.nodes) == ("completed", "ssh", 2)
    assert sorted(path.name for path in (folder / "mesh").iterdir()) == [f"rank-{rank}.json" for rank in range(4)]
    for place, (at, request) in enumerate(run.nodes()):
        asked = msgspec.convert(dict(request), node.HostRequest)
        assert (at, asked.node, asked.host, asked.run_id) == (place, place, TWO[place].name, run.ready.run_id)
        assert (asked.env, asked.place, asked.kept) == (("MINE=1",), "/scratch", run.ready.options.kept)
        assert asked.files == {name: (folder / name).read_text() for name in asked.files}
        assert set(asked.files) == {"plan.json", "join.json", "config/plain.json"}
    assert run.told.count("red:0  hello") == 2
    apart = "note: red, blue keep their parts of checkpoints in /scratch/red, and a lost host loses its part"
    assert sum(one.startswith(apart) for one in run.told) == 1


@pytest.mark.parametrize(
    ("named", "addresses", "meeting"),
    [
        (None, ("10.0.0.1", "10.0.0.2"), "10.0.0.1:29500"),
        (None, ("fd00::1", "fd00::2"), "[fd00::1]:29500"),
        ("gate", ("10.0.0.1", "10.0.0.2"), "gate:29500"),
        ("gate:7", ("10.0.0.1", "10.0.0.2"), "gate:7"),
        ("[fd00::9]:7", ("10.0.0.1", "10.0.0.2"), "[fd00::9]:7"),
    ],
)
def test_hosts_meet_where_node_0_is_seen_or_where_a_person_says(
    two: Callable[..., Run], named: str | None, addresses: tuple[str, str], meeting: str
) -> None:
    run = two()

    run.on(Hosts([DONE], addresses=addresses), master=named)

    assert {request["master"] for _, request in run.nodes()} == {meeting}
    wanted = joining.read(run.ready.options.run_dir)
    assert wanted.master == meeting and meeting.endswith(f":{wanted.port}")


def test_a_check_that_fails_on_a_host_refuses_the_run_before_any_node_and_leaves_no_folder(
    two: Callable[..., Run],
) -> None:
    run = two()

    with pytest.raises(PlannerError, match="blue: reach"):
        run.on(Hosts([DONE], failing={"reach": 1}))

    assert run.nodes() == [] and not run.ready.options.run_dir.exists()


def test_a_host_that_cannot_be_asked_refuses_the_run(two: Callable[..., Run]) -> None:
    run = two()

    def says(place: int, request: Said) -> Iterator[Said]:
        yield {"kind": "answer", "refusal": {"field": "a", "value": "b", "rule": "is wrong", "fix": "", "exit_code": 3}}

    with pytest.raises(PlannerError, match="blue: a"):
        run.on(says)  # type: ignore[arg-type]
    assert len([one for one in run.told if one.startswith("error: red: a")]) == 1


@pytest.mark.parametrize(
    ("said", "status", "code", "message"),
    [
        ({0: [*met(0)], 1: [*met(1), LOST]}, "node lost", 7, "blue was lost: host=blue: is gone"),
        ({0: [*met(0)], 1: [*met(1), ends(BAD)]}, "training failed", 5, "blue: rank 3 failed first: x"),
        ({0: [*met(0), ends(BAD)], 1: [*met(1), LOST]}, "node lost", 7, "blue was lost"),
        ({0: [LOST], 1: []}, "node lost", 7, "red was lost"),
    ],
)
def test_the_first_host_that_ends_badly_is_the_story_and_others_are_told_to_stop(
    two: Callable[..., Run], said: Mapping[int, list[Said]], status: str, code: int, message: str
) -> None:
    run = two()

    record = run.on(Hosts([said]))

    assert (record.status, record.exit_code) == (status, code), record
    assert record.message.startswith(message)
    living = [place for place in (0, 1) if not any(one["kind"] in ("answer", "lost") for one in said[place])]
    assert run.stops() == [(place, signal.SIGINT) for place in living]


def ended_rank(rank: int, **more: object) -> Said:
    said = {"message": "stopped after step 20", "exit_code": 143, "kind": "x", "time_ns": 5} | more
    return sends(f"failed/rank-{rank}.json", json.dumps(said))


def test_ranks_that_end_as_their_launcher_s_host_is_lost_were_asked_by_nobody(two: Callable[..., Run]) -> None:
    run = two()
    stops = ended_rank(0, cause="interrupted", refusal=True)

    record = run.on(Hosts([{0: [*met(0), stops, ends(BAD)], 1: [*met(1), LOST]}]))

    assert (record.status, record.exit_code) == ("node lost", 7)
    assert record.message.startswith("blue was lost")


@pytest.mark.parametrize("blames", [True, False])
def test_what_a_rank_says_of_its_own_end_says_more_than_its_host_and_what_it_saw_of_others_less(
    two: Callable[..., Run], blames: bool
) -> None:
    run = two()
    kind = "ValueError" if blames else "ConnectionResetError"
    said = ended_rank(3, kind=kind, message="the end", exit_code=1)
    killed = OK | {"status": "training failed", "exit_code": 5, "message": "m", "cause": "out-of-memory killer"}

    record = run.on(Hosts([{0: [*met(0), ends(killed)], 1: [*met(1), said, ends(BAD)]}]))

    assert record.exit_code == 5
    assert record.message == ("rank 3 on blue failed first: the end" if blames else "red: m")


def test_a_node_that_was_stopped_is_not_the_story_whatever_it_then_says(two: Callable[..., Run]) -> None:
    run = two()
    full = OK | {"status": "training failed", "exit_code": 5, "message": "full", "cause": "disk full"}

    record = run.on(Hosts([{0: met(0), 1: [*met(1), ends(BAD)]}], stopped={0: [ends(full)]}))

    assert run.stops() == [(0, signal.SIGINT)] and record.message.startswith("blue: rank 3 failed first")


def test_of_two_nodes_that_failed_by_themselves_the_one_whose_host_knows_more_is_the_story(
    two: Callable[..., Run],
) -> None:
    run = two()
    full = OK | {"status": "training failed", "exit_code": 5, "message": "full", "cause": "disk full"}

    record = run.on(Hosts([{0: [*met(0), ends(BAD)], 1: [*met(1), ends(full)]}]))

    assert (record.message, record.cause) == ("blue: full", "disk full")


def test_ranks_of_a_host_that_says_nothing_more_are_not_held_to_have_missed_the_others(
    two: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ssh_run, "STOP_S", 0.0)
    run = two()
    said = ended_rank(0, kind="ValueError", message="the end", exit_code=1)

    record = run.on(Hosts([{0: [*met(0), said, ends(BAD)], 1: []}], stopped={1: []}))

    assert (record.status, record.exit_code) == ("training failed", 5)
    assert record.message == "rank 0 on red failed first: the end"


def test_a_run_s_versions_are_those_of_node_0_s_host(two: Callable[..., Run]) -> None:
    run = two()
    joined = [
        sends(
            f"joined/node-{node}.json",
            json.dumps({"node": node, "host": "h", "process": "1:1", "versions": {"torch": f"{node}"}}),
        )
        for node in (0, 1)
    ]

    record = run.on(Hosts([{place: [joined[place], *DONE[place]] for place in (0, 1)}]))

    assert record.versions == {"torch": "0"}


def test_a_refusal_of_a_node_says_more_than_what_others_then_say(two: Callable[..., Run]) -> None:
    refusal = {"field": "--env", "value": None, "rule": "is not set here", "fix": "", "exit_code": 3}
    run = two()

    record = run.on(Hosts([{0: [*met(0), ends(BAD)], 1: [{"kind": "answer", "refusal": refusal}]}]))

    assert (record.exit_code, record.cause) == (3, "refused") and "is not set here" in record.message


@pytest.mark.parametrize(("spares", "machines"), [((GREEN,), ["red", "green"]), ((), ["red"])])
def test_a_run_starts_again_on_a_spare_or_is_planned_for_the_hosts_that_are_left(
    two: Callable[..., Run], spares: tuple[HostEntry, ...], machines: list[str]
) -> None:
    run = two(max_restarts=1)
    again = {place: [*met(place, 2 * len(machines)), ends()] for place in (0, 1)}

    record = run.on(Hosts([{0: [*met(0)], 1: [*met(1), LOST]}, again]), spares)

    assert record.status == "completed", (record, run.told)
    assert [one.status for one in record.attempts] == ["node lost"]
    assert [one.name for one in kept_hosts(run.ready.options.run_dir)] == machines
    assert "blue is left out: does not answer" in run.told
    assert any(one.startswith(("nodes are now red, green", "planned again for red: ")) for one in run.told)


@pytest.mark.parametrize("fails", [False, True])
def test_hosts_whose_ranks_did_not_meet_try_an_all_reduce_and_once_more_with_debugging_on_where_that_works(
    two: Callable[..., Run], fails: bool
) -> None:
    unmet = OK | {"status": "launch failed", "exit_code": 4, "message": "not met", "cause": "not met"}
    run = two(meet_s=60.0)
    hosts = Hosts([{place: [ends(unmet)] for place in (0, 1)}, DONE], failing={"reduce": 1} if fails else {})

    record = run.on(hosts)

    debugged = [request["debug"] for _, one in run.asked if (request := one.get("request", {})).get("step") == "reduce"]
    assert debugged == [True, True]
    said = "error: blue: all-reduce, rank 0: no way" if fails else "note: an all-reduce over all ranks works"
    assert any(one.startswith(said) for one in run.told)
    assert (record.exit_code, len(record.attempts)) == ((4, 0) if fails else (0, 1))
    env = [set(request["env"]) for _, request in run.nodes()]
    on = {f"{name}={value}" for name, value in environment.NETWORK_DEBUG.items()}
    assert env == ([set()] * 2 if fails else [set(), set(), on, on])


@pytest.mark.parametrize("cause", ssh_run.NO_NETWORK)
def test_a_start_that_failed_for_a_cause_of_its_own_tries_no_all_reduce(two: Callable[..., Run], cause: str) -> None:
    run = two()
    failed = OK | {"status": "launch failed", "exit_code": 4, "message": "x", "cause": cause}

    record = run.on(Hosts([{place: [ends(failed)] for place in (0, 1)}]))

    assert (record.exit_code, record.cause) == (4, cause)
    assert all(one.get("request", {}).get("step") != "reduce" for _, one in run.asked)


def test_ranks_that_do_not_meet_in_time_end_all_nodes_and_hosts_without_one_are_named(two: Callable[..., Run]) -> None:
    run = two(meet_s=0.01)
    there = Joined(node=0, host="red", process="1:1")
    joined = sends("joined/node-0.json", msgspec.json.encode(there).decode())

    record = run.on(Hosts([{0: [joined], 1: []}], failing={"reduce": 1}))

    assert (record.status, record.exit_code) == ("launch failed", 4)
    assert record.message == "after 0.01 s blue has not started a node"
    assert sorted(run.stops()) == [(0, signal.SIGINT), (1, signal.SIGINT)]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_passed_on_to_every_node_and_is_how_the_run_ends(two: Callable[..., Run], number: int) -> None:
    class Signalling(Hosts):
        def __call__(self, place: int, request: Said) -> Iterator[Said]:
            yield from super().__call__(place, request)
            if request["kind"] == "node" and place == 1:
                os.kill(os.getpid(), number)

    run = two()
    record = run.on(Signalling([{place: met(place) for place in (0, 1)}]))

    assert (record.status, record.exit_code) == ("interrupted", 128 + number)
    assert run.stops() == [(0, number), (1, number)]


def test_a_second_signal_is_passed_on_and_a_third_waits_for_no_node(two: Callable[..., Run]) -> None:
    class Deaf(Hosts):
        def __call__(self, place: int, request: Said) -> Iterator[Said]:
            if request["kind"] == "stop":
                if place == 1:
                    os.kill(os.getpid(), signal.SIGINT)
                return
            yield from super().__call__(place, request)
            if request["kind"] == "node" and place == 1:
                os.kill(os.getpid(), signal.SIGINT)

    run = two()
    record = run.on(Deaf([{place: met(place) for place in (0, 1)}]))

    assert (record.status, record.exit_code) == ("interrupted", 130)
    assert run.stops() == [(place, signal.SIGINT) for _ in range(3) for place in (0, 1)]


def test_a_start_that_goes_on_adds_to_the_metrics_that_are_there(two: Callable[..., Run]) -> None:
    run = two(again=True, checkpoints=CheckpointSchedule(every="20"))
    folder = run.ready.options.run_dir
    rundir.create(folder, run.ready.plan, {})
    (folder / rundir.METRICS).write_text('{"step": 0}\n')
    parts = [
        sends(rundir.METRICS, '{"step": 1}\n', grows=True),
        sends(rundir.METRICS, '{"step": 2}\n', grows=True, at=len('{"step": 1}\n')),
    ]

    run.on(Hosts([{0: [*met(0), *parts, ends()], 1: DONE[1]}]))

    steps = [json.loads(line)["step"] for line in (folder / rundir.METRICS).read_text().splitlines()]
    assert steps == [0, 1, 2]


def test_what_a_run_left_on_hosts_is_ended_and_told_of(written: Any) -> None:
    def says(place: int, request: Said) -> Iterator[Said]:
        assert dict(request) == {"kind": "reap", "run_id": "id", "place": "/scratch"}
        left: list[str] = [["2 processes", "its folder"], [], []][place]  # type: ignore[assignment]
        yield LOST if place == 2 else ends({"left": left})

    written(says)
    assert ssh_run.ended_on_hosts((RED, BLUE, GREEN), "id", lambda _: None, "/scratch") == [
        "2 processes and its folder on red ended",
        "green could not be checked (is gone)",
    ]


def test_a_dry_run_says_how_each_host_would_be_reached(two: Callable[..., Run]) -> None:
    ready = two().ready

    found, reached = ssh_run.dry_run(ready.plan, ready.options, TWO, lambda _: None)

    assert found.ready.plan == ready.plan and found.elsewhere
    assert [one.node for one in found.spec.commands] == [0, 1]
    assert ["-l me -- blue" in one and "-p 2222" in one for one in reached] == [False, True]
    assert " -- red " in reached[0]
