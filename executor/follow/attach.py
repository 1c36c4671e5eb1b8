"""Follow what the ranks of a run print, from elsewhere than its launcher and over its restarts; or its last lines.

Not here: the logs of one start (supervise.LogFollower), or how the run stands (view.py).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from executor.folder import rundir
from executor.follow.view import Lookout, RunView, host_names
from executor.run import attempts
from executor.watch.supervise import Echo, Followed, LogFollower
from planner.basics import reading
from planner.basics.errors import PlannerError

POLL_S = 0.5


def follow(folder: Path, rank: int | None, *, from_start: bool, echo: Echo) -> RunView:
    """Pass on what the ranks print until the run ends; how it ended. `rank`: this one's alone. `from_start`: all that
    they have printed since the run began, in its earlier starts too."""
    lookout = Lookout(folder)
    ranks = ranks_of(folder, rank)
    starts = attempts.folders(folder)
    for start in starts if from_start else ():
        _joined(LogFollower(start, (), echo), ranks).poll(final=True)
    present = _joined(LogFollower(folder, (), echo), ranks)
    if not from_start:
        present.skip()
    while True:
        view = lookout.look()
        for start in attempts.folders(folder)[len(starts) :]:
            if not (start / rundir.LOGS).is_dir():  # just being put aside
                break
            present.moved(start)
            _joined(present, ranks).poll(final=True)
            ranks = ranks_of(folder, rank, there=False)
            starts, present = [*starts, start], LogFollower(folder, (), echo)
        _joined(present, ranks).poll(final=view.over)
        if view.over:
            return view
        time.sleep(POLL_S)


def ranks_of(folder: Path, rank: int | None, *, there: bool = True) -> Sequence[int]:
    """The ranks that were asked for: all, or one, which has to be `there`."""
    world = rundir.read_run_plan(folder).layout.world_size
    if rank is not None and rank >= world and there:
        raise PlannerError("--rank", rank, f"is not a rank of a run of {world}", f"Give one from 0 to {world - 1}")
    return range(world) if rank is None else (rank,)


def _joined(follower: LogFollower, ranks: Sequence[int]) -> LogFollower:
    """Follows further ranks, each as soon as its log exists: its host has reported its name by then."""
    if len(follower.follow) < len(ranks):
        plan = rundir.read_run_plan(follower.folder)
        hosts, a_node = host_names(follower.folder, plan), plan.layout.world_size // plan.cluster.nodes
        every = [Followed(*divmod(rank, a_node), f"{hosts[rank]}:{rank}") for rank in ranks if rank < len(hosts)]
        there = {(one.node, one.local_rank) for one in follower.follow}
        for one in every:
            place = one.node, one.local_rank
            if place not in there and rundir.rank_log(follower.folder, *place, "stderr") is not None:
                follower.follow = (*follower.follow, one)
    return follower


def last_lines(folder: Path, rank: int | None, count: int) -> Iterator[str]:
    """The last `count` lines of every rank's output, or of one rank's."""
    plan = rundir.read_run_plan(folder)
    a_node, hosts = plan.layout.world_size // plan.cluster.nodes, host_names(folder, plan)
    for one in ranks_of(folder, rank):
        lines: deque[str] = deque(maxlen=count)
        for stream in ("stdout", "stderr"):
            path = rundir.rank_log(folder, *divmod(one, a_node), stream)
            if path is not None:
                with reading.opened(path) as opened:
                    parts = iter(partial(opened.readline, reading.LINE_BYTES), b"")
                    lines += deque((part.decode(errors="replace").rstrip("\r\n") for part in parts), maxlen=count)
        for line in lines:
            yield f"{hosts[one]}:{one}  {line}"
