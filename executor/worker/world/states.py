"""A rank's state while it joins the run's process group: states/rank-N.json, which executor.watch.rollcall reads.

Whoever calls torch's `init_process_group` there, a framework or a person's own script, is heard. Not here: the process
group that a rank found itself in (mesh.py, live.py).
"""

from __future__ import annotations

import functools
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from executor.folder.rundir import STATES, write_of_rank
from executor.watch.rollcall import JOINED, JOINING
from planner.basics.errors import PlannerError

JOIN = "init_process_group"
MODULE = "torch.distributed.distributed_c10d"
"""Where torch has it."""


def watch(folder: Path, *modules: ModuleType) -> None:
    """From now on this rank says when it begins to join through one of these modules of torch's, and when it has."""
    join = getattr(modules[0], JOIN)

    @functools.wraps(join)
    def joined(*arguments: Any, **options: Any) -> Any:
        say(folder, JOINING)
        found = join(*arguments, **options)
        say(folder, JOINED)
        return found

    for one in modules:
        setattr(one, JOIN, joined)


def say(folder: Path, state: str) -> None:
    """states/rank-N.json of this rank. A folder that takes no file keeps no rank from joining."""
    rank = os.environ.get("RANK", "0")
    record = {"schema": "state/1", "rank": int(rank), "state": state, "time_ns": time.time_ns()}
    with suppress(PlannerError, OSError):
        write_of_rank(folder, STATES, rank, record | {"host": socket.gethostname()})
