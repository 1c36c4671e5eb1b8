"""One node of a run that its nodes join by themselves: checked on its host, started, watched, ended, written down.

Each node is joined by a loop of the person's own (ssh, srun, pdsh); node 0 writes run.json. Not here: what is written
of it (joining.py), where a node is (address.py), starting agents (launchers/local.py), or watching them (supervise.py).
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from executor.backends.common import read_by
from executor.folder import joining, ownscript, rundir
from executor.folder.joining import Joined, Joining, NodeEnd
from executor.folder.ownership import LEASE_S, held, share
from executor.launchers import local, slurm
from executor.preflight import findings, preflight
from executor.run import rejoin
from executor.run.launch import configuration_environment, evidence_of, launch_spec, record_of, watch_of
from executor.run.prepare import PreparedRun, RunOptions, check_room, decided, host_checks
from executor.run.reap import reap, this_launcher
from executor.system import address, cgroups, environment, processes
from executor.system.facts import versions
from executor.watch.rollcall import RollCall
from executor.watch.supervise import Agent, Echo, Followed, hang_up, received_signals, supervise, tear_down
from executor.watch.verdict import LAUNCH_FAILED, UNKNOWN, Ending, Evidence, RunVerdict, judge
from planner import __version__
from planner.basics.errors import PlannerError
from planner.parallelism.backend import LaunchSpec
from planner.spec import inputs
from planner.spec.plan import Plan
from planner.spec.record import RunRecord

LOOK_S = 1.0
"""How often other nodes are looked for in the run folder."""
OTHERS_END_S = 5.0
"""Seconds that a node of a failed run waits for the reports of the others' ends."""


@dataclass(frozen=True)
class NodeRequest:
    """The request to be a node on this host. `master` is node 0's HOST[:PORT] (None: of the run folder or this host),
    `task` its Slurm task, `resolve_s` the limit for node 0's name to resolve, `start` the word of a start (rejoin.py).
    `launched`: a launcher watches all nodes, calls this host `host`, waits for missing ones and writes run.json."""

    node: int
    master: str | None = None
    env: tuple[str, ...] = ()
    meet_s: float = 600.0
    task: slurm.SlurmTask | None = None
    launched: bool = False
    host: str = ""
    resolve_s: float = 0.0
    start: str | None = None


@dataclass(frozen=True)
class PreparedNode:
    """One node, checked and decided: nothing of it is started."""

    ready: PreparedRun
    place: address.NodeAddress
    port: int
    claim: Joined
    task: slurm.SlurmTask | None = None
    launched: bool = False

    @property
    def folder(self) -> Path:
        """The run folder as this host has it."""
        return self.ready.options.run_dir

    @property
    def number(self) -> int:
        """This node's number."""
        return self.ready.node

    def ranks_of(self, node: int) -> range:
        """The ranks of a node."""
        return range(node * self.ready.processes, (node + 1) * self.ready.processes)


def join(folder: Path, asked: NodeRequest, echo: Echo) -> tuple[PreparedRun, RunRecord]:
    """Be one node of the run in `folder`, from the first check to the last process. PlannerError is the answer no,
    before anything was started; the record says how the run ended as seen from here, and only node 0's is kept."""
    folder = folder.absolute()
    with contextlib.ExitStack() as stack:
        with _on_host(asked.host or socket.gethostname()):
            stack.enter_context(_held(folder, asked, echo))
        node = prepared(folder, asked, echo)
        reap()
        with received_signals() as signals, hang_up(signals, sys.stderr.fileno()):
            return node.ready, execute(node, signals, _unread(echo))


@contextlib.contextmanager
def _held(folder: Path, asked: NodeRequest, echo: Echo) -> Iterator[None]:
    """The lock of the run folder, which all nodes of a start share: `executor resume`, and node 0 of another start,
    which puts aside what an earlier one left, have it alone."""
    rundir.read_run_plan(folder)
    alone = asked.start is not None and asked.node == 0 and rejoin.renews(folder)
    if asked.start is not None and not alone:
        rejoin.ready(folder, asked.node, asked.start, asked.meet_s, echo)
    with held(folder, shared=not alone, wait_s=min(asked.meet_s, LEASE_S)):
        if asked.start is not None and alone:
            rejoin.ready(folder, asked.node, asked.start, asked.meet_s, echo)
            share(folder)
        yield


