"""A rank of the trainer that ends when its model is loaded, and says how much more memory than before it had at most.

Not here: what a test expects of it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from executor.folder.rundir import write_of_rank
from executor.worker import train


def main(arguments: Sequence[str]) -> int:
    """One rank: watched/rank-N.json."""
    start_engine = train.start_engine

    def watched(plan: Any, folder: str) -> Any:
        engine = start_engine(plan, folder)
        before = kib("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here

        def loaded() -> None:
            found = {"grown_bytes": 1024 * (kib("VmHWM") - before), "held_bytes": 1024 * (kib("VmRSS") - before)}
            write_of_rank(Path(folder), "watched", engine.world()[0], found)
            sys.stdout.flush()
            os._exit(0)

        engine.mesh = loaded  # what the trainer asks first once it has loaded
        return engine

    train.start_engine = watched  # type: ignore[assignment]
    return train.main(arguments)


def kib(field: str) -> int:
    """A line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1])
