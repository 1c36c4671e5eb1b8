"""One host's end of a launcher's connection, in this process: whom it hears, what it keeps, what its ranks say of an
all-reduce, and what it does once its launcher is silent.

Not here: connections (tests/cluster/test_contact.py), or a launcher's end (test_several_hosts.py).
"""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scripted import Agents
from sleepers import sleeper
from test_rundir import make_plan

from executor.folder import rundir
from executor.folder.checkpoint_policy import CheckpointSchedule
from executor.hosts import node, remote
from executor.hosts.checks import host
from executor.hosts.remote import LauncherConnection
from executor.launchers import local
from executor.run.attempts import ASKED, RunRequest
from executor.system import address, environment, frames, processes
from planner.basics.errors import PlannerError
from planner.spec import Layout, Recipe, TrainingJob
from planner.spec.plan import encode_plan

OWN_PORT = local.FIRST_PORT + os.getpid() % local.PORTS
"""From which on this process looks for ports: other tests run at the same time."""

# -- a launcher that is gone ------------------------------------------------------------------------------------------


class Ended(BaseException):
    """In place of the end of this process."""


class Clock:
    """Seconds that pass where something waits, and an event that others wait for."""

    def __init__(self) -> None:
        self.now, self.lost = 0.0, False
        self.at: dict[float, Callable[[], object]] = {}

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def wait(self, seconds: float) -> bool:
        if not self.lost:
            self.now += seconds
            self.at.get(self.now, lambda: None)()
        return self.lost

    def set(self) -> None:
        self.lost = True

    def is_set(self) -> bool:
        return self.lost


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> tuple[Clock, LauncherConnection, list[str]]:
    """A link whose watch ends on this clock; what is done at its end, with the time."""
    clock, done = Clock(), list[str]()
    monkeypatch.setattr(remote, "time", clock)
    link = LauncherConnection(io.BytesIO(), io.BytesIO())
    link.lost = clock  # type: ignore[assignment]
    link.leave = lambda: done.append(f"left at {clock.now:g}")
    monkeypatch.setattr(remote, "end_children", lambda: done.append(f"ended at {clock.now:g}"))

    def leave(code: int) -> None:
        done.append(f"exit {code}")
        raise Ended

    monkeypatch.setattr(remote.os, "_exit", leave)
    return clock, link, done


@pytest.mark.parametrize("last_word_s", [0.0, 1.0, 7.0])
def test_a_launcher_that_is_silent_for_longer_than_15_s_is_gone_and_what_it_started_ends(
    watched: tuple[Clock, LauncherConnection, list[str]], last_word_s: float
) -> None:
    clock, link, done = watched
    clock.at[last_word_s] = lambda: setattr(link, "_heard", clock.now)

    with pytest.raises(Ended):
        link.watch()

    end = last_word_s + remote.SILENCE_S + 1.0 + remote.END_S  # it looks once a second
    assert link.stops == [signal.SIGHUP] and link.questions.get_nowait() is None
    assert done == [f"ended at {end:g}", f"left at {end:g}", "exit 95"]


def test_a_closed_connection_ends_what_it_started_at_once(watched: tuple[Clock, LauncherConnection, list[str]]) -> None:
    clock, link, done = watched
    clock.at[2.0] = clock.set

    with pytest.raises(Ended):
        link.watch()

    assert clock.now == 2.0 + remote.END_S and done[-1] == "exit 95"


def test_a_host_hears_questions_and_stops_until_its_launcher_says_no_more() -> None:
    stream, out = io.BytesIO(), io.BytesIO()
    writer = frames.FrameWriter(stream)
    for message in ({"kind": "beat"}, {"kind": "ask", "number": 1, "request": {}}, {"kind": "stop", "signal": 15}):
        writer.send(message)
    stream.seek(0)
    link = LauncherConnection(stream, out)

    link.listen()

    assert link.questions.get_nowait() == ({"kind": "ask", "number": 1, "request": {}}, b"")
    assert link.questions.get_nowait() is None and link.stops == [15] and link.lost.is_set()
    link.say({"kind": "line"})
    assert out.getvalue() == b""  # no launcher is there to read


@pytest.mark.parametrize(
    ("request_", "rule"),
    [
        ({"kind": "check"}, "is not of this version"),
        ({"kind": "reap"}, "failed here: KeyError: 'run_id'"),
        ({"kind": "nothing"}, "failed here: KeyError: 'nothing'"),
    ],
)
def test_a_question_that_cannot_be_answered_is_a_refusal_with_its_number(request_: dict[str, str], rule: str) -> None:
    out = io.BytesIO()
    remote._answer(LauncherConnection(io.BytesIO(), out), {"number": 7, "request": request_})
    out.seek(0)

    message, _ = frames.read(out) or ({}, b"")

    assert (message["kind"], message["number"]) == ("answer", 7)
    assert rule in frames.refused(message["refusal"], "red").rule