def prepared(folder: Path, asked: NodeRequest, echo: Echo) -> PreparedNode:
    """Check this host for its part and claim it. A refusal names the host, and is written where other nodes look."""
    host = asked.host or socket.gethostname()
    claim = Joined(node=asked.node, host=host, process=processes.identity(), versions=versions())
    with _on_host(host):
        plan, wanted = _run_of(folder, asked)
        try:
            ready, place, port = _checked(plan, wanted, folder, asked, echo)
        except PlannerError as error:
            joining.refused(folder, msgspec.structs.replace(claim, refusal=error.sentence))
            raise
        contents = {one.field: one.digest for one in inputs.resolved(ready.plan).inputs}
        claim = msgspec.structs.replace(claim, address=place.address, interface=place.interface, contents=contents)
        joining.claim(folder, claim)
        if joining.read(folder) != wanted:
            rule = "was made ready for another start meanwhile"
            raise PlannerError("run", folder, rule, "Join it again", exit_code=3)
    return PreparedNode(ready, place, port, claim, asked.task, asked.launched)


def _run_of(folder: Path, asked: NodeRequest) -> tuple[Plan, Joining]:
    """The run in a folder, if it is whole, made by this code, and there is such a node to join."""
    plan, wanted = rundir.read_run_plan(folder), joining.read(folder)
    made_by = f"meshwright {wanted.version}, {_short(wanted.code)}"
    if plan.content_hash != wanted.plan_hash:
        rule = (
            f"is another plan ({_short(plan.content_hash)}) than the folder was made for ({_short(wanted.plan_hash)})"
        )
        raise PlannerError("plan", folder / rundir.PLAN, rule, "Copy the whole folder again", exit_code=3)
    if wanted.code != joining.code_digest():
        rule = f"was made by other code ({made_by}) than runs here ({__version__}, {_short(joining.code_digest())})"
        fix = "Install the same meshwright on every node, or make the folder with this one"
        raise PlannerError("run", folder, rule, fix, exit_code=3)
    nodes = plan.cluster.nodes
    if not 0 <= asked.node < nodes:
        fix = f"Give each host a number of its own, from 0 to {nodes - 1}"
        raise PlannerError("--node-rank", asked.node, f"is not a node of a plan for {nodes}", fix)
    if asked.task is not None and asked.task.nodes != nodes:
        rule = f"has {asked.task.nodes} nodes, and the plan needs {nodes}"
        raise PlannerError("--slurm", f"job {asked.task.job}", rule, f"Start srun with --nodes={nodes}", exit_code=3)
    if rundir.read_record(folder) is not None:
        again = "Continue with executor resume RUN, then join again, or m" if wanted.checkpoints else "M"
        fix = f"{again}ake a new one with executor run PLAN --dry-run -o RUN"
        raise PlannerError("run", folder, "holds a run that has ended", fix)
    if not os.access(folder, os.W_OK | os.X_OK) or rundir.state(folder) != "whole":
        raise PlannerError("run", folder, "is not writable for you", "Use a folder that you can write to", exit_code=3)
    return plan, wanted


def _checked(
    plan: Plan, wanted: Joining, folder: Path, asked: NodeRequest, echo: Echo
) -> tuple[PreparedRun, address.NodeAddress, int]:
    """Everything that must hold of this host, and what follows for its node."""
    named = asked.master or wanted.master
    master = address.Master.parse(named) if named else None
    nodes = plan.cluster.nodes
    script = ownscript.program(folder, wanted.script)
    options = RunOptions(
        folder, nodes, save_weights=wanted.save_weights, script=script, tool=wanted.tool, env=asked.env,
        meet_s=asked.meet_s, stall_s=wanted.stall_s, checkpoints=wanted.checkpoints, bad_loss=wanted.bad_loss,
        profile=wanted.profile, resume=folder / wanted.resume if wanted.resume else None,
    )  # fmt: skip
    ready = decided(plan, options, echo)
    added = joining.environment_of(wanted.environment, ready.environment, os.environ)
    place, port = address.find(master, asked.node, nodes, asked.resolve_s), (master and master.port) or wanted.port
    if not asked.launched:  # a launcher has just asked them of this host, before it started any node
        preflight.require(host_checks(ready.plan, options, ready.processes), echo)
    if asked.node == 0:
        local.keep(port)
        fix = "Make it on another disk" + (", or with --no-save-weights" if options.save_weights else "")
        check_room(plan, options, "run", fix)
    hosts = local.LaunchedNodes("join", tuple(_host(node, asked, place) for node in range(nodes)))
    found = replace(ready, run_id=wanted.run_id, environment=added, hosts=hosts, node=asked.node)
    return found, place, port


def _host(node: int, asked: NodeRequest, place: address.NodeAddress) -> local.LaunchedNode:
    if node == asked.node:
        return local.LaunchedNode(node, asked.host or socket.gethostname(), place.address, place.interface or None)
    return local.LaunchedNode(node, f"node-{node}", place.master if node == 0 else f"node-{node}", None, here=False)


