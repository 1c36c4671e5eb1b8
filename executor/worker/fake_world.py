"""One rank of a large world in one process: torch's own fake process group, real tensors, real modules.

Every collective returns at once and moves nothing, so memory is that of the rank and values are not. Not here: any
training, or how one rank is started (executor.launch).
"""

from __future__ import annotations

import os

import torch.distributed as dist

from planner.plan import Plan


def start(plan: Plan) -> None:
    """Join a world of the plan's size as rank 0, before any framework looks for a process group."""
    from torch.testing._internal.distributed.fake_pg import FakeStore  # registers the backend "fake" as well

    os.environ |= {"RANK": "0", "WORLD_SIZE": str(plan.layout.world_size), "LOCAL_RANK": "0"}
    dist.init_process_group("fake", rank=0, world_size=plan.layout.world_size, store=FakeStore())


def started() -> bool:
    """Whether this process is in a fake world."""
    return dist.is_initialized() and dist.get_backend() == "fake"