def test_a_host_says_where_it_is_and_keeps_a_port_where_it_is_asked_to() -> None:
    found = remote.look({"port": OWN_PORT})
    assert local.FIRST_PORT <= found["port"] < local.FIRST_PORT + local.PORTS and found["executable"] == sys.executable
    assert found["addresses"] == {one: list(place) for one, place in address.networks().items()}
    kept = remote.look({"port": found["port"], "keep": True})["port"]
    try:
        assert remote.look({"port": kept})["port"] != kept
    finally:
        local.let_go(kept)
    assert remote.look({"port": kept})["port"] == kept


# -- what a host keeps ------------------------------------------------------------------------------------------------


def test_a_host_keeps_its_part_of_checkpoints_beside_its_runs_or_in_the_place_that_was_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", "/home/me")
    own = tmp_path / "meshwright"
    assert node._runs(None) == own / "runs" and node._kept(None, "a1") == own / "checkpoints" / "a1"
    assert node._kept("/scratch", "a1") == Path("/scratch/checkpoints/a1")
    assert node._kept("~/s", "a1") == Path("/home/me/s/checkpoints/a1")


def test_a_host_that_has_the_launcher_s_folder_holds_nothing_beside_it(tmp_path: Path) -> None:
    folder, place = tmp_path / "run", tmp_path / "there"
    rundir.create(folder, make_plan(Layout(engine="ddp", dp_replicate=2)), {})
    asked = RunRequest(checkpoints=CheckpointSchedule(every="20"), kept="a1")
    (folder / ASKED).write_bytes(msgspec.json.encode(asked))
    question = {"kind": "held", "folder": str(folder), "place": str(place)}
    assert node.held(question | {"kept": "a1"}) == {"shared": True, "held": []}
    assert node.held(question | {"kept": "b2"}) == {"shared": False, "held": ()}
    assert node.held(question | {"folder": "/nowhere", "kept": "a1"}) == {"shared": False, "held": ()}


def test_a_node_that_does_not_see_the_launcher_s_folder_has_one_that_goes_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = {"plan.json": "{}", "config/a.json": "1"}
    asked = node.HostRequest(
        kind="node", node=1, host="red", run_id="id", folder="/nowhere", files=files, master="x", place=str(tmp_path)
    )
    with node._folder(asked) as (folder, shared):
        assert (folder, shared) == (tmp_path / "id" / "node-1", False) and Path.cwd() == folder
        assert {name: (folder / name).read_text() for name in files} == files
        assert {one.name for one in folder.iterdir() if one.is_dir()} == {
            "config",
            "logs",
            "mesh",
            "measured",
            "failed",
        }
        assert folder.stat().st_mode & 0o77 == 0
        mark = (tmp_path / "id" / "node-1.owner").read_text()
        assert mark == f"{os.uname().nodename} {processes.identity()}"
        there = node._keep(folder, msgspec.structs.replace(asked, kept="a1"))
        assert (folder / "checkpoints").resolve() == there == tmp_path / "checkpoints" / "a1" / "checkpoints"
        with pytest.raises(PlannerError, match="cannot be made"), node._folder(asked):
            pass
    assert list(tmp_path.iterdir()) == [tmp_path / "checkpoints"]


def test_what_a_run_left_on_a_host_is_ended_and_told(tmp_path: Path) -> None:
    run_id = f"left-{os.getpid()}"
    question = {"kind": "reap", "run_id": run_id, "place": str(tmp_path)}
    assert node.reaped(question) == {"left": []}
    for count in (1, 2):
        env = os.environ | {processes.RUN_ID_VARIABLE: run_id}
        left = [sleeper(env) for _ in range(count)]
        try:
            assert sorted(processes.processes_of(run_id)) == sorted(one.pid for one in left)
            (tmp_path / run_id / "node-0").mkdir(parents=True)
            (tmp_path / run_id / "node-0.owner").write_text(f"{os.uname().nodename} 1:1")
            many = "1 process" if count == 1 else "2 processes"
            assert node.reaped(question) == {"left": [many, "its folder"]}
            assert [one.wait(60) for one in left] == [-signal.SIGTERM] * count and list(tmp_path.iterdir()) == []
        finally:
            for one in left:
                one.kill()
                one.wait()


# -- an all-reduce ----------------------------------------------------------------------------------------------------


@pytest.fixture
def reduces(agents: Agents, tmp_path: Path) -> Callable[..., tuple[dict[str, Any], Any, dict[str, str]]]:
    """Asks this host, as node 0 of one, for an all-reduce whose process does what a shell's words say: its answer, the
    task it was given, and its environment."""

    def ask(words: str, **more: Any) -> tuple[dict[str, Any], Any, dict[str, str]]:
        agents.script.write_text(f"#!/bin/sh\ncat > {tmp_path}/task; env > {tmp_path}/env\n{words}\n")
        request = {"kind": "check", "step": "reduce", "node": 0, "nodes": 1, "ranks": 2, "token": "t", "port": 29500}
        request |= {"plan": encode_plan(agents.plan()).decode(), "run_dir": str(tmp_path)} | more
        answer = host.answer(request)
        env = dict(line.partition("=")[::2] for line in (tmp_path / "env").read_text().splitlines())
        return answer, json.loads((tmp_path / "task").read_text()), env

    return ask


