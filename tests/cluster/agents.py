"""Start a plan's ranks for real: one torchrun agent a node, on this machine, over gloo.

Not here: what a test expects of the run. The project's own launcher is tested elsewhere; this needs none of it.
"""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch
from safetensors.torch import load_file
from warm import Nursery

from executor.backends.accelerate import AccelerateBackend
from executor.backends.deepspeed import DeepSpeedBackend
from executor.backends.transformers import TransformersBackend
from planner.backend import Backend
from planner.case import Case
from planner.comm import comm_volume
from planner.memory import memory_breakdown
from planner.plan import Plan, Prediction, encode_plan
from planner.question import usual_runtime
from planner.spec import Cluster, Gpu, Layout, Link, ModelSpec, Runtime, TrainingJob

PROJECT = Path(__file__).parents[2]
TIMEOUT_S = 240

TINY = ModelSpec(
    name="test-llama", layers=2, hidden=64, heads=4, kv_heads=2, head_dim=16, ffn=176, vocab=512, max_seq_len=128
)


@dataclass(frozen=True)
class Finished:
    """A run that ended: its folder, its agents' exit codes and what they printed."""

    folder: Path
    exit_codes: tuple[int, ...]
    output: str

    @property
    def metrics(self) -> list[dict[str, float]]:
        """metrics.jsonl, one object a step."""
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


def make_plan(layout: Layout, job: TrainingJob, *, nodes: int, per_node: int, model: ModelSpec = TINY) -> Plan:
    """A plan for CPU processes of this machine."""
    link = Link(name="loopback", bytes_per_s_per_direction=1e9, latency_s=1e-5)
    cluster = Cluster(
        name="localhost",
        gpu=Gpu(name="cpu", kind="cpu"),
        nodes=nodes,
        gpus_per_node=per_node,
        intra_link=link,
        inter_link=link,
    )
    runtime = Runtime(name=layout.engine, engine=layout.engine, kernels="hf", backend=backend_of(layout).name)
    if layout.engine == "transformers-tp":  # its kernels are not the plain ones
        runtime = msgspec.structs.replace(usual_runtime(layout.engine), backend=backend_of(layout).name)
    return predicted(Plan(model=model, cluster=cluster, job=job, layout=layout, runtime=runtime)).sealed()


def predicted(plan: Plan) -> Plan:
    """The plan with the planner's memory and collectives."""
    case = Case(plan.model, plan.job, plan.layout, plan.cluster, plan.runtime)
    prediction = Prediction(memory=memory_breakdown(case).phases, collectives=comm_volume(case).engine)
    return msgspec.structs.replace(plan, prediction=prediction)


BACKENDS: dict[str, Backend] = {"deepspeed": DeepSpeedBackend(), "transformers-tp": TransformersBackend()}


def backend_of(layout: Layout) -> Backend:
    """The backend that runs a layout's engine."""
    return BACKENDS.get(layout.engine, AccelerateBackend())


def write_run_folder(plan: Plan, folder: Path) -> None:
    """plan.json and the framework's configuration."""
    for name, text in {"plan.json": encode_plan(plan).decode(), **backend_of(plan.layout).files(plan)}.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def run(plan: Plan, folder: Path, *arguments: str, environment: dict[str, str] | None = None) -> Finished:
    """Train a plan with one torchrun agent a node. The port lies below the range the kernel hands to clients."""
    write_run_folder(plan, folder)
    added = _environment(plan, folder) | (environment or {})
    port = _free_port()
    agents = []
    for node in range(plan.cluster.nodes):
        command = [sys.executable, "-m", "torch.distributed.run"]
        command += ["--nnodes", str(plan.cluster.nodes), "--node-rank", str(node)]
        command += ["--nproc-per-node", str(plan.cluster.gpus_per_node)]
        command += ["--master-addr", "127.0.0.1", "--master-port", str(port)]
        command += ["-m", "executor.worker.train", str(folder), *arguments]
        log = (folder / f"agent-{node}.log").open("wb")
        agents.append(
            subprocess.Popen(command, cwd=PROJECT, env=os.environ | added, stdout=log, stderr=subprocess.STDOUT)
        )
    try:
        codes = tuple(agent.wait(timeout=TIMEOUT_S) for agent in agents)
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()
                agent.wait(timeout=30)
    return _finished(plan, folder, codes)


NURSERY = Nursery()


def run_warm(plan: Plan, folder: Path, *arguments: str) -> Finished:
    """`run` with ranks that are forked from a warm process, not started by torchrun: a case in a third of the time."""
    write_run_folder(plan, folder)
    added = _environment(plan, folder)
    port, nodes, local = _free_port(), plan.cluster.nodes, plan.cluster.gpus_per_node
    ranks = []
    for rank in range(nodes * local):
        node, local_rank = divmod(rank, local)
        facts = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
            "WORLD_SIZE": nodes * local,
            "RANK": rank,
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": local,
            "GROUP_RANK": node,
        }
        ranks.append(
            {
                "environment": added | {name: str(value) for name, value in facts.items()},
                "arguments": [str(folder), *arguments],
                "log": str(folder / f"agent-{node}.log"),
            }
        )
    codes = NURSERY.run(ranks)
    return _finished(plan, folder, tuple(max(codes[n * local : (n + 1) * local], key=abs) for n in range(nodes)))


def _environment(plan: Plan, folder: Path) -> dict[str, str]:
    return backend_of(plan.layout).environment(plan, str(folder)) | {
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
        "PYTHONUNBUFFERED": "1",
        "PYTHONPATH": str(PROJECT),
        "PYTHONWARNINGS": "ignore",
    }


def _finished(plan: Plan, folder: Path, codes: tuple[int, ...]) -> Finished:
    output = "".join((folder / f"agent-{node}.log").read_text(errors="replace") for node in range(plan.cluster.nodes))
    return Finished(folder=folder, exit_codes=codes, output=output)


def _free_port() -> int:
    for port in random.sample(range(20000, 30000), 50):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) != 0:
                return port
    raise RuntimeError("no free port between 20000 and 30000")
