"""`executor run --hosts FILE`: a run on hosts that ssh reaches, from the first connection to run.json.

Every host is asked to be one node (node.py), its lines and files come back over its connection, and the end of one is
the end of all. Not here: the connections (ssh.py), or what a node does (join.py).
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path, PurePosixPath
from signal import SIGINT
from typing import Any

import msgspec

from executor.folder import joining, rundir
from executor.folder.ownership import owned
from executor.hosts import elsewhere, ssh, ssh_session
from executor.hosts.checks.check import checked
from executor.hosts.fleet import Fleet, left
from executor.hosts.hosts import HostEntry, keep_hosts
from executor.hosts.ssh import Connections, HostReply
from executor.launchers import local
from executor.preflight import preflight
from executor.run import attempts, dryrun
from executor.run.launch import all_met, evidence_of, make_folder, record_of, tried_again
from executor.run.prepare import PreparedRun, RunOptions, decided, files_of, folder_checks
from executor.run.reap import reap
from executor.system.address import Master
from executor.system.frames import Message
from executor.watch.rollcall import RollCall, listed
from executor.watch.supervise import CHECKPOINT_S, GENTLE, POLL_S, Echo, received_signals
from executor.watch.verdict import LAUNCH_FAILED, NODE_LOST, UNKNOWN, Ending, Evidence, RunVerdict, judge, may_pass
from planner.basics.quoting import for_shell
from planner.decide.advice import plan_on_fewer
from planner.parallelism.backend import LaunchSpec, NodeCommand
from planner.spec import inputs
from planner.spec.plan import Plan
from planner.spec.record import RunRecord
from planner.views.render import layout_text

SETTLE_S = 2.0
"""After one node's failure, for others to see by themselves that a peer is gone."""
STOP_S = 25.0
"""For a node that was asked to stop."""
LOOK_S = 60.0
OWN = frozenset((rundir.PLAN, rundir.RECORD, rundir.LAUNCH, rundir.LAUNCHER, joining.JOIN, rundir.HOSTS))
"""Files of the run folder that are the launcher's alone."""
OF_NODES = frozenset(("refused", "node lost", "out-of-memory killer", "disk full"))
"""Causes that say more than that ranks lost each other."""
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*")
DEEPEST = 16
NO_NETWORK = ("another world", "refused", "out of memory", "disk full", "network", "did not join")
"""Causes of a failed start that say enough."""


def prepare(plan: Plan, options: RunOptions, machines: Sequence[HostEntry], echo: Echo) -> PreparedRun:
    """Everything that can be decided and checked here: the plan and the run folder. Hosts are asked later."""
    made = decided(plan, options, echo)
    made = replace(made, plan=inputs.resolved(made.plan))
    preflight.require(folder_checks(made.plan, options), echo)
    return replace(
        made,
        options=replace(options, run_dir=options.run_dir.absolute(), kept=options.kept or made.run_id),
        hosts=_hosts(machines),
        files=files_of(made),
    )


def run(ready: PreparedRun, fleet: Fleet, echo: Echo, *, master: str | None = None) -> RunRecord:
    """Run on the hosts. PlannerError, and no folder, where a host refuses before anything was started. A start that
    fails is followed by another as often as the options allow: on the same hosts, and without those that were lost."""
    fleets = [fleet]

    def again(failed: PreparedRun) -> PreparedRun:
        found, kept = _on_those_left(failed, fleets[-1], echo)
        fleets.append(kept)
        return found

    def find(folder: Path) -> attempts.ResumePoint:
        return elsewhere.newest(folder, fleets[-1].used)

    with owned(ready.options.run_dir, new=not ready.options.again):
        reap()
        return attempts.repeated(ready, lambda one: _start(one, fleets[-1].used, echo, master), echo, again, find)


def _on_those_left(ready: PreparedRun, fleet: Fleet, echo: Echo) -> tuple[PreparedRun, Fleet]:
    """The next start where hosts may be lost: spares take their places; where there are too few, what is left is
    planned for anew."""
    there, nodes = left(fleet, echo), len(fleet.used)
    if len(there) < nodes:
        plan = plan_on_fewer(ready.plan, len(there))
        nodes = plan.cluster.nodes
        echo(f"planned again for {', '.join(one.name for one in there[:nodes])}: {layout_text(plan.layout)}")
        ready = prepare(plan, replace(ready.options, nodes=nodes), there[:nodes], echo)
    elif there[:nodes] != fleet.used:
        echo(f"nodes are now {', '.join(one.name for one in there[:nodes])}")
        ready = replace(ready, hosts=_hosts(there[:nodes]))
    return ready, Fleet(there[:nodes], there[nodes:])


