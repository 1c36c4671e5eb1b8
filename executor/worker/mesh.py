"""Whether the running framework has the mesh the plan decided on, and the record of what it has.

Without this check a framework that sees no device trains N separate one-process jobs and exits 0. Not here: asking
the framework (engines/).
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

from executor.folder.rundir import MESH, write_of_rank
from executor.worker.engines.base import LiveMesh
from executor.worker.world import timeouts
from planner.basics.errors import PlannerError
from planner.parallelism.case import EXPERT_AXES, MESH_AXES, axis_groups, mesh_of
from planner.spec.plan import Plan


def check_world(plan: Plan, rank: int, world_size: int) -> None:
    """Refuse a world of another size than the plan's, before a model is built (exit code 4)."""
    started = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != plan.layout.world_size or rank != int(os.environ.get("RANK", "0")):
        raise PlannerError(
            "mesh",
            f"{world_size} ranks (this one is {rank})",
            f"the plan has {plan.layout.world_size}, the launcher started {started}: the framework did not join them",
            "Check that each rank sees its device and that the launcher starts nodes x devices processes",
            exit_code=4,
        )


def expected_groups(plan: Plan, rank: int) -> dict[str, list[int]]:
    """The groups of more than one rank that this rank belongs to, by axis."""
    layout = plan.layout
    axes = dict.fromkeys((*MESH_AXES, *(EXPERT_AXES if layout.ep > 1 else ())))
    return {
        axis: group
        for axis in axes
        if mesh_of(layout, axis)[axis] > 1
        for group in axis_groups(layout, axis)
        if rank in group
    }


def check_mesh(plan: Plan, live: LiveMesh) -> None:
    """Refuse groups other than the plan's (exit code 4)."""
    check_world(plan, live.rank, live.world_size)
    expected = expected_groups(plan, live.rank)
    found = {axis: ranks for axis, ranks in live.groups.items() if len(ranks) > 1}
    if found != expected:
        raise PlannerError(
            "mesh",
            f"rank {live.rank} in {found}",
            f"the plan puts it in {expected}",
            "The configuration in the run folder is not the plan's: make the run folder again",
            exit_code=4,
        )


def write_mesh(plan: Plan, live: LiveMesh, folder: str, device: str, model: object) -> None:
    """mesh/rank-N.json: what this rank really is part of, and the class that it trains the model in."""
    record = {
        "schema": "mesh/1",
        "plan_hash": plan.content_hash,
        "rank": live.rank,
        "world_size": live.world_size,
        "node": int(os.environ.get("GROUP_RANK", "0")),
        "local_rank": int(os.environ.get("LOCAL_RANK", "0")),
        "host": socket.gethostname(),
        "device": device,
        "engine": plan.layout.engine,
        "model": type(model).__name__,
        "coordinates": live.coordinates,
        "groups": live.groups,
        "expected_groups": expected_groups(plan, live.rank),
        "timeouts_s": timeouts.of_groups(),
    }
    write_of_rank(Path(folder), MESH, live.rank, record)