def execute(node: PreparedNode, signals: list[int], echo: Echo) -> RunRecord:
    """Run the node and write down how it ended, whatever happens; run.json is node 0's, or the launcher's."""
    records = node.number == 0 and not node.launched
    started, clock, kills = datetime.now(UTC), time.monotonic(), cgroups.oom_kills()
    meeting, ended = Meeting(node), UNKNOWN
    roll = RollCall(
        node.folder, node.ready.processes, meeting.hosts, echo, meeting.absent, not node.ready.options.by_trainer
    )
    try:
        refusal = None
        if records:
            launcher = this_launcher(node.ready.run_id, in_namespaces=False)
            rundir.write_json(node.folder / rundir.LAUNCHER, launcher)
            rundir.keep_room(node.folder)
        try:
            ending = _watched(node, meeting, roll, signals, echo)
        except PlannerError as error:
            # A Ctrl-C reaches the small programs we call as well: their failure is then not the story.
            ending, refusal = Ending(ok=False, signal=signals[0] if signals else None), error
        ended = _verdict(node, ending, kills, refusal, roll)
        if node.task is not None and ending.signal is not None:
            reason = slurm.why(node.task.job, node.task.hosts, node.task.restarts, ending.signal)
            stopped, _, rest = ended.message.partition(": ")
            ended = replace(ended, message=f"{stopped}: {reason}" + f"; {rest}" * bool(rest))
    finally:
        record = record_of(node.ready, ended, started, time.monotonic() - clock, ())
        if node.task is not None:
            record = msgspec.structs.replace(record, launcher="slurm")
        if records and (why := rundir.keep_record(node.folder, record)):
            echo(
                f"note: {node.folder / rundir.RECORD} could not be written ({why}); exit code and message are the run's"
            )
    return record


def _watched(node: PreparedNode, meeting: Meeting, roll: RollCall, signals: list[int], echo: Echo) -> Ending:
    ready, folder, run_id = node.ready, node.folder, node.ready.run_id

    def spec(configured: dict[str, str]) -> LaunchSpec:
        whole = launch_spec(ready, node.port, configured)
        return LaunchSpec(files=whole.files, commands=(whole.commands[node.number],))

    hosts = local.LaunchedNodes("join", (ready.hosts.hosts[node.number],))
    held = local.hold_one(node.port) if node.number == 0 else local.HeldPort(node.port, None)
    agents: list[Agent] = local.start(spec({}), hosts, folder, held)
    try:
        with read_by(local.reader(agents[0], signals)):
            configured = spec(configuration_environment(ready, folder))
        command = configured.commands[0]
        shown = environment.masked(command.env, ready.environment)
        joining.update(folder, msgspec.structs.replace(node.claim, argv=command.argv, environment=shown))
        local.configure(agents, configured)
    except BaseException:
        tear_down(agents, run_id)
        raise
    label = hosts.hosts[0].name
    follow = [Followed(node.number, place, f"{label}:{rank}") for place, rank in enumerate(node.ranks_of(node.number))]
    return supervise(
        agents, folder, run_id, echo, signals=signals, met=meeting.complete, meet_s=ready.options.meet_s, follow=follow,
        watch=watch_of(ready, node.ranks_of(node.number)), look=(lambda: None) if node.launched else roll.call,
    )  # fmt: skip


@dataclass
class Meeting:
    """Whether this node's ranks have met all others, and which nodes are missing, as far as it shows here."""

    node: PreparedNode
    _looked: float = 0.0

    def complete(self) -> bool:
        """Whether they have met. PlannerError when another node says that it never will."""
        ready, number = self.node.ready, self.node.number
        if self.node.launched:  # who waits for whom is the launcher's to say
            return True
        if not ready.options.by_trainer:  # an agent starts ranks when all agents are there
            met = rundir.rank_log(self.node.folder, number, 0, "stderr") is not None
        else:
            met = all(
                (self.node.folder / rundir.MESH / f"rank-{rank}.json").exists() for rank in self.node.ranks_of(number)
            )
        now = time.monotonic()
        if met or now < self._looked + LOOK_S:
            return met
        self._looked = now
        for other, joined in joining.read_joined(self.node.folder).items():
            if other != number:
                _check_comes(joined)
                check_equal(joined, self.node.claim)
        return False

    def hosts(self) -> dict[int, str]:
        """The nodes whose ranks show here, by name."""
        return {number: one.host for number, one in joining.read_joined(self.node.folder).items()}

    def absent(self) -> str:
        """Which nodes have not joined, in a sentence; empty where this folder does not show it."""
        nodes, joined = len(self.node.ready.hosts.hosts), joining.read_joined(self.node.folder)
        if self.node.number and 0 not in joined and (why := address.answers(self.node.place, self.node.port)):
            return f"node 0 at {self.node.place.master}:{self.node.port} {why}"
        absent = [f"node {one} ({_span(self.node.ranks_of(one))})" for one in range(nodes) if one not in joined]
        if absent and self.node.number == 0:
            have = "have" if len(absent) > 1 else "has"
            return f"{', '.join(absent)} {have} not joined, as far as this folder on {self.node.claim.host} shows"
        return ""


