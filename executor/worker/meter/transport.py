"""When a collective over gloo has really ended: it is complete, and gloo's own threads have let go of its tensors.

gloo runs collectives on threads of its own, which hold the tensors they were given, and copies of their own, a moment
longer than the caller's wait for them lasts. How long is the scheduler's choice: on a busy machine a freed tensor would
count in the next moment, on an idle one not. Not here: what a storage is for (memory.py) or what travels (traffic.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from executor.system.processes import said

THREAD_NAME = "pt_gloo_runloop"
TASKS = Path("/proc/self/task")
LOOK_S = 0.0005
QUIET_LOOKS = 3
"""Looks in a row that must find the threads asleep: one may sleep for a moment because it waits for Python's lock."""
LONGEST_S = 20.0
"""Beyond any delay that a scheduler makes; a thread that runs longer does something else."""
LONGEST_UNSEEN_S = 0.05
"""The longest pause where a thread's state cannot be read."""


def finish(result: Any) -> None:
    """Wait for the collective that returned `result`, so that what it needs meanwhile ends at the same operation in
    every run."""
    for leaf in tree_leaves(result):
        if isinstance(leaf, torch.ScriptObject):
            leaf.wait()  # type: ignore[attr-defined]  # c10d registers it for its works


def settle(held: Callable[[], bool]) -> None:
    """Pause until nothing is `held` any more, or until gloo's threads sleep: what is held then is held for good."""
    seen = sys.platform == "linux" and TASKS.is_dir()
    until = time.monotonic() + (LONGEST_S if seen else LONGEST_UNSEEN_S)
    quiet = 0
    while held() and quiet < QUIET_LOOKS and time.monotonic() < until:
        time.sleep(LOOK_S)
        quiet = 0 if not seen or threads_run() else quiet + 1


def threads_run() -> bool:
    """Whether one of gloo's threads in this process runs, or would if it had a core."""
    for task in TASKS.glob("*"):
        name, _, fields = said(task / "stat").rpartition(")")  # nothing of one that ended meanwhile
        if name.endswith(THREAD_NAME) and fields.split()[:1] != ["S"]:
            return True
    return False
