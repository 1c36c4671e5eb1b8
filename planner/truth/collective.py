"""A bandwidth row through the link model: what the planner says one collective of so many bytes reaches.

Not here: rows of training steps (cases.py), or the link model (linktime.py).
"""

from __future__ import annotations

from planner.calibration import Calibration
from planner.case import Case
from planner.comm import traffic
from planner.engines.base import Call
from planner.linktime import collective_seconds
from planner.spec import Cluster, Layout, ModelSpec, Runtime, TrainingJob
from planner.steptime import coefficients
from planner.truth.machines import known_cluster
from planner.truth.notes import CannotPredict
from planner.truth.rows import Row
from planner.units import GB

OPS = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0}
"""By operation, how often (n - 1) / n of the bytes cross a link: nccl-tests' bus bandwidth (PERFORMANCE.md there)."""

NOBODY = ModelSpec(name="none", layers=1, hidden=1, heads=1, kv_heads=1, head_dim=1, ffn=1, vocab=1)
"""A collective has no model; a case needs one."""


def bus_bandwidth_gbps(row: Row, calibration: Calibration) -> float:
    """GB/s as nccl-tests counts them (CannotPredict with the reason)."""
    call, ranks = row.collective, row.hardware.gpus
    if call is None or call.op not in OPS:
        raise CannotPredict(f"collective {call.op if call else None} is not predicted")
    if call.bytes is None:
        raise CannotPredict("message size not stated")
    cluster = known_cluster(row)
    if ranks is None or ranks < 2:
        raise CannotPredict("a group of one rank sends nothing")
    seconds = call_seconds(cluster, ranks, call.op, call.bytes, calibration)
    return OPS[call.op] * (ranks - 1) / ranks * call.bytes / seconds / GB


def call_seconds(cluster: Cluster, ranks: int, op: str, payload_bytes: float, calibration: Calibration) -> float:
    """Seconds of one call over the first so many ranks of a cluster."""
    layout = Layout(engine="ddp", dp_replicate=ranks)
    case = Case(NOBODY, TrainingJob(), layout, cluster, Runtime(name="none", engine="ddp", kernels="hf"))
    (sent,) = traffic(case, [Call(op, "dp_replicate", "model", "backward", 1, payload_bytes)])
    return float(collective_seconds(sent, cluster.levels, coefficients(case, calibration)))
