"""Waiting for what other processes do, and ranks that wait themselves. Not here: who starts them."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 300
"""Room for a machine ten times slower than today's: no claim, and no cost where all is well."""
RANKS = (
    "import os, time, pathlib, torch.distributed as dist\n"
    "dist.init_process_group('gloo'); dist.barrier()\n"
    "pathlib.Path(os.environ['MESHWRIGHT_RUN_DIR'], 'waiting-' + os.environ['RANK']).touch()\n"
    "while True: dist.barrier(); time.sleep(0.2)\n"
)
"""A script of a person's own: its ranks meet, leave a file waiting-RANK in the run folder, and wait for ever."""


def until(
    condition: Callable[[], bool], what: str, said: Callable[[], str] = str, *, patience_s: float = PATIENCE_S
) -> None:
    """Return once the condition holds; after `patience_s` fail with `what` was waited for and what was `said`."""
    deadline = time.monotonic() + patience_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {patience_s} s for {what}: {said()}"
        time.sleep(0.1)
