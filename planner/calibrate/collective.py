"""A bandwidth row through the link model: the bandwidth that a collective of some bytes is predicted to reach.

Not here: the question of a row (asked.py), or the link model (comm.py).
"""

from __future__ import annotations

from planner.basics.quantities import GB
from planner.calibrate.asked import CannotPredict, RowQuestion
from planner.engines.base import Call
from planner.figures.comm import collective_seconds, traffic
from planner.figures.passes import coefficients
from planner.parallelism.case import Case
from planner.spec import Cluster, Layout, ModelSpec, Runtime, TrainingJob
from planner.spec.calibration import Calibration

OPS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""By operation, how often (n - 1) / n of the bytes cross a link: nccl-tests' bus bandwidth (PERFORMANCE.md there)."""

NO_MODEL = ModelSpec(name="none", layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, ffn=1, vocab=1)
"""A collective has no model; a case needs one."""


def bus_bandwidth_gbps(asked: RowQuestion, calibration: Calibration) -> float:
    """GB/s as nccl-tests counts them (CannotPredict with the reason)."""
    call, cluster = asked.row.collective, asked.cluster
    if call is None or call.op not in OPS:
        raise CannotPredict(f"collective {call.op if call else None} is not predicted")
    if call.bytes is None:
        raise CannotPredict("message size not stated")
    if cluster is None:
        raise CannotPredict(asked.refusal or "the machines are not known")
    if (ranks := cluster.gpus) < 2:
        raise CannotPredict("a group of one rank sends nothing")
    if not cluster.gpu.flops_per_s:
        raise CannotPredict(f"GPU {cluster.gpu.name} is not known here")
    seconds = call_seconds(cluster, ranks, call.op, call.bytes, calibration)
    return bus_bytes(call.op, call.bytes, ranks) / seconds / GB


def bus_bytes(op: str, payload_bytes: float, ranks: int) -> float:
    """Bytes that nccl-tests counts on the bus."""
    return OPS[op] * (ranks - 1) / ranks * payload_bytes


def call_seconds(cluster: Cluster, ranks: int, op: str, payload_bytes: float, calibration: Calibration) -> float:
    """Seconds of one call over the first `ranks` ranks of a cluster."""
    case = group(cluster, ranks)
    (sent,) = traffic(case, [Call(op, "dp_replicate", "model", "backward", 1, payload_bytes)])
    return float(collective_seconds(sent, cluster.levels, coefficients(case, calibration)))


def group(cluster: Cluster, ranks: int) -> Case:
    """The first `ranks` ranks of a cluster as one group, with nothing to train."""
    layout = Layout(engine="ddp", dp_replicate=ranks)
    return Case(NO_MODEL, TrainingJob(), layout, cluster, Runtime(name="none", engine="ddp", kernels="hf"))
