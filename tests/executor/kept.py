"""What an earlier start leaves in a run folder, made by hand: checkpoints, and a record. Not here: any claim."""

from __future__ import annotations

from pathlib import Path

import msgspec

from executor.folder import checkpoints
from executor.folder.checkpoints import File
from planner.spec import Cluster, Gpu, Layout, Link, ModelSpec, Recipe, Runtime, TrainingJob
from planner.spec.plan import Input, Plan
from planner.spec.record import RunRecord

LINK = Link(name="loopback", bytes_per_s_per_direction=1e9, latency_s=1e-5)
CLUSTER = Cluster(
    name="localhost", gpu=Gpu(name="cpu", kind="cpu"), nodes=1, gpus_per_node=2, intra_link=LINK, inter_link=LINK
)
PLAN = Plan(
    model=ModelSpec(name="tiny", layers=1, hidden=16, heads=2, kv_heads=2, head_dim=8, ffn=32, vocab=300),
    cluster=CLUSTER,
    job=TrainingJob(seq_len=8, precision="fp32", recipe=Recipe(steps=40)),
    layout=Layout(engine="ddp", dp_replicate=2),
    runtime=Runtime(name="ddp", engine="ddp", kernels="hf"),
    inputs=(Input(field="data", path="/d", digest="sha256:1", bytes=1),),
).sealed()


def checkpoint(folder: Path, step: int, plan: Plan = PLAN) -> Path:
    made = folder / "checkpoints" / f"step-{step}"
    made.mkdir()
    (made / "rank-0.safetensors").write_bytes(b"numbers")
    files = {"rank-0.safetensors": File(7, checkpoints.digest(made / "rank-0.safetensors"))}
    (made / "COMPLETE").write_bytes(msgspec.json.encode(checkpoints.described(plan, step, step, files)))
    return made


def record(status: str, code: int) -> RunRecord:
    return RunRecord(
        plan_hash=PLAN.content_hash, status=status, exit_code=code, started="then", seconds=60.0, backend="accelerate",
        launcher="local/loopback", world_size=2, nodes=1, message="rank 1 failed first: killed by SIGKILL",
        failed_rank=1,
    )  # fmt: skip
