"""What all backends need: rules that hold for our trainer, and reading a file back through its framework.

The framework's parser runs in a process of its own, so that this package never imports torch. Not here: any file.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

from planner.errors import PlannerError
from planner.formats import FORMATS
from planner.inventory import lora_targets
from planner.plan import Plan
from planner.spec import TrainingJob

HEADER = "# generated from plan {hash}; do not edit"
READ_BACK_TIMEOUT_S = 120
OPTIMIZERS, PRECISIONS, METHODS = ("adamw", "sgd"), ("fp32", "bf16", "pure-bf16"), ("full", "lora")
RECOMPUTE = ("none", "full")
"""What executor/worker builds."""


def common_refusal(plan: Plan, splits: tuple[str, ...] = ()) -> str | None:
    """Why the trainer cannot run the plan under any of its engines, or None. `splits`: axes that this backend has."""
    layout, job = plan.layout, plan.job
    for axis in ("pp", "cp", "tp", "ep"):
        if axis not in splits and getattr(layout, axis) != 1:
            has = " and ".join(("data", "states", *splits))
            return f"{axis}={getattr(layout, axis)} is not launchable yet: this backend splits {has} only"
    for field in ("offload_activations", "zero_secondary_shard"):
        if getattr(layout, field):
            return f"{field} is not launchable yet: this backend keeps states and activations on the devices, once"
    if layout.recompute not in RECOMPUTE:
        return f"recompute {layout.recompute} is planned but not launchable yet: the trainer has {', '.join(RECOMPUTE)}"
    if plan.model.family not in FORMATS:
        return f"family {plan.model.family} is not one that the trainer builds"
    if plan.model.moe is not None:
        return f"the trainer is not tested with a mixture of experts; {plan.model.name} is not launchable"
    if layout.world_size != plan.cluster.gpus:
        return f"the layout has {layout.world_size} ranks, the cluster {plan.cluster.gpus} devices"
    if job.global_batch_size is not None and job.global_batch_size != layout.global_batch_size:
        return f"global_batch_size {job.global_batch_size} is not the layout's {layout.global_batch_size}"
    if refusal := _job_refusal(job):
        return refusal
    legal = lora_targets(plan.model)
    unknown = [name for name in (job.lora.targets if job.lora else ()) if name not in legal]
    if unknown:
        return f"lora targets {', '.join(unknown)} are not linear modules of this model; known: {', '.join(legal)}"
    return None


def _job_refusal(job: TrainingJob) -> str | None:
    """What is planned but not trained: each choice against those the worker builds."""
    for what, value, known in (
        ("optimizer", job.optimizer.name, OPTIMIZERS),
        ("precision", job.precision, PRECISIONS),
        ("method", job.method, METHODS),
    ):
        if value not in known:
            return f"{what} {value} is planned but not launchable yet: the trainer has {', '.join(known)}"
    if job.mean_seq_len is not None:
        return "documents of their own length are planned but not launchable yet: the trainer fills every sequence"
    return None


def readable(framework: str, title: str, folder: str, config: str) -> dict[str, Any]:
    """`read_back` of a file that must parse (PlannerError); `title` is how people write the framework."""
    found = read_back(framework, folder, config)
    if "error" in found:
        raise PlannerError(
            config, None, f"{title} cannot read it: {found['error']}", "Make the run folder again", exit_code=4
        )
    return found


def read_back(framework: str, folder: str, config: str) -> dict[str, Any]:
    """The effective values of a configuration file, as its framework's own code reads it."""
    path = Path(folder) / config
    try:
        stat = path.stat()
    except OSError:
        return {"error": f"{path} is missing"}
    return _read_back(framework, str(path.resolve()), stat.st_mtime_ns, stat.st_size)


@lru_cache(maxsize=32)
def _read_back(framework: str, path: str, modified_ns: int, size: int) -> dict[str, Any]:
    import json  # both here alone: the planner imports this module to ask what can be launched, and start time counts
    import subprocess

    command = [sys.executable, "-m", "executor.worker.readback", framework, path]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=READ_BACK_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"its parser did not answer in {READ_BACK_TIMEOUT_S} s"}
    if done.returncode:
        reason = done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit code {done.returncode}"
        if "No module named" in reason:
            raise PlannerError(
                framework, None, f"cannot be imported ({reason})", "Install meshwright[run]", exit_code=4
            )
        return {"error": reason}
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer
