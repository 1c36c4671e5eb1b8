"""An all-reduce over all ranks of a plan, in seconds: whether every rank meets every other, and how fast they talk.

One process a host: it imports torch once and forks the host's ranks. The task comes as JSON on stdin, each rank answers
with a line of JSON on stdout. Not here: who asks for it (executor.hosts.checks), or measuring links (links.py).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # torch has them in no __all__

from executor.system.processes import die_with_parent
from executor.worker.probe.check_mesh import blocked
from executor.worker.world.store import made

MEET_S = 15.0
"""How long rank 0 waits for the others, from when it listens. Imports come before: 2 to 15 s, as busy as a host is."""
IMPORT_S = 20.0
"""How long others wait for rank 0 to listen: it imports too."""
GROUP_S = 12.0
"""Patience with ranks that all are there, from then to the end of the timed calls."""
LAST_S = 0.3
"""How much longer than all others the rank stays that has the store: they still read from it."""
SMALL_BYTES = 4096
SPENT_S = 1.5
"""Seconds of timed calls at most."""


def main() -> int:
    """Fork the ranks of the task on stdin; 0 when all of them are done."""
    task = json.load(sys.stdin)
    die_with_parent(signal.SIGKILL)
    children = []
    for local in range(task["ranks"]):
        child = os.fork()
        if child == 0:
            die_with_parent(signal.SIGKILL)
            _say(_tried(task, local))
            os._exit(0)
        children.append(child)
    return max(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


def _tried(task: dict[str, Any], local: int) -> dict[str, Any]:
    rank = task["first"] + local
    stage = ["store"]
    try:
        return {"rank": rank} | _reduced(task, rank, local, stage)
    except Exception as error:  # each library's own type
        return {"rank": rank, "stage": stage[0], "error": f"{type(error).__name__}: {error}"[:2000]}


def _give_up(rank: int, stage: list[str]) -> None:
    """Report that other ranks are not reached, and exit: gloo exceeds its own time limit."""
    error = "the ranks reach node 0's port, but not the ports of other ranks"
    _say({"rank": rank, "stage": stage[0], "unreached": True, "error": error})
    os._exit(1)


def _reduced(task: dict[str, Any], rank: int, local: int, stage: list[str]) -> dict[str, Any]:
    world, cuda = task["world"], task["kind"] == "cuda"
    wait = timedelta(seconds=MEET_S + task["more_s"])
    store = made(
        task["master"], task["port"], world, rank == 0, timeout=timedelta(seconds=IMPORT_S), wait_for_workers=False
    )
    store.set(f"here/{rank}", "")
    if rank == 0:
        store.set("missing", json.dumps(_missing(store, world)))
    if missing := json.loads(store.get("missing")):
        time.sleep(LAST_S * (rank == 0))
        return {"stage": "store", "missing": missing, "error": f"ranks {missing} did not join"}
    stage[0] = "mesh"
    if failed := blocked(store, task, first=local == 0):
        time.sleep(LAST_S * (rank == 0))
        return {
            "stage": "mesh",
            "blocked": failed,
            "error": "hosts do not reach each other on the ports that ranks use",
        }
    stage[0] = "group"
    impatience = threading.Timer(GROUP_S + task["more_s"], _give_up, (rank, stage))
    impatience.start()
    if cuda:
        torch.cuda.set_device(local)
    dist.init_process_group(
        "nccl" if cuda else "gloo", store=PrefixStore("group", store), rank=rank, world_size=world, timeout=wait
    )
    stage[0] = "all-reduce"
    device = torch.device("cuda", local) if cuda else torch.device("cpu")
    seconds = _timed(device, task["bytes"])
    impatience.cancel()
    found = {"bytes": task["bytes"], "seconds": seconds, "torch": torch.__version__}
    if cuda:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    dist.destroy_process_group()
    # Rank 0, which has the store, leaves last: the other side's close keeps its port free for the run.
    if rank:
        store.set(f"left/{rank}", "")
    else:
        store.wait([f"left/{other}" for other in range(1, world)], wait)
        time.sleep(LAST_S)
    return found


def _missing(store: TCPStore, world: int) -> list[int]:
    """The ranks that have not come MEET_S after rank 0."""
    deadline, left = time.monotonic() + MEET_S, list(range(1, world))
    while left and time.monotonic() < deadline:
        left = [rank for rank in left if not store.check([f"here/{rank}"])]
        time.sleep(0.05)
    return left


def _timed(device: torch.device, size: int) -> float:
    """Median seconds of an all-reduce of `size` bytes; all ranks agree on the number of calls from the first one's
    time."""
    small, large = (torch.zeros(each // 4, device=device) for each in (SMALL_BYTES, size))
    dist.all_reduce(small)
    first = torch.tensor([_once(large)], device=device)
    dist.all_reduce(first, op=dist.ReduceOp.MAX)
    calls = max(1, min(20, int(SPENT_S / max(float(first), 1e-6))))
    each = sorted(_once(large) for _ in range(calls))
    return each[len(each) // 2]


def _once(data: torch.Tensor) -> float:
    began = time.perf_counter()
    dist.all_reduce(data)
    if data.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - began


def _say(found: dict[str, Any]) -> None:
    os.write(sys.stdout.fileno(), (json.dumps(found) + "\n").encode())


if __name__ == "__main__":
    sys.exit(main())
