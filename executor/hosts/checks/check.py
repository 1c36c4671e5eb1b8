"""Check every host of a plan in three rounds, and compare their answers: facts, then who reaches node 0, then an
all-reduce over all ranks. A host that does not answer hides no other.

Works over any contact with the hosts, one that starts processes elsewhere or this machine alone. Not here: what a host
answers (host.py), what follows of the answers (compare.py), or how hosts are reached (ssh.py).
"""

from __future__ import annotations

import os
import secrets
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec

from executor.folder import joining
from executor.hosts import ssh
from executor.hosts.checks import compare, host
from executor.hosts.checks.host import CheckReply, CheckRequest
from executor.hosts.hosts import HostEntry
from executor.launchers import local
from executor.preflight.findings import Finding, NodeFinding
from executor.run.prepare import RunOptions
from executor.system import address
from executor.system.environment import added, is_secret
from executor.system.frames import Message
from executor.watch.supervise import Echo
from planner.basics.errors import PlannerError
from planner.calibrate.collective import call_seconds
from planner.spec.calibration import calibration
from planner.spec.plan import Plan, encode_plan

LOOK_S = 15.0
ASK_S = {"facts": 60.0, "reach": 15.0}
"""Longest waits for one answer; a host's own files may be large."""
ROWS = {"facts": "answer", "reach": "reach", "reduce": "all-reduce"}
"""The check that a host fails which has no answer to a question."""
PASSED_ON = ("NCCL_", "GLOO_", "TORCH_NCCL_")
"""Variables of --env that change how ranks reach each other."""
NEEDED = {"reach": ("master", "interface"), "reduce": ("master", "interface", "software", "devices")}
"""Checks without which a later question has no answer."""
HERE = HostEntry("this machine")


class Transport(Protocol):
    """A way to reach hosts: sends the requests of all nodes at once, and yields replies in the order they arrive."""

    def ask(self, requests: dict[int, dict[str, Any]], timeout_s: float) -> Iterable[ssh.HostReply]:
        """Every host's answer or error, once."""


class ThisMachine:
    """The contact with this machine alone, as node 0."""

    def ask(self, requests: dict[int, dict[str, Any]], timeout_s: float) -> Iterator[ssh.HostReply]:
        """Its answer."""
        for place, request in requests.items():
            try:
                yield ssh.HostReply(place, HERE, host.answer(request))
            except PlannerError as error:
                yield ssh.HostReply(place, HERE, error=error)


@dataclass(frozen=True)
class CheckTable:
    """All rows, in the order of checks, then nodes; how long each question took."""

    rows: tuple[NodeFinding, ...]
    seconds: dict[str, float]

    @property
    def failed(self) -> list[NodeFinding]:
        """Rows that keep a run from starting."""
        return [one for one in self.rows if one.status == "fail"]

    def require(self, echo: Echo) -> None:
        """Tell doubts, and all failed rows but the first; raise that one as a refusal that begins with its host."""
        for one in self.rows:
            if one.status == "warn":
                echo(f"note: {one.error.sentence}")
        for one in self.failed[1:]:
            echo(f"error: {one.error.sentence}")
        for one in self.failed:
            raise one.error


def checked(
    contact: Transport,
    names: Sequence[str],
    plan: Plan,
    options: RunOptions,
    *,
    ranks: int,
    master: str | None = None,
    port: int = 0,
    all_reduce: bool = True,
    debug: bool = False,
    copied: bool = False,
) -> CheckTable:
    """Every row of a plan on the hosts `names`, node 0 first, each of which starts `ranks`. `copied`: hosts that do not
    see the run folder are given one of their own."""
    request = _request(plan, options, ranks, len(names), master, port, debug=debug)
    asking = _Asking(contact, names, msgspec.structs.replace(request, copied=copied))
    rows, here = list[NodeFinding](), {"code": joining.code_digest(), "plan": plan.content_hash}
    facts = asking.step("facts", range(len(names)), rows)
    rows += compare.rows_of_facts(facts, here) + compare.rows_of_findings(facts)
    if len(names) > 1 and master is not None and 0 in (able := _able(facts, "reach")):
        reached = asking.step("reach", able, rows)
        rows += compare.rows_of_findings(reached) + compare.rows_of_clocks(reached)
    every = (master is not None or len(names) == 1) and len(_able(facts, "reduce")) == len(names)
    reach = [one for one in rows if one.check in ("reach", "port") and one.status == "fail"]
    if all_reduce and every and not reach and ranks * len(names) > 1:
        reduced = asking.step("reduce", range(len(names)), rows)
        rows += compare.rows_of_reduce(reduced, ranks, _predicted(plan, ranks * len(names)))
    elif all_reduce and ranks * len(names) > 1:
        why = Finding(check="all-reduce", status="skip", measured="skipped: an earlier check failed")
        rows += [compare.row(why, node, name) for node, name in enumerate(names)]
    return CheckTable(_ordered(rows), asking.seconds)


