"""One rank of a large world in one process: torch's own fake process group, real tensors, real modules.

Every collective returns at once and moves nothing, so memory is that of the rank and values are not. Not here: any
training, how one rank is started (executor.launch), or a world of fake tensors too (tracefake.py).
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from executor.worker.engines.accelerate import AccelerateEngine
from executor.worker.engines.base import Engine
from executor.worker.model import build_model, build_optimizer
from planner.errors import PlannerError
from planner.plan import Plan

if TYPE_CHECKING:
    from executor.worker.engines.transformers_tp import TransformersTpEngine


def start(plan: Plan) -> None:
    """Join a world of the plan's size as rank 0, before any framework looks for a process group."""
    os.environ |= environment(plan, 0)
    join(plan, 0)


def environment(plan: Plan, rank: int) -> dict[str, str]:
    """What frameworks read of the rank that this process is."""
    local = rank % plan.cluster.gpus_per_node
    return {"RANK": str(rank), "WORLD_SIZE": str(plan.layout.world_size), "LOCAL_RANK": str(local)}


def join(plan: Plan, rank: int) -> None:
    """torch's fake process group, with this process as one rank of the plan's world."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake" as well

    dist.init_process_group("fake", rank=rank, world_size=plan.layout.world_size, store=FakeStore())


def started() -> bool:
    """Whether this process is in a fake world."""
    return dist.is_initialized() and dist.get_backend() == "fake"


def prepare_from_meta(engine: Engine) -> None:
    """Shard a model without data, then give the rank its shards: for models that the host has no room for.

    The weights are zeros, and what loading a model takes is not seen.
    """
    plan = engine.plan
    if plan.job.base_quantization is not None:
        rule, fix = "4-bit weights are made of numbers, and this model is built without", "Use method=lora"
        raise PlannerError("method", plan.job.method, rule, fix)
    with torch.device("meta"):
        model = build_model(plan)
    engine.prepare(model, lambda built: build_optimizer(built, plan.job))
    names = {id(weight): name for name, weight in engine.model.named_parameters()}
    engine.model.to_empty(device=engine.device)
    with torch.no_grad():
        for tensor in (*engine.model.parameters(), *engine.model.buffers()):
            (tensor.to_local() if isinstance(tensor, DTensor) else tensor).zero_()
    weights = dict(engine.model.named_parameters())
    optimizer = cast("AccelerateEngine | TransformersTpEngine", engine).optimizer  # nothing else shards without data
    for group in optimizer.param_groups:
        group["params"] = [weights[names[id(weight)]] for weight in group["params"]]
    if isinstance(engine, AccelerateEngine):
        # It finds an optimizer's weights again by address, and without data all have the same.
        optimizer.param_groups[0]["params"] = [weight for weight in weights.values() if weight.requires_grad]