def test_ranks_of_an_all_reduce_are_told_who_they_are_and_what_a_person_adds(
    reduces: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HERE", "kept")
    monkeypatch.delenv(processes.RUN_ID_VARIABLE, raising=False)
    line = json.dumps({"rank": 0, "seconds": 0.5, "bytes": 8})
    answer, task, env = reduces(f"echo noise; echo '{line}'", env=["NCCL_SOCKET_IFNAME=lo", "NCCL_IB_DISABLE=1"])

    assert answer["reduced"] == [{"rank": 0, "seconds": 0.5, "bytes": 8}]
    assert (task["node"], task["nodes"], task["first"], task["ranks"], task["world"]) == (0, 1, 0, 2, 2)
    assert (task["kind"], task["bytes"], task["port"]) == ("cpu", 16 * 2**20, 29500)
    assert task["master"] == task["address"] == "127.0.0.1" and task["more_s"] == 2 / 16
    assert host.reduce_seconds(2) == 30 + 2 / 16
    assert (env["HERE"], env["NCCL_IB_DISABLE"], env["NCCL_SOCKET_IFNAME"]) == ("kept", "1", "lo")
    assert env["GLOO_SOCKET_IFNAME"] == "lo" and env[processes.RUN_ID_VARIABLE] == "t"
    assert not environment.NETWORK_DEBUG.items() <= env.items()

    monkeypatch.setenv(processes.RUN_ID_VARIABLE, "contact")
    _, _, env = reduces("true", debug=True)
    assert env[processes.RUN_ID_VARIABLE] == "contact" and environment.NETWORK_DEBUG.items() <= env.items()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("exit 3", {"rank": 0, "error": "exit 3"}),
        ("echo torch is not here >&2; exit 1", {"rank": 0, "error": "torch is not here"}),
        ('echo \'{"rank": 1, "error": "x"}\'', {"rank": 1, "error": "x"}),
    ],
)
def test_an_all_reduce_that_says_nothing_is_told_by_its_last_words(
    reduces: Callable[..., Any], words: str, said: dict[str, Any]
) -> None:
    assert reduces(words)[0]["reduced"] == [said]


def test_node_0_that_no_other_calls_says_so_and_keeps_the_port(agents: Agents, tmp_path: Path) -> None:
    port = local.free_from(OWN_PORT)
    request = {"step": "reach", "node": 0, "nodes": 1, "ranks": 2, "token": "t", "port": port, "run_dir": str(tmp_path)}
    (found,) = host.answer(request | {"plan": encode_plan(agents.plan()).decode()})["findings"]
    try:
        assert (found["check"], found["status"]) == ("port", "pass")
        assert found["measured"] == f"{port} free, 0 of 0 nodes called"
        assert local.free_from(port) != port
    finally:
        local.let_go(port)


def test_a_node_that_reaches_node_0_says_how_far_its_clock_is_from_there(
    agents: Agents,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(host, "_place", lambda asking: address.NodeAddress("127.0.0.1", "127.0.0.1", "lo"))
    request = {"step": "reach", "nodes": 2, "ranks": 1, "run_dir": str(tmp_path), "expected": (1,)}
    request |= {"token": "t", "port": local.free_from(OWN_PORT), "plan": encode_plan(agents.plan(2, 1)).decode()}
    with ThreadPoolExecutor(1) as elsewhere:
        first = elsewhere.submit(host.answer, request | {"node": 0})
        second = host.answer(request | {"node": 1})
    local.let_go(request["port"])

    assert [one["status"] for one in (*first.result()["findings"], *second["findings"])] == ["pass", "pass"]
    assert first.result()["findings"][0]["measured"] == f"{request['port']} free, 1 of 1 nodes called"
    assert second["findings"][0]["measured"].startswith(f"127.0.0.1:{request['port']} in ")
    assert first.result()["ahead_s"] is None and abs(second["ahead_s"]) < 10.0


def test_inputs_that_the_plan_has_no_digest_of_are_facts_to_compare(tmp_path: Path) -> None:
    (tmp_path / "rows").write_text("text\n")
    job = TrainingJob(recipe=Recipe(steps=1, data=str(tmp_path / "rows")))
    plan = make_plan(Layout(engine="ddp", dp_replicate=2), job=job)
    (digest,) = host._contents(plan).values()
    assert list(host._contents(plan)) == ["recipe.data"] and digest.startswith("sha256:")
    known = msgspec.structs.replace(plan, inputs=host.inputs.resolved(plan).inputs)
    assert host._contents(known) == {}


def test_a_host_s_own_checks_all_have_an_answer(agents: Agents, tmp_path: Path) -> None:
    request = {"step": "facts", "node": 0, "nodes": 1, "ranks": 2, "run_dir": str(tmp_path / "run")}
    answer = msgspec.convert(host.answer(request | {"plan": encode_plan(agents.plan()).decode()}), host.CheckReply)

    wrong = {one.check: one.rule for one in answer.findings if "could not be checked" in one.rule}
    assert wrong == {}
    names = {one.check for one in answer.findings}
    assert {"devices", "software", "memory", "shared memory", "open files", "loading", "output", "room"} <= names
    assert answer.facts["plan"] == agents.plan().content_hash
