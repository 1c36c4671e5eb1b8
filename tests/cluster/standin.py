"""A rank that meets the others over gloo and then behaves as the run's data file says. Not here: any training.

Behaviours: `finish`; `kill N`, `raise N`, `leave N` (rank N ends badly while the others wait for it, by `leave` without
a word); `wait` (until ended; `wait deaf`: rank 1 does not heed SIGTERM); `alone` (reports a world of one); `early N`
(rank N raises before reporting); `never` (silent).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from executor.worker.world import lastwords


def main(folder: Path) -> None:
    """One rank."""
    plan = json.loads((folder / "plan.json").read_text())
    behaviour, _, which = Path(plan["job"]["recipe"]["data"]).read_text().split("\n")[0].partition(" ")
    rank = int(os.environ["RANK"])
    chosen = which == str(rank)
    dist.init_process_group("gloo")
    if behaviour == "early" and chosen:
        raise ValueError("before the mesh")
    world = 1 if behaviour == "alone" else dist.get_world_size()
    if behaviour != "never":
        (folder / "mesh" / f"rank-{rank}.json").write_text(
            json.dumps({"world_size": world, "env": sorted(os.environ), "host": socket.gethostname()})
        )
    print(f"rank {rank} met {dist.get_world_size()}", flush=True)
    dist.barrier()
    if behaviour == "kill" and chosen:
        os.kill(os.getpid(), signal.SIGKILL)
    if behaviour == "leave" and chosen:
        os._exit(9)
    if behaviour == "raise" and chosen:
        raise ValueError(f"the trouble is on rank {rank}")
    if behaviour in ("wait", "never"):
        if which == "deaf" and rank == 1:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        (folder / "mesh" / f"waiting-{rank}").touch()
        while True:
            time.sleep(1)
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()


if __name__ == "__main__":
    with lastwords.recorded(Path(sys.argv[1])):
        main(Path(sys.argv[1]))
