"""Contract of a user's own script: the world size and the wrapper that make its run count as the plan's.

Not here: reading that from a running script (worker/world/live.py), or running one (worker/script.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from executor.backends.launched import launched
from planner.basics.errors import PlannerError
from planner.spec import Layout


class AnotherWorld(PlannerError):
    """A script that trains in another world, or another engine, than the plan's."""

    cause = "another world"


class WrappedScript(msgspec.Struct, frozen=True, kw_only=True):
    """World and wrapper of a script: `engine` None where its weights are wrapped in nothing that is known.

    `ranks` are those the wrapper works over, `shards` those that one copy of the weights is divided by; None where it
    does not say.
    """

    world_size: int
    rank: int
    engine: str | None = None
    wrapper: str | None = None
    zero_stage: int | None = None
    ranks: int | None = None
    shards: int | None = None


def differences(layout: Layout, found: WrappedScript) -> list[str]:
    """In what a script is another run than the plan's; empty where it is the plan's."""
    world = layout.world_size
    if found.world_size != world:
        where = "alone" if found.world_size == 1 else f"in a world of {found.world_size}"
        return [f"trains {where}, the plan has {world} ranks"]
    if world == 1:
        return []  # nothing has to be wrapped
    record = launched(layout.engine)
    planned = record.wrapper + (f" with ZeRO stage {layout.zero_stage}" if record.stage_shows else "")
    if found.wrapper is None:
        return [f"trains by itself: its model is in no wrapper of torch or DeepSpeed, the plan has {planned}"]
    if found.engine not in record.shows_as or (record.stage_shows and found.zero_stage != layout.zero_stage):
        stage = "" if found.zero_stage is None else f" with ZeRO stage {found.zero_stage}"
        return [f"trains in {found.wrapper}{stage}, the plan has {planned}"]
    replicas = layout.dp_replicate * layout.dp_shard
    if layout.facts.splits:
        return []  # its wrapper may work over ranks of other axes too
    if found.ranks not in (None, replicas):
        return [f"has {found.wrapper} over {found.ranks} ranks, the plan has {planned} over {replicas}"]
    if found.shards not in (None, layout.dp_shard):
        return [f"divides its weights by {found.shards}, the plan by dp_shard={layout.dp_shard}"]
    return []


def refusal(layout: Layout, found: WrappedScript, script: str, option: str = "--script") -> AnotherWorld | None:
    """The refusal of a script that is another run than the plan's (exit code 4), which `option` named."""
    wrong = differences(layout, found)
    if not wrong:
        return None
    return AnotherWorld(option, script, "; ".join(wrong), launched(layout.engine).way_out, exit_code=4)


def script_differences(
    layout: Layout, started: int, mesh: Mapping[int, Mapping[str, Any]], elsewhere: frozenset[int] = frozenset()
) -> list[str]:
    """Differences of a run that has ended, from its ranks' records. A script that never stepped has not trained.
    Nothing is known of ranks `elsewhere`."""
    stepped = {rank: seen for rank, seen in mesh.items() if seen.get("stepped")}
    wrong = []
    if idle := sorted(set(range(started)) - set(stepped) - elsewhere):
        wrong.append(f"ranks {idle} took no optimizer step")
    first: dict[str, int] = {}
    for rank, seen in sorted(stepped.items()):
        for one in differences(layout, msgspec.convert(seen, WrappedScript)):
            first.setdefault(one, rank)  # all ranks of a script differ alike
    return wrong + [f"rank {rank} {one}" for one, rank in first.items()]
