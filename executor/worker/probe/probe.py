"""One rank of a probe: join the others, time what every training step is made of, and let rank 0 write it down.

Started by torchrun as `-m executor.worker.probe.probe FOLDER`; reads FOLDER/task.json, writes FOLDER/rows.json. Not
here: what is timed (compute.py, links.py), or what follows from it (planner.calibrate.machine).
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from executor.folder.rundir import MESH, write_json, write_of_rank
from executor.system import facts
from executor.worker.probe.compute import compute_tables
from executor.worker.probe.links import link_tables
from executor.worker.world import lastwords, store, words
from planner.calibrate.probe import Device
from planner.spec.presets import host_memory_bytes

QUEUED_S = 2e-3
"""A device that works beside its host is given so much before it is waited for: the wait is then no part of a call."""
ROUNDS = 3
"""Everything is timed so often if time allows, far apart: what disturbs a machine for some seconds then spoils one time
of three."""
TASK, ROWS = "task.json", "rows.json"


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher asks of every rank. `quick` takes few sizes, for a test of the way and not of the machine."""

    kind: str
    nodes: int
    ranks_per_node: int
    quick: bool = False
    budget_s: float = 150.0


class Bench:
    """Times calls while every rank does the same, and agrees with the others on how often.

    A call's figure is the median of its repetitions here, then over ranks: the pace of the machine as it was, not the
    best it could do.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task, self.device = task, device
        self._began = time.monotonic()

    def spent(self) -> float:
        """The part of the time budget that is gone, the same on every rank."""
        return self.agreed((time.monotonic() - self._began) / self.task.budget_s, max)

    def agreed(self, value: float, choose: Callable[[list[float]], float]) -> float:
        """One number for all ranks."""
        return choose(words.gathered(value, float))

    def seconds(self, call: Callable[[], Any], share_s: float = 0.3) -> float:
        """Median seconds of one call, repeated for about `share_s` seconds, and 5 to 200 times."""
        queued, count = self._repeats(call, share_s, most=200)
        return self.agreed(statistics.median(self._once(call, queued) for _ in range(count)), statistics.median)

    def slowest(self, call: Callable[[], Any], share_s: float = 0.3) -> float:
        """The same, 3 to 60 times, for a call that ranks make together: each takes as long as on its slowest rank."""
        queued, count = self._repeats(call, share_s, most=60, least=3)
        mine = torch.tensor([self._once(call, queued) for _ in range(count)], dtype=torch.float64, device=self.device)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        return float(mine.median())

    def _repeats(self, call: Callable[[], Any], share_s: float, most: int, least: int = 5) -> tuple[int, int]:
        """(calls in a row before the device is waited for, repetitions), the same on every rank; all begin together."""
        self._once(call)  # first calls make plans and pages
        once_s = self.agreed(self._once(call), max)
        queued = 1 if self.device.type == "cpu" else max(1, round(QUEUED_S / once_s))
        count = int(min(max(share_s / (once_s * queued), least), most))
        dist.barrier()
        return queued, count

    def _once(self, call: Callable[[], Any], queued: int = 1) -> float:
        began = time.perf_counter()
        for _ in range(queued):
            call()
        self.finish()
        return (time.perf_counter() - began) / queued

    def finish(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def main(arguments: Sequence[str]) -> int:
    """Run one rank of the probe."""
    folder = Path(arguments[0])
    with lastwords.recorded(folder):
        _time(folder)
    return 0


def _time(folder: Path) -> None:
    task = msgspec.json.decode((folder / TASK).read_bytes(), type=Task)
    device = _device(task)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    makes = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != str(True)
    meeting = store.made(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, makes)
    dist.init_process_group("gloo" if task.kind == "cpu" else "nccl", store=meeting, rank=rank, world_size=world)
    write_of_rank(folder, MESH, rank, {"rank": rank, "world_size": dist.get_world_size()})
    bench = Bench(task, device)
    rounds = [compute_tables(bench) | link_tables(bench)]
    while len(rounds) < (1 if task.quick else ROUNDS) and bench.spent() * (len(rounds) + 1) / len(rounds) <= 1:
        rounds.append(compute_tables(bench) | link_tables(bench))
    tables = _medians(rounds)
    if rank == 0:
        told = {"device": device_facts(device), "host": host_facts(), "threads": torch.get_num_threads()}
        write_json(folder / ROWS, told | tables)
    dist.barrier()
    dist.destroy_process_group()


def _medians(rounds: list[dict[str, list[dict[str, Any]]]]) -> dict[str, list[dict[str, Any]]]:
    """One table of each kind: rows of the same sizes as one, with the median of each of their times."""
    merged = {}
    for name in rounds[0]:
        found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
        for row in (row for tables in rounds for row in tables[name]):
            found.setdefault(tuple(value for key, value in row.items() if not _timed(key)), []).append(row)
        merged[name] = [
            {
                key: statistics.median(row[key] for row in rows) if _timed(key) else value
                for key, value in rows[0].items()
            }
            for rows in found.values()
        ]
    return merged


def _timed(key: str) -> bool:
    return key == "seconds" or key.endswith("_s")


def device_facts(device: torch.device) -> dict[str, Any]:
    """The keys of planner.calibrate.probe.Device, those that are known: torch's words before NVML's."""
    if device.type == "cpu":
        return {"name": facts.processor(), "kind": "cpu", "memory_bytes": host_memory_bytes()}
    seen = torch.cuda.get_device_properties(device)
    found = facts.card_facts(f"GPU-{seen.uuid}") | {
        "name": seen.name,
        "kind": "hip" if torch.version.hip else "cuda",
        "memory_bytes": float(seen.total_memory),
        "capability": f"{seen.major}.{seen.minor}",
        "multiprocessors": seen.multi_processor_count,
    }
    return {key: found[key] for key in Device.__struct_fields__ if found.get(key) is not None}


def host_facts() -> dict[str, Any]:
    """The keys of planner.calibrate.probe.Host, of the node that this rank is on."""
    return {
        "processor": facts.processor(),
        "cores": facts.cores(),
        "memory_bytes": host_memory_bytes(),
        "network_bits_per_s": facts.network_bits_per_s(),
    }


def _device(task: Task) -> torch.device:
    if task.kind == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    return device


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)  # as in train.py: gloo's threads abort a process that ends the ordinary way
