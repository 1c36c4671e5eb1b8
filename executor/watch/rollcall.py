"""Which ranks are missing from rendezvous, in a sentence, while the others wait.

A rank writes to states/rank-N.json that it is joining its process group, and that it has joined
(worker/world/states.py). An agent writes to states/node-N.json that it is ready to start ranks; the ranks' logs show
that it has started them. Not here: the time limit of rendezvous (supervise.py, ssh_run.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from executor.folder import alive, rundir
from executor.watch.supervise import Echo
from executor.watch.verdict import Came

LOOK_S = 1.0
"""How often the run folder is looked at."""
FIRST_WORD_S, WORD_S = 10.0, 60.0
"""Seconds until missing ranks are named, counted from the last change of who is missing, and between repetitions."""
IMPORT_S = 60.0
"""A missing rank or agent counts as importing PyTorch and the framework for this long: ten to thirty seconds are usual,
more from a cold network disk."""
JOINING, JOINED = "joining", "joined"
"""The states that a rank reports."""
MOST = 8
"""Ranks or nodes that a sentence lists."""


@dataclass
class RollCall:
    """Polls the states of a run's ranks until all have joined, and reports missing ones to `echo`.

    `hosts` names the nodes whose ranks report to this folder, `absent` is a sentence about other nodes, or nothing.
    `others_first`: report nothing before one rank has joined, since a script may do anything before it does. `came` is
    which ranks were joining at the last poll, and `done` whether all had joined."""

    folder: Path
    processes: int
    hosts: Callable[[], Mapping[int, str]]
    echo: Echo
    absent: Callable[[], str] = str
    others_first: bool = False
    done: bool = False
    came: Came = "none"
    _awaited: tuple[int, ...] | None = None
    _since: float = 0.0
    _told: float = field(default=float("-inf"))
    _looked: float = field(default=float("-inf"))

    def call(self) -> None:
        """Poll at most once a second, and report the missing ranks when it is time to."""
        now = time.monotonic()
        if self.done or now < self._looked + LOOK_S:
            return
        self._looked = now
        awaited = self._not_joining()
        if awaited != self._awaited:
            self._awaited, self._since, self._told = awaited, now, float("-inf")
        if now >= max(self._since + FIRST_WORD_S, self._told + WORD_S) and (said := self.missing(so_far=True)):
            self._told = now
            self.echo(f"waiting: {said}")

    def missing(self, *, so_far: bool = False) -> str:
        """Which ranks are missing and what to check; empty where none is known to be. `so_far`: the time limit is not
        over, so ranks may still be importing."""
        self.came = "none"
        if absent := self.absent():
            return absent
        ranks, states, mesh = self._ranks(), rundir.read_states(self.folder), rundir.read_mesh(self.folder)
        late = [rank for rank in ranks if rank not in mesh and states.get(rank) != JOINED]
        awaited = [rank for rank in late if rank not in states]
        self.done = bool(ranks) and not late
        self.came = "none" if len(awaited) == len(ranks) else "some" if awaited else "all"
        if self.done or (self.others_first and len(awaited) == len(ranks)):
            return ""
        if not awaited:
            look = "Check the network between them: executor check PLAN --debug-network"
            return f"{self._named(late)} started to join the process group, but did not meet the others. {look}"
        return self._sentence(awaited, len(ranks) - len(awaited), so_far)

    def _sentence(self, awaited: Sequence[int], waiting: int, so_far: bool) -> str:
        """Names the missing ranks that hold up the others: an agent that is not ready delays the ranks of every node,
        and ranks that were not started delay those that were."""
        ready = rundir.ready_nodes(self.folder)
        unready = [rank for rank in awaited if rank // self.processes not in ready]
        unstarted = [
            rank for rank in awaited if rundir.rank_log(self.folder, *divmod(rank, self.processes), "stderr") is None
        ]
        named = [rank for rank in unready if rank in unstarted] or unstarted or awaited
        others = "1 rank waits" if waiting == 1 else f"{waiting} ranks wait"
        since_s = time.monotonic() - self._since
        if so_far and since_s < IMPORT_S and not self.others_first and self._import(named, unready):
            wait = f"; {others}" if waiting else ""
            return f"{self._named(named)}: importing PyTorch, {since_s:.0f} s so far{wait}"
        why = "; " + (others if waiting else "no rank has joined yet")
        if named[0] in unready:
            why = ": the agent of the node is still importing PyTorch"
        does = "was started and has not joined" if named is awaited else "was not started"
        if len(named) > 1:
            does = does.replace("was", "were").replace("has", "have")
        look = "or at its stack (py-spy dump)"
        logs = listed(sorted({f"{rundir.LOGS}/node-{rank // self.processes}" for rank in named}))
        return f"{self._named(named)} {does}{why}. Look at {logs}, {look}"

    def _import(self, named: Sequence[int], unready: Sequence[int]) -> bool:
        """Whether these ranks, or the agents that start them, have not got beyond their imports."""
        said = [alive.read(self.folder, rank) for rank in named]
        return named[0] in unready or all(one is None or one.stage == alive.START for one in said)

    def _named(self, ranks: Sequence[int]) -> str:
        """Ranks, the first of many, and their nodes."""
        hosts = self.hosts()
        names = list(dict.fromkeys(hosts[rank // self.processes] for rank in ranks))
        return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)} on {listed(names)}"

    def _ranks(self) -> Sequence[int]:
        """The ranks that report to this folder."""
        size = self.processes
        return [rank for node in sorted(self.hosts()) for rank in range(node * size, (node + 1) * size)]

    def _not_joining(self) -> tuple[int, ...]:
        come = rundir.ranks_in(self.folder / rundir.STATES) | rundir.ranks_in(self.folder / rundir.MESH)
        return tuple(rank for rank in self._ranks() if rank not in come)


def listed(names: Sequence[object]) -> str:
    """Names in a sentence, the first of many."""
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(map(str, names[:MOST])) + more