def _hosts(machines: Sequence[HostEntry]) -> local.LaunchedNodes:
    found = (local.LaunchedNode(node, one.name, one.name, None, here=False) for node, one in enumerate(machines))
    return local.LaunchedNodes("ssh", tuple(found))


def _start(
    ready: PreparedRun, machines: tuple[HostEntry, ...], echo: Echo, master: str | None
) -> tuple[RunRecord, bool]:
    """One start, and whether another may do better."""
    named = Master.parse(master) if master else None
    with ssh.contact(machines, echo, ready.run_id) as contact:
        first = local.hold_port(ready.hosts, ready.run_id).number
        looks = _every(contact, {"kind": "look", "port": first, "keep": True}, echo)
        address, port = ssh.choose_master(looks) if named is None else (named.host, int(looks[0]["port"]))
        port = (named and named.port) or port
        names = [one.name for one in machines]
        asked = partial(checked, contact, names, ready.plan, ready.options, ranks=ready.processes, copied=True)
        asked = partial(asked, master=address)
        asked(port=port, all_reduce=False).require(echo)
        meeting = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        start = partial(_SshRun, machines=machines, contact=contact, echo=echo, master=meeting)
        one = start(ready)
        record = one.execute(port)
        if record.exit_code == LAUNCH_FAILED and record.cause not in NO_NETWORK:
            echo("the ranks did not meet: trying an all-reduce, with NCCL_DEBUG and TORCH_DISTRIBUTED_DEBUG on")
            failed = asked(port=port, debug=True).failed
            for row in failed:
                echo(f"error: {row.error.sentence}")
            if not failed:
                echo("note: an all-reduce over all ranks works: the network is not the cause")
            if not failed and (again := tried_again(ready, record, echo)) is not None:
                one = start(again)
                record = one.execute(port)
        lost = [machines[node] for node in contact.refused]
    if one.again and lost:  # a host may live on whose connection alone was lost
        ended_on_hosts(lost, ready.run_id, lambda _: None, ready.options.place)
    return record, one.again


def dry_run(
    plan: Plan, options: RunOptions, machines: Sequence[HostEntry], echo: Echo
) -> tuple[dryrun.DryRun, list[str]]:
    """The dry run, and the command that reaches each host."""
    found = dryrun.dry_run(plan, replace(options, hosts="elsewhere"), echo)
    return found, [for_shell(ssh_session.words(one)) for one in machines]


def ended_on_hosts(machines: Sequence[HostEntry], run_id: str, echo: Echo, place: str | None = None) -> list[str]:
    """End what a run left on hosts, whose folders are in `place`; a sentence for each that had some, or said no."""
    sentences, request = [], {"kind": "reap", "run_id": run_id, "place": place}
    with ssh.contact(machines, echo) as contact:
        for one in sorted(contact.ask(request, LOOK_S), key=lambda answer: answer.place):
            if one.error is not None:
                sentences.append(f"{one.machine.name} could not be checked ({one.error.rule})")
            elif one.value and one.value["left"]:
                sentences.append(f"{' and '.join(one.value['left'])} on {one.machine.name} ended")
    return sentences


def _every(contact: Connections, request: Mapping[str, object], echo: Echo) -> dict[int, Message]:
    """Every host's answer. Prints the errors of hosts, and raises the last one."""
    answers = sorted(contact.ask(request, LOOK_S), key=lambda one: one.place)
    wrong = [one.error for one in answers if one.error is not None]
    for error in wrong[:-1]:
        echo(f"error: {error.sentence}")
    if wrong:
        raise wrong[-1]
    return {one.place: one.value for one in answers if one.value is not None}


