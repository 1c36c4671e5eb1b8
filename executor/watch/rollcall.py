"""Who has not come while the ranks of a run meet, and for whom the others wait: in a sentence, as soon as it shows.

A rank says in states/rank-N.json that it begins to join its process group, and that it has (worker/world/states.py);
an agent in states/node-N.json that it is about to start ranks, and that it has shows in their logs.
Not here: how long they may take (supervise.py, ssh_run.py).
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
"""After how long those that do not come are named, counted from the last change of who they are, and then again."""
IMPORT_S = 60.0
"""For so long a rank or an agent that has not come yet is taken to import PyTorch and the framework: ten to thirty
seconds are usual, more from a cold network disk."""
JOINING, JOINED = "joining", "joined"
"""The states that a rank tells of itself."""
MOST = 8
"""Ranks or nodes that a sentence lists."""


@dataclass
class RollCall:
    """Looks for the ranks of a run until all have joined, and says to `echo` for whom they wait. `hosts` are the names
    of the nodes whose ranks show here, `absent` a sentence about other nodes, or nothing. `others_first`: nothing is
    said before one has joined, since a script may do anything before. `came` says of the last look who had begun to
    join, and `done` that all had."""

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
        """Look, at most once a second, and say who is awaited when it is time to."""
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
        """For whom the others wait, and what to look at; empty where that does not show. `so_far`: there is time left,
        and ranks that import may take it."""
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
            look = "See whether they reach each other: executor check PLAN --debug-network"
            return f"{self._named(late)} came to join the others and did not meet them. {look}"
        return self._sentence(awaited, len(ranks) - len(awaited), so_far)

    def _sentence(self, awaited: Sequence[int], waiting: int, so_far: bool) -> str:
        """Of ranks that do not join, for whom so many others wait: an agent that is not ready keeps every node's ranks
        from being started, and ranks that were started can do nothing about those that were not."""
        ready = rundir.ready_nodes(self.folder)
        unready = [rank for rank in awaited if rank // self.processes not in ready]
        unstarted = [
            rank for rank in awaited if rundir.rank_log(self.folder, *divmod(rank, self.processes), "stderr") is None
        ]
        named = [rank for rank in unready if rank in unstarted] or unstarted or awaited
        since_s = time.monotonic() - self._since
        if so_far and since_s < IMPORT_S and not self.others_first and self._import(named, unready):
            wait = f"; {waiting} that came first wait" if waiting else ""
            return f"{self._named(named)}: importing PyTorch, {since_s:.0f} s so far{wait}"
        why = "; " + (f"{waiting} that came first wait" if waiting else "none has joined yet")
        if named[0] in unready:
            why = ": the agent there has not finished its imports"
        does = "was started and does not join the others" if named is awaited else "was not started"
        if len(named) > 1:
            does = does.replace("was", "were").replace("does", "do")
        look = "or at what it does there (py-spy dump)"
        logs = listed(sorted({f"{rundir.LOGS}/node-{rank // self.processes}" for rank in named}))
        return f"{self._named(named)} {does}{why}. Look at {logs}, {look}"

    def _import(self, named: Sequence[int], unready: Sequence[int]) -> bool:
        """Whether these ranks, or the agents that are to start them, have done nothing yet that comes after imports."""
        said = [alive.read(self.folder, rank) for rank in named]
        return named[0] in unready or all(one is None or one.stage == alive.START for one in said)

    def _named(self, ranks: Sequence[int]) -> str:
        """Ranks, the first of many, and their nodes."""
        hosts = self.hosts()
        names = list(dict.fromkeys(hosts[rank // self.processes] for rank in ranks))
        return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)} on {listed(names)}"

    def _ranks(self) -> Sequence[int]:
        """The ranks that show here."""
        size = self.processes
        return [rank for node in sorted(self.hosts()) for rank in range(node * size, (node + 1) * size)]

    def _not_joining(self) -> tuple[int, ...]:
        come = rundir.ranks_in(self.folder / rundir.STATES) | rundir.ranks_in(self.folder / rundir.MESH)
        return tuple(rank for rank in self._ranks() if rank not in come)


def listed(names: Sequence[object]) -> str:
    """Names in a sentence, the first of many."""
    more = f" and {len(names) - MOST} more" if len(names) > MOST else ""
    return ", ".join(map(str, names[:MOST])) + more
