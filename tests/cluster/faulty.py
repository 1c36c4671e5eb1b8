"""A rank that breaks what is around it, as the first word of the plan's data file says.

No torch and no peers, so that it starts in a tenth of a second. Behaviours of rank 1, while rank 0 waits: `fill` (its
disk; with `fill all` the room for the record too), `delete` (the run folder), `cut` (the data file that it has mapped),
`eat` (memory, until it is killed). Not here: ranks that lose each other (standin.py).
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import sys
import time
from contextlib import suppress
from pathlib import Path

from executor.folder import rundir
from executor.worker.world import lastwords
from planner.spec.plan import read_plan


def main(folder: Path) -> None:
    """One rank."""
    plan = read_plan(folder / "plan.json")
    data = Path(str(plan.job.recipe.data))
    behaviour = data.read_text().split("\n")[0]
    rank = int(os.environ["RANK"])
    (folder / "mesh" / f"rank-{rank}.json").write_text(json.dumps({"world_size": plan.layout.world_size}))
    while rank == 0 or not (folder / "mesh" / "rank-0.json").exists():
        time.sleep(0.02)
    with lastwords.recorded(folder):
        if behaviour.startswith("fill"):
            fill(folder, leave_room="all" not in behaviour)
        elif behaviour == "delete":
            shutil.rmtree(folder)
            (folder / "metrics.jsonl").write_text("")
        elif behaviour == "cut":
            cut(data)
        elif behaviour == "eat":
            eat()


def fill(folder: Path, *, leave_room: bool) -> None:
    """As a log grows. The last write fails, and so does that of the record."""
    if not leave_room:
        (folder / rundir.ROOM).unlink()
    for size in (2**16, 2**12, 1):
        with suppress(OSError):
            for number in range(10**6):
                (folder / f"log-{size}-{number}").write_bytes(b"x" * size)
    with (folder / "metrics.jsonl").open("ab") as lines:
        lines.write(b"x" * 10**6)


def cut(data: Path) -> None:
    """A mapped page of a file that no longer reaches so far."""
    with data.open("r+b") as opened:
        mapped = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        opened.truncate(4096)
        print(mapped[8000], flush=True)


def eat() -> None:
    """Pages that are written, so that they are there."""
    held = []
    while True:
        held.append(bytearray(os.urandom(2**20) * 16))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
