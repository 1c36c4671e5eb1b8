"""Whether the hosts of an all-reduce reach each other on ports of their own, before libraries try and wait.

Each host opens a port that the system chooses, as gloo and NCCL do, and calls those of all others; torch's store says
which they are. Nothing is said on these connections. Not here: the all-reduce (check_reduce.py).
"""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch has it in no __all__

CALL_S = 3.0


def blocked(store: TCPStore, task: Mapping[str, Any], *, first: bool) -> dict[int, list[int]]:
    """By node, the nodes that it does not reach; the same on every rank. `first` is the one rank of a host that asks
    for it."""
    node, nodes = int(task["node"]), range(int(task["nodes"]))
    with contextlib.ExitStack() as doors:
        if first:
            address = str(task["address"])
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            own = doors.enter_context(socket.create_server((address, 0), family=family, backlog=len(nodes)))
            store.set(f"door/{node}", f"{address} {own.getsockname()[1]}")
            others = [one for one in nodes if one != node]
            with ThreadPoolExecutor(min(len(others), 32) or 1) as pool:
                reached = pool.map(lambda one: _reaches(address, store.get(f"door/{one}").decode()), others)
                failed = [one for one, good in zip(others, reached, strict=True) if not good]
            store.set(f"mesh/{node}", json.dumps(failed))
        found = {one: json.loads(store.get(f"mesh/{one}")) for one in nodes}
    return {one: failed for one, failed in found.items() if failed}


def _reaches(source: str, door: str) -> bool:
    address, _, port = door.partition(" ")
    with (
        contextlib.suppress(OSError),
        contextlib.closing(socket.create_connection((address, int(port)), CALL_S, source_address=(source, 0))),
    ):
        return True
    return False
