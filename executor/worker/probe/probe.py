"""One rank of a probe: join the others, time what every training step is made of, and let rank 0 write it down.

Started by torchrun as `-m executor.worker.probe.probe FOLDER`; reads FOLDER/task.json, writes FOLDER/rows.json. Not
here: what is timed (compute.py, links.py), or what follows from it (planner.calibrate.machine).
"""

from __future__ import annotations

import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from executor.folder.rundir import MESH, write_json, write_of_rank
from executor.system import facts
from executor.worker.probe.bench import Bench, Task
from executor.worker.probe.compute import compute_tables
from executor.worker.probe.links import link_tables
from executor.worker.world import lastwords, store
from planner.calibrate.probe import ProbedDevice
from planner.spec.presets import host_memory_bytes

ROUNDS = 3
"""Rounds of timing if time allows, far apart: a disturbance of some seconds then spoils one time of three."""
TASK, ROWS = "task.json", "rows.json"


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
        machine = {"device": device_facts(device), "host": host_facts(), "threads": torch.get_num_threads()}
        write_json(folder / ROWS, machine | tables)
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
    """The keys of planner.calibrate.probe.ProbedDevice, those that are known: torch's words before NVML's."""
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
    return {key: found[key] for key in ProbedDevice.__struct_fields__ if found.get(key) is not None}


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
