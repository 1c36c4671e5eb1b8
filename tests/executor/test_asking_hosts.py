"""Three questions to hosts whose answers are written down here: who is asked what, and what follows.

Not here: real hosts (tests/cluster/test_check.py), or comparing answers (test_checks.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from test_rundir import make_plan

from executor.folder import joining
from executor.hosts import ssh
from executor.hosts.checks.check import ASK_S, HERE, CheckTable, checked
from executor.hosts.checks.host import REDUCED_BYTES, CheckReply, reduce_seconds
from executor.preflight.findings import Finding
from executor.run.prepare import RunOptions
from planner.basics.errors import PlannerError
from planner.calibrate.collective import call_seconds
from planner.spec import Layout
from planner.spec.calibration import calibration
from planner.spec.plan import Plan

PLAN = make_plan(Layout(engine="ddp", dp_replicate=2))
FACTS = {"code": joining.code_digest(), "plan": PLAN.content_hash}


@dataclass
class Hosts:
    """Answers by question and node; None is a host that does not answer. Keeps who was asked what."""

    failing: dict[str, dict[int, str]] = field(default_factory=dict)
    """By question, then node: the check that fails."""
    silent: dict[str, set[int]] = field(default_factory=dict)
    seconds: float = 0.001
    asked: list[tuple[str, list[int], float]] = field(default_factory=list)
    requests: list[dict[str, Any]] = field(default_factory=list)

    def ask(self, requests: dict[int, dict[str, Any]], timeout_s: float) -> Iterator[ssh.HostReply]:
        step = next(iter(requests.values()))["step"]
        self.asked.append((step, list(requests), timeout_s))
        for node, request in requests.items():
            self.requests.append(request)
            if node in self.silent.get(step, set()):
                silence = PlannerError("answer", None, "does not answer", "Look at it", exit_code=3)
                yield ssh.HostReply(node, HERE, error=silence)
                continue
            failing = self.failing.get(step, {}).get(node)
            findings = [Finding(check=failing, status="fail", rule="is wrong", fix="Mend it")] if failing else []
            ranks = range(request["ranks"]) if step == "reduce" else ()
            reduced = [{"rank": rank, "seconds": self.seconds, "bytes": REDUCED_BYTES} for rank in ranks]
            facts = FACTS if step == "facts" else {}
            ahead_s = float(node) if step == "reach" else None
            yield ssh.HostReply(
                node,
                HERE,
                msgspec.to_builtins(
                    CheckReply(node=node, host="?", findings=findings, facts=facts, ahead_s=ahead_s, reduced=reduced)
                ),
            )


def ask(hosts: Hosts, names: tuple[str, ...] = ("a", "b", "c"), plan: Plan = PLAN, **more: Any) -> CheckTable:
    return checked(
        hosts, names, plan, RunOptions(Path("run"), 1), **({"ranks": 2, "master": "10.0.0.1", "port": 1} | more)
    )


def steps(hosts: Hosts) -> list[tuple[str, list[int]]]:
    return [(step, nodes) for step, nodes, _ in hosts.asked]


def of(found: CheckTable, check: str) -> list[tuple[int, str]]:
    return [(row.node, row.status) for row in found.rows if row.check == check]


def test_hosts_that_agree_are_asked_all_three_questions_and_may_start() -> None:
    hosts = Hosts()

    found = ask(hosts)

    assert steps(hosts) == [("facts", [0, 1, 2]), ("reach", [0, 1, 2]), ("reduce", [0, 1, 2])]
    assert [seconds for *_, seconds in hosts.asked] == [ASK_S["facts"], ASK_S["reach"], reduce_seconds(6) + 10]
    assert list(found.seconds) == ["facts", "reach", "reduce"] and found.failed == []
    assert of(found, "clock") == [(0, "pass"), (1, "warn"), (2, "warn")]
    assert {row.host for row in found.rows} == {"a", "b", "c"}
    assert [row.check for row in found.rows] == [n for n in ("code", "plan", "clock", "all-reduce") for _ in range(3)]
    first, second = hosts.requests[0], hosts.requests[4]
    assert (first["nodes"], first["ranks"], first["expected"], second["node"]) == (3, 2, (1, 2), 1)
    assert first["token"] == second["token"] and first["port"] == 1 and first["master"] == "10.0.0.1"


@pytest.mark.parametrize(
    ("failing", "questions"),
    [
        ({"facts": {2: "master"}}, [("facts", [0, 1, 2]), ("reach", [0, 1])]),
        ({"facts": {0: "interface"}}, [("facts", [0, 1, 2])]),
        ({"facts": {1: "software"}}, [("facts", [0, 1, 2]), ("reach", [0, 1, 2])]),
        ({"facts": {1: "data"}}, [("facts", [0, 1, 2]), ("reach", [0, 1, 2]), ("reduce", [0, 1, 2])]),
        ({"reach": {1: "reach"}}, [("facts", [0, 1, 2]), ("reach", [0, 1, 2])]),
        ({"reach": {0: "port"}}, [("facts", [0, 1, 2]), ("reach", [0, 1, 2])]),
    ],
    ids=str,
)
def test_a_check_that_fails_leaves_out_the_questions_that_need_it(
    failing: dict[str, dict[int, str]], questions: list[tuple[str, list[int]]]
) -> None:
    hosts = Hosts(failing)

    found = ask(hosts)

    assert steps(hosts) == questions
    expected = "pass" if ("reduce", [0, 1, 2]) in questions else "skip"
    assert of(found, "all-reduce") == [(node, expected) for node in range(3)]
    assert len(found.failed) == 1


@pytest.mark.parametrize(("question", "check"), [("facts", "answer"), ("reach", "reach"), ("reduce", "all-reduce")])
def test_a_host_that_does_not_answer_hides_no_other_and_fails_the_check_of_the_question(question: str, check: str):
    found = ask(Hosts(silent={question: {1}}))

    assert [(row.node, row.check, row.host) for row in found.failed] == [(1, check, "b")]
    assert (0, "pass") in of(found, "code") and (2, "pass") in of(found, "code")


def test_one_host_needs_no_meeting_and_one_rank_no_all_reduce() -> None:
    alone, single, unasked, unmet = Hosts(), Hosts(), Hosts(), Hosts()

    ask(alone, ("a",), master=None)
    ask(single, ("a",), ranks=1, master=None)
    ask(unasked, all_reduce=False)
    found = ask(unmet, master=None)

    assert steps(alone) == [("facts", [0]), ("reduce", [0])]
    assert steps(single) == [("facts", [0])]
    assert steps(unasked) == [("facts", [0, 1, 2]), ("reach", [0, 1, 2])]
    assert steps(unmet) == [("facts", [0, 1, 2])] and of(found, "all-reduce") == [(node, "skip") for node in range(3)]


@pytest.mark.parametrize(("times", "status"), [(1.0, "pass"), (1.99, "pass"), (2.01, "warn")])
def test_an_all_reduce_more_than_twice_as_slow_as_the_links_is_doubted(times: float, status: str) -> None:
    predicted = call_seconds(PLAN.cluster, 2, "all_reduce", REDUCED_BYTES, calibration())

    found = ask(Hosts(seconds=times * predicted), ("a",), master=None)

    assert of(found, "all-reduce") == [(0, status)]


def test_doubts_are_told_and_the_first_failure_is_the_refusal() -> None:
    said: list[str] = []
    found = ask(Hosts({"facts": {1: "software", 2: "devices"}}))

    with pytest.raises(PlannerError, match="b: software") as caught:
        found.require(said.append)

    assert caught.value.exit_code == 3
    assert [line.partition(":")[0] for line in said] == ["note", "note", "error"] and "c: devices" in said[-1]
    ask(Hosts()).require(said.append)


def test_an_answer_of_another_version_is_a_failure_of_its_host() -> None:
    class Older(Hosts):
        def ask(self, requests: dict[int, dict[str, Any]], timeout_s: float) -> Iterator[ssh.HostReply]:
            for one in super().ask(requests, timeout_s):
                yield ssh.HostReply(one.place, HERE, {"node": "x"}) if one.place == 1 else one

    found = ask(Older())

    assert [(row.node, row.check) for row in found.failed] == [(1, "answer")]
    assert "is of another version" in found.failed[0].rule