@dataclass
class _SshRun:
    """One start while it lasts.

    `ends` are the nodes that have ended, in the order of their ends; `keep` says where each keeps checkpoints, where
    that is not a folder of all; `logged` are the bytes of metrics.jsonl before, which a host of its own folder lacks;
    `again` says, once it is over, whether another start may do better.
    """

    ready: PreparedRun
    machines: tuple[HostEntry, ...]
    contact: Connections
    echo: Echo
    master: str
    ends: dict[int, HostReply] = field(default_factory=dict)
    stopped: set[int] = field(default_factory=set)
    keep: dict[int, str] = field(default_factory=dict)
    logged: int = 0
    again: bool = False

    @property
    def folder(self) -> Path:
        return self.ready.options.run_dir

    def execute(self, port: int) -> RunRecord:
        """Make the folder, run, write run.json whatever happens."""
        started, clock, ended = datetime.now(UTC), time.monotonic(), UNKNOWN
        with received_signals() as signals:
            self._make_folder(port)
            try:
                ended = self._verdict(self._watch(signals))
            finally:
                record = record_of(self.ready, ended, started, time.monotonic() - clock, ())
                if (first := joining.read_joined(self.folder).get(0)) is not None:  # this machine ran nothing
                    record = msgspec.structs.replace(record, versions=first.versions)
                if why := rundir.keep_record(self.folder, record):
                    self.echo(f"note: {self.folder / rundir.RECORD} could not be written ({why})")
        return record

    def _make_folder(self, port: int) -> None:
        ready, folder = self.ready, self.folder
        wanted = dryrun.joining_of(ready, port)
        reached = [
            NodeCommand(node=node, argv=tuple(ssh_session.words(one)), env=dict(ready.environment))
            for node, one in enumerate(self.machines)
        ]

        def for_nodes() -> None:
            joining.write(folder, msgspec.structs.replace(wanted, master=self.master))
            rundir.write_launch(folder, LaunchSpec(files=ready.files, commands=tuple(reached)), ready.environment)
            keep_hosts(folder, self.machines)

        make_folder(ready, for_nodes)
        metrics = folder / rundir.METRICS
        self.logged = metrics.stat().st_size if metrics.is_file() else 0

    def _request(self, node: int) -> dict[str, object]:
        names = (rundir.PLAN, joining.JOIN, *self.ready.files)
        return {
            "kind": "node",
            "node": node,
            "host": self.machines[node].name,
            "run_id": self.ready.run_id,
            "folder": str(self.folder),
            "files": {name: (self.folder / name).read_text() for name in names},
            "master": self.master,
            "env": [f"{name}={value}" for name, value in self.ready.environment.items()],
            "place": self.ready.options.place,
            "kept": self.ready.options.kept if self.ready.options.checkpoints is not None else "",
        }

    def _watch(self, signals: list[int]) -> Ending:
        """Wait for every node; when one fails, a signal comes or the ranks do not meet in time, stop the others."""
        number = self.contact.put({node: self._request(node) for node in range(len(self.machines))})
        meet = time.monotonic() + self.ready.options.meet_s
        passed, together, timed_out, stop, give_up = 0, not self.ready.options.by_trainer, False, None, None
        while len(self.ends) < len(self.machines):
            self._hear(number)
            now = time.monotonic()
            for one in (came := signals[passed:]):
                self._stop(one)
                give_up = now + self._patience_s(signals)
            passed += len(came)  # others may have come meanwhile
            together = together or all_met(self.folder, self.ready.ranks)
            if not self.stopped:
                self.roll.call()
            if not together and now > meet and not self.stopped:
                timed_out, stop = True, now
            if stop is None and any(one.error or (one.value or {}).get("exit_code") for one in self.ends.values()):
                stop = now + (SETTLE_S if together else 0)
            if stop is not None and now >= stop and not self.stopped:
                self._stop(SIGINT)  # SIGTERM would first ask ranks for a checkpoint that they cannot make any more
                give_up = now + STOP_S
            if (give_up is not None and now > give_up) or passed > 2:
                break
        good = len(self.ends) == len(self.machines) and not any(_failed(one) for one in self.ends.values())
        return Ending(ok=good, signal=signals[0] if signals else None, timed_out=timed_out)

    def _patience_s(self, signals: Sequence[int]) -> float:
        """Time limit for nodes to end, in seconds: after a scheduler's signal they may write a checkpoint first."""
        asked = len(signals) == 1 and signals[0] in GENTLE and self.ready.options.checkpoints is not None
        return STOP_S + CHECKPOINT_S * asked

    def _hear(self, number: int) -> None:
        """Receive messages of hosts until none is waiting."""
        wait = POLL_S
        while (came := self.contact.next(wait)) is not None:
            wait = 0.0
            place, message, payload = came
            if message["kind"] == "line":
                self.echo(str(message["text"]))
            elif message["kind"] == "file":
                self._store(place, message, payload)
            elif message["kind"] == "keeps":
                self._told_where(place, str(message["folder"]))
            elif (answer := self.contact.answer(place, message, number)) is not None:
                self.ends.setdefault(place, answer)

    def _told_where(self, place: int, folder: str) -> None:
        """Say once that all hosts are known which keep their parts of checkpoints themselves, what that means."""
        self.keep[place] = folder
        if len(self.keep) == len(self.machines) and (apart := sorted(one for one in self.keep if self.keep[one])):
            names = listed([self.machines[one].name for one in apart])
            does = "keeps its part" if len(apart) == 1 else "keep their parts"
            where = f"{names} {does} of checkpoints in {self.keep[apart[0]]}"
            self.echo(f"note: {where}, and a lost host loses its part; a run folder on a shared disk keeps all parts")

    def _stop(self, number: int) -> None:
        for node in range(len(self.machines)):
            if node not in self.ends:
                self.stopped.add(node)
                self.contact.send(node, {"kind": "stop", "signal": number})

    def _store(self, place: int, message: Mapping[str, Any], payload: bytes) -> None:
        """Put a part of a host's file where it belongs, which is in the run folder and nowhere else."""
        name = str(message["name"])
        parts = PurePosixPath(name).parts
        plain = "/".join(parts) == name and 0 < len(parts) <= DEEPEST and all(NAME.fullmatch(one) for one in parts)
        if name in OWN or not plain:
            self.echo(f"note: {self.machines[place].name} sent a file of another name than a run's: {name!r}")
            return
        target, at = self.folder.joinpath(*parts), int(message["at"])
        at += self.logged if name == rundir.METRICS else 0
        written = target if message["grows"] else target.with_name(f"{target.name}.part")
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            with written.open("r+b" if at else "wb") as stream:
                stream.seek(at)
                stream.write(payload)
            if message["last"] and written != target:
                written.replace(target)
        except OSError as error:
            if rundir.state(self.folder) == "whole":
                self.echo(f"note: {target} could not be written ({error.strerror})")

    @functools.cached_property
    def roll(self) -> RollCall:
        """Which ranks are missing."""
        other = not self.ready.options.by_trainer
        return RollCall(self.folder, self.ready.processes, self._there, self.echo, self._absent, other)

    def _there(self) -> dict[int, str]:
        return {node: self.machines[node].name for node in joining.read_joined(self.folder)}

    def _absent(self) -> str:
        there = self._there()
        absent = [one.name for node, one in enumerate(self.machines) if node not in there]
        return f"{', '.join(absent)} {'have' if len(absent) > 1 else 'has'} not started a node" if absent else ""

    def _verdict(self, ending: Ending) -> RunVerdict:
        """The verdict: from the files of ranks and agents, or from a host's message or failure."""
        silent = [node for node in range(len(self.machines)) if node not in self.ends]
        elsewhere = frozenset(rank for rank in range(self.ready.ranks) if rank // self.ready.processes in silent)
        awaited = self.roll.missing() if ending.timed_out else ""
        evidence = replace(evidence_of(self.ready, ending, None, None, elsewhere), awaited=awaited, came=self.roll.came)
        found = self._judged(evidence)
        self.again = may_pass(evidence, found)
        return found

    def _judged(self, evidence: Evidence) -> RunVerdict:
        ending, by_host = evidence.ending, self._of_hosts()
        if by_host is not None and by_host.cause == "node lost":
            # A host that misses its launcher ends its ranks, and the others agree to end too: no user asked for it.
            kept = tuple(one for one in evidence.failures if not one.asked)
            evidence = replace(evidence, failures=kept)
        known = evidence.failures and not evidence.failures[0].collateral
        if ending.ok or ending.signal is not None or known or evidence.hung or evidence.folder != "whole":
            return judge(evidence)
        if by_host is None or (by_host.cause not in OF_NODES and (evidence.failures or ending.timed_out)):
            return judge(evidence)
        return by_host

    def _of_hosts(self) -> RunVerdict | None:
        """A host's failure: a refusal first, then a lost connection, then the report of a node that was not stopped."""
        failed = [(node, one) for node, one in self.ends.items() if _failed(one)]
        refused = [one.error for node, one in failed if one.error and node not in self.contact.refused]
        for error in refused:
            return RunVerdict("launch failed", error.exit_code, error.sentence, cause="refused")
        for node, one in failed:
            if one.error is not None:
                message = f"{self.machines[node].name} was lost: {one.error.sentence}"
                return RunVerdict("node lost", NODE_LOST, message, cause="node lost")
        own = [(node, one.value) for node, one in failed if one.value and node not in self.stopped]
        for node, said in sorted(own, key=lambda found: found[1]["cause"] not in OF_NODES):
            name, message = self.machines[node].name, str(said["message"])
            message = message if name in message else f"{name}: {message}"
            return RunVerdict(said["status"], said["exit_code"], message, said["rank"], said["cause"])
        return None


def _failed(one: HostReply) -> bool:
    return one.error is not None or bool((one.value or {}).get("exit_code"))
