"""One host's answers for a plan: its own checks, and facts that are compared with those of other hosts.

A request and an answer are JSON; the function runs on the host, whatever brought the request there. Not here: the
checks of one machine (executor.run.prepare), or what follows of all answers (compare.py).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import msgspec

from executor.folder import joining
from executor.hosts import boot, node
from executor.hosts.checks import network
from executor.launchers import local
from executor.preflight.causes import cause
from executor.preflight.findings import Finding, asked
from executor.preflight.preflight import Check, visible_cards
from executor.run.prepare import RunOptions, check_room, host_checks
from executor.system import address, environment, facts
from executor.system.processes import RUN_ID_VARIABLE
from planner.basics.errors import PlannerError
from planner.basics.output import check_folder
from planner.basics.quantities import format_seconds
from planner.spec import inputs
from planner.spec.plan import Plan, decode_plan

SCHEMA = "host-check/1"
NCCL_PACKAGES = ("nvidia-nccl-cu11", "nvidia-nccl-cu12", "nvidia-nccl-cu13")
"""What brings the NCCL that torch loads."""
REDUCE_S, RANK_S = 30.0, 1 / 16
"""Most seconds of the all-reduce, with its imports, and what each rank adds: NCCL takes longer to join many."""
REDUCED_BYTES = 16 * 2**20


class CheckRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The questions to the host that is `node` and starts `ranks`. `plan` is plan.json, `master` node 0's address,
    `expected` the nodes that will call node 0.

    `copied`: a host that does not see `run_dir` keeps the run's files in `place`, or in its user's cache.
    """

    kind: str = "check"
    step: Literal["facts", "reach", "reduce"]
    node: int
    nodes: int
    ranks: int
    plan: str
    run_dir: str
    save_weights: bool = True
    script: tuple[str, ...] = ()
    tool: str = ""
    env: tuple[str, ...] = ()
    master: str | None = None
    port: int = 0
    token: str = ""
    expected: tuple[int, ...] = ()
    debug: bool = False
    copied: bool = False
    place: str | None = None


class CheckReply(msgspec.Struct, frozen=True, kw_only=True):
    """`facts` are compared by name between the nodes; `ahead_s` is how far this clock is ahead of node 0's, `reduced`
    what each of this host's ranks said of the all-reduce."""

    schema: str = SCHEMA
    node: int
    host: str
    findings: list[Finding] = []
    facts: dict[str, str] = {}
    ahead_s: float | None = None
    reduced: list[dict[str, Any]] = []


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """One step's answer of this host. PlannerError for a request that is none, or a plan that cannot be read here."""
    try:
        asking = msgspec.convert(request, CheckRequest)
    except msgspec.ValidationError as error:
        fix = "Use the same meshwright on every node"
        raise PlannerError("request", None, f"is not of this version ({error})", fix, exit_code=3) from None
    plan = decode_plan(asking.plan.encode())
    steps = {"facts": _facts, "reach": _reach, "reduce": _reduce}
    found: CheckReply = steps[asking.step](asking, plan)
    made: dict[str, Any] = msgspec.to_builtins(found)
    return made


def _facts(asking: CheckRequest, plan: Plan) -> CheckReply:
    """This host's own checks, and what is compared."""
    options = RunOptions(
        _kept_in(asking),
        asking.nodes,
        save_weights=asking.save_weights,
        script=asking.script,
        tool=asking.tool,
        env=asking.env,
    )
    checks = [*host_checks(plan, options, asking.ranks, every_line=asking.node == 0)]
    checks += [
        Check("output", lambda: check_folder(options.run_dir, "--run-dir")),
        Check("room", lambda: _room(asking, plan, options)),
        Check("master", lambda: "n/a" if _unknown(asking) else _place(asking).master),
        Check("interface", lambda: _interface(asking, plan)),
    ]
    known = versions() | {"code": joining.code_digest(), "plan": plan.content_hash} | _contents(plan) | _cards(asking)
    return CheckReply(node=asking.node, host=socket.gethostname(), findings=asked(checks), facts=known)


def _reach(asking: CheckRequest, plan: Plan) -> CheckReply:
    """Node 0 listens on the run's port, the others call it."""
    ahead: list[float] = []
    check = Check("reach", lambda: _called(asking, plan, ahead))
    if asking.node == 0:  # bound and listening before anything else is done: the others call at the same time
        check = Check("port", lambda: _listened(asking))
    found = asked([check])
    return CheckReply(node=asking.node, host=socket.gethostname(), findings=found, ahead_s=ahead[0] if ahead else None)


def _listened(asking: CheckRequest) -> str:
    missing = network.Listener(asking.port, asking.token, frozenset(asking.expected)).wait()
    local.keep(asking.port)  # for the run that may follow
    return f"{asking.port} free, {len(asking.expected) - len(missing)} of {len(asking.expected)} nodes called"


def _called(asking: CheckRequest, plan: Plan, ahead: list[float]) -> str:
    place = _place(asking)
    chosen = network.interface(place, plan.cluster.gpu.kind, environment.added(asking.env, os.environ))
    source = _source(place, chosen)
    try:
        found = network.call(place, asking.port, asking.token, asking.node, source)
    except PlannerError as error:
        if chosen == place.interface:
            raise
        rule = f"{error.rule}, from {source}, which {chosen} has; the interface on the way there is {place.interface}"
        fix = f"Leave {chosen} out of --env, or give {place.interface}"
        raise PlannerError(error.field, error.value, rule, fix, exit_code=3) from None
    ahead.append(found.ahead_s)
    return f"{place.master}:{asking.port} in {format_seconds(found.round_trip_s)}"


