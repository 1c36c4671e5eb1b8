"""The ranks of a plan for CPU processes of this machine (planned.py), started for real over gloo.

Not here: what a test expects of the run, or how a rank starts so fast (warm.py). The project's own launcher, with
torchrun, is tested elsewhere; this needs none of it.
"""

from __future__ import annotations

import random
import socket
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from planned import TINY as TINY  # others ask for these here
from planned import TINY_MIXTRAL as TINY_MIXTRAL
from planned import TINY_QWEN3_MOE as TINY_QWEN3_MOE
from planned import TINY_QWEN3_TIED as TINY_QWEN3_TIED
from planned import backend_of as backend_of
from planned import make_plan as make_plan
from safetensors.torch import load_file
from warm import Nursery

from executor.launchers.local import LaunchedNode, LaunchedNodes
from planner.spec.plan import Plan, encode_plan


@dataclass(frozen=True)
class Finished:
    """A run that ended: its folder, the worst exit code of each node's ranks, and what they printed."""

    folder: Path
    exit_codes: tuple[int, ...]
    output: str

    @property
    def metrics(self) -> list[dict[str, float]]:
        """The steps of metrics.jsonl, one object each."""
        return [line for line in self.lines if "loss" in line]

    @property
    def lines(self) -> list[dict[str, float]]:
        """metrics.jsonl: steps, and validations between them."""
        return [msgspec.json.decode(line) for line in (self.folder / "metrics.jsonl").read_bytes().splitlines()]

    def column(self, name: str) -> np.ndarray:
        """One column of the metrics over the steps."""
        return np.array([step[name] for step in self.metrics])

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        """The weights that were trained, as saved: the adapters where there are any, else all."""
        adapters = self.folder / "adapter" / "adapter_model.safetensors"
        return load_file(adapters if adapters.exists() else self.folder / "weights" / "model.safetensors")

    def json(self, name: str) -> dict[str, object]:
        """One JSON file of the run folder."""
        return msgspec.json.decode((self.folder / name).read_bytes())


def write_run_folder(plan: Plan, folder: Path) -> None:
    """plan.json and the framework's configuration."""
    for name, text in {"plan.json": encode_plan(plan).decode(), **backend_of(plan.layout).files(plan)}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


NURSERY = Nursery()


def run_warm(
    plan: Plan,
    folder: Path,
    *arguments: str,
    environment: dict[str, str] | None = None,
    module: str = "executor.worker.train",
    hosts: LaunchedNodes | None = None,
    per_node: int | None = None,
) -> Finished:
    """Train a plan with ranks that are forked from a warm process; `environment` is added to every rank's. `module`
    runs in place of the trainer, in the namespaces of `hosts`, with `per_node` ranks a node instead of the plan's."""
    write_run_folder(plan, folder)
    added = _environment(plan, folder) | (environment or {})
    port, nodes, local = _free_port(), plan.cluster.nodes, per_node or plan.cluster.gpus_per_node
    ranks = []
    for rank in range(nodes * local):
        node, local_rank = divmod(rank, local)
        place = _place(hosts.hosts[node]) if hosts else {}
        facts = {
            "MASTER_ADDR": hosts.hosts[0].address if hosts else "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": nodes * local,
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": local,
            "GROUP_RANK": node,
        }
        ranks.append(
            {
                "module": module,
                "environment": added | place | {name: str(value) for name, value in facts.items()},
                "arguments": [str(folder), *arguments],
                "log": str(folder / f"node-{node}.log"),
            }
        )
    codes = NURSERY.run(ranks)
    by_node = tuple(max(codes[node * local : (node + 1) * local], key=abs) for node in range(nodes))
    output = "".join((folder / f"node-{node}.log").read_text(errors="replace") for node in range(nodes))
    return Finished(folder=folder, exit_codes=by_node, output=output)


def _place(host: LaunchedNode) -> dict[str, str]:
    """A namespace's host for a rank that enters it: its name, its interface, and what is counted there."""
    return dict(host.env) | {"NETWORK_NAMESPACE": host.prefix[-1], "GLOO_SOCKET_IFNAME": str(host.interface)}


def _environment(plan: Plan, folder: Path) -> dict[str, str]:
    return backend_of(plan.layout).environment(plan, str(folder)) | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "PYTHONWARNINGS": "ignore",
    }


def _free_port() -> int:
    for port in random.sample(range(20000, 30000), 50):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise RuntimeError("no free port between 20000 and 30000")
