"""Joining a run: what is refused before anything starts, and who may say which node it is. Not here: real hosts
(tests/cluster/test_join.py)."""

from __future__ import annotations

import dataclasses
import os
import socket
import subprocess
import threading
from pathlib import Path

import pytest
from msgspec.structs import replace
from scripted import Agents

from executor.folder import joining
from executor.folder.joining import Joined, NodeEnd
from executor.launchers import local
from executor.run.dryrun import DryRun, write
from executor.run.join import (
    Meeting,
    NodeRequest,
    PreparedNode,
    _ended,
    _evidence,
    _host,
    _verdict,
    check_equal,
    join,
    prepared,
)
from executor.run.launch import launch_spec
from executor.run.reap import Standing, standing
from executor.system import address
from executor.watch.rollcall import RollCall
from executor.watch.supervise import hang_up
from executor.watch.verdict import Ending, RunVerdict
from planner.basics.errors import PlannerError
from planner.spec.plan import Plan, encode_plan


@pytest.fixture
def plan(agents: Agents) -> Plan:
    """Two nodes of one rank each."""
    return agents.plan(nodes=2, processes=1)


@pytest.fixture
def folder(agents: Agents) -> Path:
    ready = agents.ready(nodes=2, processes=1)
    write(DryRun(ready, launch_spec(ready, 29500, {}), 29500, {}), ready.options.run_dir)
    return ready.options.run_dir


@pytest.mark.parametrize(
    ("text", "host", "port"),
    [
        ("node1", "node1", None),
        ("node1:29500", "node1", 29500),
        ("10.0.0.1:1", "10.0.0.1", 1),
        ("fe80::1", "fe80::1", None),
        ("[fe80::1]:29500", "fe80::1", 29500),
        ("a_b.example", "a_b.example", None),
    ],
)
def test_a_master_is_a_host_and_perhaps_a_port(text, host, port):
    assert address.Master.parse(text) == address.Master(host, port)


@pytest.mark.parametrize(
    "text",
    ["", ":29500", "node1:", "node1:0", "node1:65536", "node1:x", "-oProxyCommand=x", "a b", "a;b", "$(x)", "a\n"],
)
def test_anything_else_is_no_master(text):
    with pytest.raises(PlannerError, match="--master"):
        address.Master.parse(text)


def test_one_node_needs_no_master_and_two_need_one_that_others_reach():
    assert address.find(None, 0, 1).master == "127.0.0.1"
    with pytest.raises(PlannerError, match=r"--master: is not given, and node 1 has to reach node 0"):
        address.find(None, 1, 2)
    with pytest.raises(PlannerError, match=r"no other node reaches"):
        address.find(address.Master("127.0.0.1"), 0, 2)


def refusal(folder: Path, node: int = 0, **asked: object) -> PlannerError:
    with pytest.raises(PlannerError) as caught:
        prepared(folder, NodeRequest(node, **asked), lambda _: None)
    assert caught.value.field.startswith(f"{socket.gethostname()}: ")
    return caught.value


