"""Follow what the ranks of a run print, from elsewhere than its launcher and over its restarts; or its last lines.

Not here: the logs of one start (supervise.LogFollower), or how the run stands (view.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from executor.folder import rundir
from executor.follow.view import Lookout, View, host_names
from executor.run import attempts
from executor.watch.supervise import Echo, Followed, LogFollower
from planner.basics.errors import PlannerError

POLL_S = 0.5


def follow(folder: Path, rank: int | None, *, from_start: bool, echo: Echo) -> View:
    """Pass on what the ranks print until the run ends; how it ended. `rank`: this one's alone. `from_start`: all that
    they have printed since the run began, in its earlier starts too."""
    lookout = Lookout(folder)
    ranks = ranks_of(folder, rank)
    starts = attempts.folders(folder)
    for start in starts if from_start else ():
        Start(start, ranks, echo).poll(final=True)
    present = Start(folder, ranks, echo)
    if not from_start:
        present.skip()
    while True:
        view = lookout.look()
        for start in attempts.folders(folder)[len(starts) :]:
            if not (start / rundir.LOGS).is_dir():  # just being put aside
                break
            present.moved(start)
            starts, present = [*starts, start], Start(folder, ranks_of(folder, rank, there=False), echo)
        present.poll(final=view.over)
        if view.over:
            return view
        time.sleep(POLL_S)


def ranks_of(folder: Path, rank: int | None, *, there: bool = True) -> Sequence[int]:
    """The ranks that were asked for: all, or one, which has to be `there`."""
    world = rundir.read_run_plan(folder).layout.world_size
    if rank is not None and rank >= world and there:
        raise PlannerError("--rank", rank, f"is no rank of a run of {world}", f"Give one from 0 to {world - 1}")
    return range(world) if rank is None else (rank,)


@dataclass
class Start:
    """The logs of one start's `ranks`, in the folder of the run or of an earlier start. A rank is followed from when
    its log is there: its host has said by then who it is."""

    folder: Path
    ranks: Sequence[int]
    echo: Echo
    _followers: dict[int, LogFollower] = field(default_factory=dict)

    def poll(self, final: bool = False) -> None:
        """Pass on what was written since; with `final`, unfinished lines too."""
        self._find()
        for follower in self._followers.values():
            follower.poll(final)

    def skip(self) -> None:
        """Leave out what was written so far."""
        self._find()
        for follower in self._followers.values():
            follower.skip()

    def moved(self, folder: Path) -> None:
        """Pass on what is left now that another start follows and the logs were moved."""
        for follower in self._followers.values():
            follower.moved(folder)
        self.folder = folder
        self.poll(final=True)

    def _find(self) -> None:
        missing = [rank for rank in self.ranks if rank not in self._followers]
        if not missing:
            return
        plan = rundir.read_run_plan(self.folder)
        hosts, a_node = host_names(self.folder, plan), plan.layout.world_size // plan.cluster.nodes
        for rank in missing:
            place = divmod(rank, a_node)
            if rundir.rank_log(self.folder, *place, "stderr") is not None and rank < len(hosts):
                followed = Followed(*place, f"{hosts[rank]}:{rank}")
                self._followers[rank] = LogFollower(self.folder, (followed,), self.echo)


def last_lines(folder: Path, rank: int | None, count: int) -> Iterator[str]:
    """The last `count` lines of every rank's output, or of one rank's."""
    plan = rundir.read_run_plan(folder)
    a_node, hosts = plan.layout.world_size // plan.cluster.nodes, host_names(folder, plan)
    for one in ranks_of(folder, rank):
        lines: deque[str] = deque(maxlen=count)
        for stream in ("stdout", "stderr"):
            path = rundir.rank_log(folder, *divmod(one, a_node), stream)
            if path is not None:
                with path.open(errors="replace") as opened:
                    lines += deque((line.rstrip("\n") for line in opened), maxlen=count)
        for line in lines:
            yield f"{hosts[one]}:{one}  {line}"