def _check_comes(joined: Joined) -> None:
    """Refuse a run of which another node says that it has no part."""
    other = joined.node
    if joined.refusal:
        raise PlannerError(f"node {other}", joined.host, f"cannot join: {joined.refusal}", exit_code=3)
    if joined.end is not None and joined.end.exit_code:
        rule = f"ended before all ranks had met: {joined.end.message}"
        raise PlannerError(f"node {other}", joined.host, rule, exit_code=LAUNCH_FAILED)


def check_equal(joined: Joined, own: Joined) -> None:
    """Refuse another node with other packages, or other content of a file that the plan has no digest of."""
    theirs, mine = (
        one.versions | {f"{findings.INPUT}{field}": digest for field, digest in one.contents.items()}
        for one in (joined, own)
    )
    for name in sorted(theirs.keys() & mine.keys()):
        status, fix = findings.rule_of(name)
        if status == "fail" and findings.differing({joined.node: theirs}, name, mine[name]):
            rule = f"has {name} {theirs[name][:20]}, and {own.host} has {mine[name][:20]}"
            raise PlannerError(f"node {joined.node}", joined.host, rule, fix, exit_code=3)


def _verdict(
    node: PreparedNode, ending: Ending, kills: int | None, refusal: PlannerError | None, roll: RollCall
) -> RunVerdict:
    """The verdict from this node: judged once for the others to read, and once more with their ends where the run
    failed."""
    found = judge(_evidence(node, ending, kills, refusal, roll))
    joining.update(node.folder, _ended(node, found))
    others = [other for other in joining.read_joined(node.folder) if other != node.number]
    if found.exit_code == 0 or ending.signal is not None or refusal is not None or not others or node.launched:
        return found
    deadline = time.monotonic() + OTHERS_END_S
    while time.monotonic() < deadline:
        joined = joining.read_joined(node.folder)
        if all(joined[other].end is not None for other in others if other in joined):
            break
        time.sleep(LOOK_S / 10)
    found = judge(_evidence(node, ending, kills, refusal, roll))
    for one in joining.read_joined(node.folder).values():
        if one.end is not None and one.end.cause == "interrupted":
            return RunVerdict("interrupted", one.end.exit_code, f"{one.end.message} on {one.host}", cause="interrupted")
    return found


def _evidence(
    node: PreparedNode, ending: Ending, kills: int | None, refusal: PlannerError | None, roll: RollCall
) -> Evidence:
    """Evidence on this host: of all nodes that share the folder, if this is node 0; else of its own ranks."""
    joined = joining.read_joined(node.folder)
    seen = {node.number, *(joined if node.number == 0 and not node.launched else ())}
    nodes = range(len(node.ready.hosts.hosts))
    elsewhere = frozenset(rank for one in nodes if one not in seen for rank in node.ranks_of(one))
    awaited = roll.missing() if ending.timed_out else ""
    names = [joined[one].host if one in joined else f"node-{one}" for one in nodes for _ in node.ranks_of(one)]
    found = evidence_of(node.ready, ending, kills, refusal, elsewhere)
    return replace(found, hosts=names, awaited=awaited, came=roll.came)


def _ended(node: PreparedNode, found: RunVerdict) -> Joined:
    said = joining.read_joined(node.folder).get(node.number, node.claim)
    end = NodeEnd(status=found.status, exit_code=found.exit_code, message=found.message, cause=found.cause)
    return msgspec.structs.replace(said, end=end)


@contextlib.contextmanager
def _on_host(host: str) -> Iterator[None]:
    """Every refusal inside begins with the host's name: a loop over hosts shows one after the other."""
    try:
        yield
    except PlannerError as error:
        field = f"{host}: {error.field}"
        raise PlannerError(field, error.value, error.rule, error.fix, exit_code=error.exit_code) from None


def _unread(echo: Echo) -> Echo:
    """An echo that ignores a stream without a reader."""

    def say(text: str) -> None:
        with contextlib.suppress(OSError):
            echo(text)

    return say


def _span(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]}-{ranks[-1]}"


def _short(digest: str) -> str:
    return digest.removeprefix("sha256:")[:12]