@dataclass
class _Asking:
    contact: Transport
    names: Sequence[str]
    request: CheckRequest
    seconds: dict[str, float] = field(default_factory=dict)

    def step(self, step: str, nodes: Iterable[int], rows: list[NodeFinding]) -> dict[int, CheckReply]:
        """Ask these nodes one question; those without an answer become rows."""
        began, answers, errors = time.monotonic(), dict[int, CheckReply](), dict[int, PlannerError]()
        asked = sorted(nodes)
        requests = {}
        for node in asked:
            others = tuple(one for one in asked if one)
            one = msgspec.structs.replace(self.request, step=step, node=node, expected=others)
            requests[node] = msgspec.to_builtins(one)
        for said in self.contact.ask(
            requests, ASK_S.get(step) or host.reduce_seconds(len(self.names) * self.request.ranks) + 10
        ):
            found, error = _read(said)
            if found is not None:
                answers[said.place] = msgspec.structs.replace(found, host=self.names[said.place])
            else:
                assert error is not None
                errors[said.place] = error
        rows += compare.rows_of_refusals(errors, self.names, ROWS[step])
        self.seconds[step] = round(time.monotonic() - began, 2)
        return answers


def _read(said: ssh.HostReply) -> tuple[CheckReply | None, PlannerError | None]:
    if said.value is None:
        return None, said.error
    try:
        return msgspec.convert(said.value, CheckReply), None
    except msgspec.ValidationError as error:
        rule, fix = f"is of another version ({error})", "Install the same meshwright on every node"
        return None, PlannerError("answer", None, rule, fix, exit_code=3)


def _request(
    plan: Plan, options: RunOptions, ranks: int, nodes: int, master: str | None, port: int, *, debug: bool
) -> CheckRequest:
    given = added(options.env, os.environ)
    env = [f"{name}={value}" for name, value in given.items() if name.startswith(PASSED_ON) and not is_secret(name)]
    token = secrets.token_hex(16)
    return CheckRequest(
        step="facts",
        node=0,
        nodes=nodes,
        ranks=ranks,
        plan=encode_plan(plan).decode(),
        run_dir=str(options.run_dir.absolute()),
        save_weights=options.save_weights,
        script=options.script,
        tool=options.tool,
        env=tuple(env),
        master=master,
        port=port or local.hold_port(local.LaunchedNodes("join", ()), token).number,
        token=token,
        debug=debug,
        place=options.place,
    )


def _able(facts: Mapping[int, CheckReply], step: str) -> list[int]:
    """The nodes that can take part in a later question."""
    return [
        node
        for node, one in sorted(facts.items())
        if not any(found.check in NEEDED[step] and found.status == "fail" for found in one.findings)
    ]


def _predicted(plan: Plan, ranks: int) -> float | None:
    """Seconds of the all-reduce by the plan's links, None where it has none of such a group."""
    if ranks > plan.cluster.gpus:
        return None
    return call_seconds(plan.cluster, ranks, "all_reduce", host.REDUCED_BYTES, calibration())


ORDER = (
    "answer", "code", "plan", "python", "torch", "nccl", "accelerate", "deepspeed", "transformers", "peft",
    "bitsandbytes", "meshwright", "software", "versions", "devices", "GPU", "driver", "GPU memory", "memory",
    "loading", "shared memory", "locked memory", "open files", "tokenizer", "data", "validation data", "checkpoint",
    "output", "room", "master", "interface", "port", "reach", "clock", "all-reduce",
)  # fmt: skip
"""Checks as a table shows them; others (contents of inputs) come after the data."""


def _ordered(rows: list[NodeFinding]) -> tuple[NodeFinding, ...]:
    places = {name: place for place, name in enumerate(ORDER)}
    return tuple(sorted(rows, key=lambda one: (places.get(one.check, places["checkpoint"] + 0.5), one.check, one.node)))


def place_of(contact: ssh.Connections, master: str | None) -> tuple[list[NodeFinding], str | None, int]:
    """(failed rows where the hosts have no address to meet at, node 0's address as far as it is known, its port).
    `master` is node 0's HOST[:PORT] where a person gave one."""
    asked = contact.ask({"kind": "look", "port": local.FIRST_PORT}, LOOK_S)
    looks = {said.place: said.value for said in asked if said.value is not None}
    rows = [] if master else _meeting(looks, [one.name for one in contact.machines])
    return rows, *_place(looks, master, rows)


def _meeting(looks: dict[int, Message], names: Sequence[str]) -> list[NodeFinding]:
    """A failed row where the hosts have no address to meet at."""
    if 0 not in looks or len(names) < 2:
        return []
    try:
        ssh.choose_master(looks)
    except PlannerError as error:
        return compare.rows_of_refusals({0: error}, names, "master")
    return []


def _place(looks: dict[int, Message], master: str | None, rows: list[NodeFinding]) -> tuple[str | None, int]:
    """The address of node 0, if it is known."""
    if 0 not in looks or rows:
        return None, 0
    port = int(looks[0]["port"])
    if master:
        named = address.Master.parse(master)
        return named.host, named.port or port
    return ssh.choose_master(looks)[0] if len(looks) > 1 else None, port