def _source(place: address.NodeAddress, chosen: str) -> str:
    """The address that ranks on an interface have, of the family of node 0's."""
    if chosen == place.interface:
        return place.address
    six = ":" in place.address
    own = address.addresses().items()
    return next((one for one, name in own if name == chosen and (":" in one) == six), place.address)


def _reduce(asking: CheckRequest, plan: Plan) -> CheckReply:
    """One process that imports torch and becomes this host's ranks; what each of them says."""
    local.let_go(asking.port)
    place, kind = _place(asking), plan.cluster.gpu.kind
    host = local.LaunchedNode(asking.node, socket.gethostname(), place.address, place.interface or None)
    given = environment.added(asking.env, os.environ)
    env = given | local.base_environment(asking.token, Path(asking.run_dir), host, asking.ranks, os.environ | given)
    env |= {name: given[name] for name in local.INTERFACES if name in given}
    if RUN_ID_VARIABLE in os.environ:  # the mark by which whoever started this process finds and ends what it started
        env[RUN_ID_VARIABLE] = os.environ[RUN_ID_VARIABLE]
    if asking.debug:
        env |= environment.NETWORK_DEBUG
    task = {
        "kind": kind,
        "bytes": REDUCED_BYTES,
        "master": place.master,
        "node": asking.node,
        "nodes": asking.nodes,
        "address": _source(place, network.interface(place, kind, given)),
        "port": asking.port,
        "first": asking.node * asking.ranks,
        "ranks": asking.ranks,
        "world": asking.nodes * asking.ranks,
        "more_s": RANK_S * asking.nodes * asking.ranks,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "executor.worker.probe.check_reduce"],
        env=dict(os.environ) | env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # with the ranks that it forks
    )
    try:
        said, errors = process.communicate(json.dumps(task), timeout=reduce_seconds(asking.nodes * asking.ranks) + 5)
    except subprocess.TimeoutExpired:
        _end(process)
        said, errors = process.communicate()
    finally:
        _end(process)
    lines = [line for line in said.splitlines() if line.startswith('{"rank"')]
    reduced = [json.loads(line) for line in lines]
    failed = [one for one in reduced if "error" in one]
    if failed and (found := cause("\n".join([errors, said, *(str(one["error"]) for one in failed)]))):
        reduced = [one | {"cause": found[:2], "line": found[2]} if "error" in one else one for one in reduced]
    last = next((line.strip() for line in reversed(errors.splitlines()) if line.strip()), f"exit {process.returncode}")
    if not reduced:
        reduced = [{"rank": task["first"], "error": last}]
    return CheckReply(node=asking.node, host=socket.gethostname(), reduced=reduced)


def reduce_seconds(world: int) -> float:
    """Time limit of an all-reduce over `world` ranks, in seconds."""
    return REDUCE_S + RANK_S * world


def _end(process: subprocess.Popen[str]) -> None:
    """End a process with the ranks that it forked, if it has not ended."""
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def versions() -> dict[str, str]:
    """Versions of what would run, by package; of torch that of the code which is imported, with the NCCL beside it."""
    from importlib import metadata  # takes long to load

    found = facts.versions()
    spec = importlib.util.find_spec("torch")
    for place in (spec and spec.submodule_search_locations) or ():
        text = Path(place, "version.py")
        if text.is_file() and (said := re.search(r"^__version__ = ['\"]([^'\"]+)", text.read_text(), re.MULTILINE)):
            found["torch"] = said[1]
    for name in NCCL_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found["nccl"] = metadata.version(name)
    return found


def _room(asking: CheckRequest, plan: Plan, options: RunOptions) -> str:
    fix = "Name one elsewhere: --run-dir" + (", or add --no-save-weights" if options.save_weights else "")
    here = options.save_weights and asking.node == 0  # rank 0 writes them
    return check_room(plan, replace(options, save_weights=here), "--run-dir", fix)


def _kept_in(asking: CheckRequest) -> Path:
    """The folder of the run's files on this host, as far as it is known before they exist (executor.hosts.node)."""
    folder = Path(asking.run_dir)
    seen = folder.parent.is_dir() or not asking.copied
    if seen:
        return folder
    return (Path(asking.place).expanduser() if asking.place else Path(boot.cache()).parent / node.RUNS) / folder.name


def _place(asking: CheckRequest) -> address.NodeAddress:
    return address.find(address.Master.parse(asking.master) if asking.master else None, asking.node, asking.nodes)


def _interface(asking: CheckRequest, plan: Plan) -> str:
    if _unknown(asking):
        return "n/a"
    try:
        place = _place(asking)
    except PlannerError:
        return "n/a"  # said of the master
    chosen = network.interface(place, plan.cluster.gpu.kind, environment.added(asking.env, os.environ))
    speed = facts.link_bits_per_s(chosen)
    return f"{chosen}, {'speed n/a' if speed is None else f'{speed / 1e9:g} Gbit/s'}"


def _unknown(asking: CheckRequest) -> bool:
    """Whether there is no path to node 0 to check: it is the only node, or its address is unknown."""
    return asking.nodes == 1 or asking.master is None


def _contents(plan: Plan) -> dict[str, str]:
    """Digests, as they are here, of inputs of which the plan has none; those that it has are checked one by one."""
    known = {one.field for one in plan.inputs}
    return {f"recipe.{one.field}": one.digest for one in inputs.resolved(plan).inputs if one.field not in known}


def _cards(asking: CheckRequest) -> dict[str, str]:
    cards = [facts.card_facts(card) for card in visible_cards()[: asking.ranks]]
    names = sorted({str(card["name"]) for card in cards if card.get("name")})
    drivers = {str(card["driver"]) for card in cards if card.get("driver")}
    return ({"GPU": ", ".join(names)} if names else {}) | ({"driver": drivers.pop()} if drivers else {})