def test_a_folder_that_is_no_run_or_another_one_is_refused(folder, plan, tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    assert "holds no plan.json" in refusal(bare).sentence
    assert refusal(folder, 2).sentence.endswith("Give each host a number of its own, from 0 to 1.")

    found = joining.read(folder)
    joining.write(folder, replace(found, code="sha256:" + "0" * 64))
    assert (other := refusal(folder)).exit_code == 3 and "made by other code" in other.rule
    joining.write(folder, found)

    recipe = replace(plan.job.recipe, steps=plan.job.recipe.steps + 1)
    changed = replace(plan, job=replace(plan.job, recipe=recipe)).sealed()
    (folder / "plan.json").write_bytes(encode_plan(changed))
    assert (other := refusal(folder)).exit_code == 3 and "is another plan" in other.rule
    (folder / "join.json").unlink()
    assert "holds no join.json" in refusal(folder).sentence


def test_a_folder_that_waits_for_its_nodes_is_said_to_stand_so(folder):
    assert standing(folder) == Standing("not started", "no node has joined")
    joining.claim(folder, Joined(node=0, host="red", process="1:1", refusal="no data"))
    joining.claim(folder, Joined(node=1, host="blue", process="1:1"))
    assert standing(folder) == Standing("joined", "node 1 on blue")
    end = NodeEnd(status="completed", exit_code=0, message="")
    joining.update(folder, Joined(node=1, host="blue", process="1:1", end=end))
    assert standing(folder) == Standing("joined", "node 1 on blue (completed)")


def test_a_secret_of_the_folder_is_asked_of_every_host(folder):
    found = joining.read(folder)
    kept = joining.without_secrets({"HF_TOKEN": "hidden", "PROXY": "http://me:hidden@host", "PGPASSWORD": "hidden"})
    assert kept == {"HF_TOKEN": None, "PROXY": None, "PGPASSWORD": None}
    wanted = replace(found, environment=kept)
    here = {"HF_TOKEN": "t", "PROXY": "p", "FOO": "not asked for"}
    own = {"PGPASSWORD": "own"}
    assert joining.environment_of(kept, own, here) == {"HF_TOKEN": "t", "PROXY": "p", "PGPASSWORD": "own"}
    joining.write(folder, wanted)
    assert "--env=HF_TOKEN: is not set here" in refusal(folder, master="127.0.0.1").sentence


def test_values_of_secrets_are_this_hosts_own_unless_they_are_typed():
    wanted = {"HF_TOKEN": None, "FOO": "bar"}

    assert joining.environment_of(wanted, {}, {"HF_TOKEN": "t", "FOO": "x"}) == {"HF_TOKEN": "t", "FOO": "bar"}
    assert joining.environment_of(wanted, {"HF_TOKEN": "typed"}, {}) == {"HF_TOKEN": "typed", "FOO": "bar"}
    with pytest.raises(PlannerError, match="--env=HF_TOKEN: is not set here"):
        joining.environment_of(wanted, {"FOO": "own"}, {})


def test_a_node_is_claimed_once_but_for_one_that_was_refused(tmp_path):
    first = Joined(node=0, host="red", process="1:1")
    joining.claim(tmp_path, replace(first, refusal="no data"))
    joining.claim(tmp_path, first)
    with pytest.raises(PlannerError, match=r"--node-rank=0: has joined .* already from red"):
        joining.claim(tmp_path, replace(first, host="blue"))
    joining.refused(tmp_path, replace(first, host="blue", refusal="no data"))
    assert joining.read_joined(tmp_path) == {0: first}
    joining.update(tmp_path, replace(first, end=NodeEnd(status="completed", exit_code=0, message="")))
    assert joining.read_joined(tmp_path)[0].end is not None
    assert [path.name for path in (tmp_path / "joined").iterdir()] == ["node-0.json"]


def test_other_packages_and_other_contents_on_another_node_are_refused_by_name():
    red = Joined(
        node=0, host="red", process="1:1", versions={"python": "3.11", "torch": "2.13"}, contents={"data": "a"}
    )
    blue = replace(red, node=1, host="blue", versions={"python": "3.12", "torch": "2.13"})
    check_equal(blue, red)
    with pytest.raises(PlannerError, match=r"^node 1=blue: has torch 2\.12, and red has 2\.13\. Install the same"):
        check_equal(replace(blue, versions={"torch": "2.12"}), red)
    with pytest.raises(PlannerError, match=r"^node 1=blue: has recipe\.data b, and red has a\. Give every node"):
        check_equal(replace(blue, contents={"data": "b"}), red)


def test_a_port_that_another_program_has_is_refused_where_node_0_is(folder, plan, tmp_path):
    found = joining.read(folder)
    with socket.socket() as thief:
        thief.bind(("", 0))
        one = replace(plan, cluster=replace(plan.cluster, nodes=1, gpus_per_node=2)).sealed()
        (folder / "plan.json").write_bytes(encode_plan(one))
        joining.write(folder, replace(found, plan_hash=one.content_hash, port=thief.getsockname()[1]))
        taken = refusal(folder)
    assert taken.exit_code == 4 and "is taken on this host" in taken.rule and "--master HOST:PORT" in taken.fix


def test_a_reader_that_goes_away_is_a_hang_up_and_a_file_has_none(tmp_path):
    reading, writing = os.pipe()
    signals: list[int] = []
    with hang_up(signals, writing), (tmp_path / "log").open("w") as log, hang_up(quiet := [], log.fileno()):
        subprocess.run(["sleep", "0.5"], check=True)
        assert not signals
        os.close(reading)
        subprocess.run(["sleep", "0.5"], check=True)
    os.close(writing)
    assert [signal.name for signal in signals] == ["SIGHUP"] and not quiet


# -- nodes that wait for each other -----------------------------------------------------------------------------------

PLACE = address.NodeAddress("10.0.0.1", "10.0.0.2", "eth0")
RED = Joined(node=0, host="red", process="1:1", versions={"torch": "2.13"})
BLUE = replace(RED, node=1, host="blue")


def node(agents: Agents, folder: Path, number: int, **more: object) -> PreparedNode:
    """A node of two of one rank each, whose claim stands in the folder."""
    ready = agents.ready(nodes=2, processes=1, **more.pop("options", {}))  # type: ignore[arg-type]
    hosts = local.LaunchedNodes("join", tuple(_host(one, NodeRequest(number, host="here"), PLACE) for one in (0, 1)))
    claim = (RED, BLUE)[number]
    joining.claim(folder, claim)
    made = dataclasses.replace(ready, node=number, hosts=hosts)
    return PreparedNode(made, PLACE, 29500, claim, **more)  # type: ignore[arg-type]


def test_a_node_is_this_host_at_its_own_address_and_others_are_elsewhere() -> None:
    for asked, name in ((NodeRequest(1, host="blue"), "blue"), (NodeRequest(1), socket.gethostname())):
        assert _host(1, asked, PLACE) == local.LaunchedNode(1, name, "10.0.0.2", "eth0")
    assert _host(0, NodeRequest(1), PLACE) == local.LaunchedNode(0, "node-0", "10.0.0.1", None, here=False)
    assert _host(2, NodeRequest(1), PLACE) == local.LaunchedNode(2, "node-2", "node-2", None, here=False)
    assert _host(0, NodeRequest(0), address.NodeAddress("10.0.0.1", "10.0.0.1", "")).interface is None


def test_a_node_has_met_once_all_its_own_ranks_say_so(agents: Agents, folder: Path) -> None:
    meeting = Meeting(node(agents, folder, 1))
    (folder / "mesh" / "rank-0.json").write_text("{}")
    assert not meeting.complete()
    (folder / "mesh" / "rank-1.json").write_text("{}")
    assert meeting.complete()

    both = agents.ready(nodes=1, processes=2)
    wide = Meeting(PreparedNode(dataclasses.replace(both, options=meeting.node.ready.options), PLACE, 29500, RED))
    assert wide.complete()
    (folder / "mesh" / "rank-0.json").unlink()
    assert not wide.complete()


def test_ranks_of_a_script_have_met_once_they_are_started_and_a_launched_node_waits_for_nobody(
    agents: Agents,
    folder: Path,
) -> None:
    scripted = Meeting(node(agents, folder, 1, options={"script": ("train.py",)}))
    assert not scripted.complete()
    for number in (0, 1):
        assert not scripted.complete()
        (log := folder / "logs" / f"node-{number}" / "run" / "attempt_0" / "0" / "stderr.log").parent.mkdir(
            parents=True
        )
        log.touch()
    assert scripted.complete()
    (folder / "joined" / "node-0.json").unlink(missing_ok=True)
    assert Meeting(node(agents, folder, 0, launched=True)).complete()


@pytest.mark.parametrize(
    ("other", "refused"),
    [
        (RED, ""),
        (replace(RED, end=NodeEnd(status="completed", exit_code=0, message="")), ""),
        (replace(RED, refusal="has no data"), "node 0=red: cannot join: has no data"),
        (
            replace(RED, end=NodeEnd(status="x", exit_code=5, message="rank 0 died")),
            "ended before all ranks had met: rank 0",
        ),
        (replace(RED, versions={"torch": "2.12"}), "node 0=red: has torch 2.12, and blue has 2.13"),
    ],
)
def test_a_node_that_waits_hears_of_another_that_never_comes_and_not_of_itself(
    agents: Agents,
    folder: Path,
    other: Joined,
    refused: str,
) -> None:
    meeting = Meeting(node(agents, folder, 1))
    joining.claim(folder, other)
    joining.update(folder, replace(BLUE, end=NodeEnd(status="x", exit_code=5, message="said of itself")))
    if not refused:
        assert meeting.complete() is False
    else:
        with pytest.raises(PlannerError, match=refused):
            meeting.complete()
    joining.update(folder, replace(RED, refusal="has no data"))
    assert meeting.complete() is False  # others are not looked at again within a second


def test_nodes_that_did_not_come_are_named_by_node_0_and_node_0_by_the_others(
    agents: Agents,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first = Meeting(node(agents, folder, 0))
    assert first.absent() == "node 1 (rank 1) has not joined, as far as this folder on red shows"
    assert first.hosts() == {0: "red"}
    wide = dataclasses.replace(first.node.ready, processes=2)
    assert "node 1 (ranks 2-3) has" in Meeting(dataclasses.replace(first.node, ready=wide)).absent()
    last = Meeting(node(agents, folder, 1))
    assert first.absent() == last.absent() == "" and last.hosts() == {0: "red", 1: "blue"}

    asked = []
    monkeypatch.setattr(address, "answers", lambda *where: asked.append(where) or "does not answer")
    (folder / "joined" / "node-0.json").unlink()
    assert last.absent() == "node 0 at 10.0.0.1:29500 does not answer"
    assert asked == [(PLACE, 29500)]
    monkeypatch.setattr(address, "answers", lambda *where: "")
    assert last.absent() == ""


def test_node_0_judges_by_all_nodes_of_its_folder_and_another_by_its_own_ranks(agents: Agents, folder: Path) -> None:
    first, last = node(agents, folder, 0), node(agents, folder, 1)
    ending, roll = Ending(ok=False), RollCall(folder, 1, dict, print)

    def elsewhere(one: PreparedNode) -> frozenset[int]:
        found = _evidence(one, ending, None, None, roll)
        assert list(found.hosts) == ["red", "blue"] and found.awaited == ""
        return found.elsewhere

    assert (elsewhere(first), elsewhere(last)) == (frozenset(), frozenset({0}))
    assert elsewhere(dataclasses.replace(first, launched=True)) == frozenset({1})
    assert (
        "were not started"
        in _evidence(
            last,
            Ending(ok=False, timed_out=True),
            None,
            None,
            RollCall(folder, 1, lambda: {0: "red", 1: "blue"}, print),
        ).awaited
    )


def test_how_a_node_ended_is_said_beside_what_it_said_before(agents: Agents, folder: Path) -> None:
    one = node(agents, folder, 1)
    joining.update(folder, replace(BLUE, argv=("agent",)))
    end = NodeEnd(status="hung", exit_code=8, message="m", cause="c")
    assert _ended(one, RunVerdict("hung", 8, "m", 3, "c")) == replace(BLUE, argv=("agent",), end=end)
    (folder / "joined" / "node-1.json").unlink()
    assert _ended(one, RunVerdict("hung", 8, "m", 3, "c")) == replace(BLUE, end=end)


@pytest.mark.parametrize(
    ("asked", "host"), [(NodeRequest(0, host="red"), "red"), (NodeRequest(0), socket.gethostname())]
)
def test_a_refusal_begins_with_the_name_that_the_host_was_given_or_its_own(
    tmp_path: Path, asked: NodeRequest, host: str
) -> None:
    with pytest.raises(PlannerError) as refused:
        join(tmp_path, asked, print)
    assert refused.value.field.startswith(f"{host}: ")


@pytest.mark.parametrize("cause", ["interrupted", ""])
def test_a_node_that_failed_waits_for_what_others_say_and_their_person_s_signal_is_the_story(
    agents: Agents,
    folder: Path,
    cause: str,
) -> None:
    first, _ = node(agents, folder, 0), node(agents, folder, 1)

    def says_last() -> None:
        while joining.read_joined(folder)[0].end is None:
            pass
        end = NodeEnd(status="x", exit_code=130, message="stopped by SIGINT", cause=cause)
        joining.update(folder, replace(BLUE, end=end))

    other = threading.Thread(target=says_last, daemon=True)
    other.start()
    found = _verdict(first, Ending(ok=False), None, None, RollCall(folder, 1, dict, print))
    other.join(60)

    own = joining.read_joined(folder)[0].end
    assert own is not None and (own.status, own.exit_code) == ("launch failed", 4)
    assert (found.exit_code, found.message) == (
        (130, "stopped by SIGINT on blue") if cause else (own.exit_code, own.message)
    )
