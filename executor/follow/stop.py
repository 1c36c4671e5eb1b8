"""End a run from elsewhere than its launcher, and read what its ranks wrote. Not here: how a run stands (reap.py)."""

from __future__ import annotations

import os
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from executor.folder import rundir
from executor.follow.attach import ranks_of
from executor.follow.view import host_names
from executor.run.reap import Standing, seen, standing
from executor.system import processes
from planner.basics.errors import PlannerError

POLL_S = 0.2


def stop(folder: Path, wait_s: float) -> Standing:
    """How a run stands after it was ended: its launcher is sent SIGTERM, as a scheduler does, and waited for. A run
    that has ended already is left as it is. PlannerError (exit code 3) where it cannot be ended from here."""
    found = standing(folder)
    if found.status != "running":
        return found
    launcher = rundir.read_launcher(folder)
    if launcher is None or seen(launcher) != "alive":
        rule, fix = f"was not started here ({found.message})", "Ask on the host that started it"
        raise PlannerError("run", folder, rule, fix, exit_code=3)
    with suppress(ProcessLookupError):
        os.kill(int(launcher.process.partition(":")[0]), signal.SIGTERM)
    deadline = time.monotonic() + wait_s
    while processes.alive(launcher.process) and rundir.read_record(folder) is None:
        if time.monotonic() > deadline:
            rule = f"has not ended within {wait_s:g} s"
            raise PlannerError("run", folder, rule, "Wait for it, or call executor stop again", exit_code=3)
        time.sleep(POLL_S)
    return standing(folder)


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
