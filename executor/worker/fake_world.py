"""One rank of a large world in one process: torch's own fake process group, real tensors, real modules.

Every collective returns at once and moves nothing, so memory is that of the rank and values are not. Not here: any
training, how one rank is started (executor.run.launch), or a world of fake tensors too (trace/fake.py).
"""

from __future__ import annotations

import os

import torch.distributed as dist

from executor.worker.engines.base import RankEngine
from executor.worker.model.model import Unfilled, build_optimizer, unfilled_model
from executor.worker.model.values import zeros
from planner.basics.errors import PlannerError
from planner.spec.plan import Plan


def start(plan: Plan) -> None:
    """Join a world of the plan's size as rank 0, before any framework looks for a process group."""
    os.environ |= environment(plan, 0)
    join(plan, 0)


def environment(plan: Plan, rank: int) -> dict[str, str]:
    """The variables from which frameworks read this process's rank."""
    local = rank % plan.cluster.gpus_per_node
    return {"RANK": str(rank), "WORLD_SIZE": str(plan.layout.world_size), "LOCAL_RANK": str(local)}


def join(plan: Plan, rank: int) -> None:
    """torch's fake process group, with this process as one rank of the plan's world."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake" as well

    dist.init_process_group("fake", rank=rank, world_size=plan.layout.world_size, store=FakeStore())


def started() -> bool:
    """Whether this process is in a fake world."""
    return dist.is_initialized() and dist.get_backend() == "fake"


def prepare_with_zeros(engine: RankEngine) -> None:
    """Give a rank its shards with zeros in them: for models too large to initialise."""
    plan = engine.plan
    if plan.job.base_quantization is not None:
        rule, fix = "4-bit weights are made of numbers, and this model is built without", "Use method=lora"
        raise PlannerError("method", plan.job.method, rule, fix)
    bare = unfilled_model(plan)
    unfilled = Unfilled(bare.model, [(name, zeros) for name in bare.model.state_dict()])
    engine.prepare(unfilled, lambda built: build_optimizer(built, plan))
