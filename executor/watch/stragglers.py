"""Ranks that keep the others waiting: slow in most steps, or stalled in one, by how long each was busy itself.

Busy is a step's time less the time waited in collectives (executor.worker.world.waits): all ranks of a step take
equally long, since all wait for the slowest. Not here: measuring, or what hangs (hangs.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from executor.folder import rundir
from planner.basics.quantities import format_seconds
from planner.parallelism.case import coordinates
from planner.spec.plan import Plan
from planner.spec.record import Attempt

SLOW, MOSTLY, LEAST_STEPS = 1.15, 0.75, 8
"""A rank is slow whose busy time is 1.15 times the median of its peers', in three of four steps. Cards of one kind
differ by a few percent, and a machine that does something else for a moment is slow in a few steps; chance does not
make an even rank slow in three of four of eight or more steps."""
LEAST_SHARE = 0.05
"""Of the step: who is slow by less costs less than what there is to find."""
STALL, STALL_BEYOND_OTHERS, STALL_S = 3.0, 1.5, 1.0
"""A rank stalled in a step that took it thrice its own median and a second longer, when the others were not as slow
against their own: longer rows, or a look at memory, are slow on all."""
LISTED = 5


class Straggler(msgspec.Struct, frozen=True, kw_only=True):
    """A rank that the others wait for. `slow`: in `steps` of the `of` steps looked at, and `busy_s` and `usual_s` are
    the medians of its busy time and of its peers'. `stalled`: in the steps `at` (from 1), the longest of which took it
    `busy_s`, with its own median in `usual_s`. `lost_s` is what it cost: a step, or all of these."""

    rank: int
    host: str
    kind: Literal["slow", "stalled"]
    busy_s: float
    usual_s: float
    lost_s: float
    steps: int
    of: int
    at: tuple[int, ...] = ()


class StepTimes(msgspec.Struct, frozen=True):
    """One step of all ranks: `step` counts from 0, `busy_s` by rank."""

    step: int
    step_s: float
    busy_s: Sequence[float]


def find(
    plan: Plan, turns: Sequence[StepTimes], hosts: Sequence[str], firsts: Collection[int] = (0,)
) -> tuple[Straggler, ...]:
    """The stragglers of these steps, the costliest first. A start's first step, one of `firsts`, is not looked at: what
    is made once is made there."""
    world = plan.layout.world_size
    looked = [one for one in turns if one.step not in firsts and len(one.busy_s) == world and min(one.busy_s) > 0]
    if world == 1 or len(looked) < LEAST_STEPS:
        return ()
    slow = [found for rank in range(world) if (found := _slow(rank, _peers(plan, rank), looked, hosts))]
    usual = [statistics.median(one.busy_s[rank] for one in looked) for rank in range(world)]
    stalled = [found for rank in range(world) if (found := _stalled(rank, usual, looked, hosts))]
    return tuple(one for kind in (slow, stalled) for one in sorted(kind, key=lambda found: -found.lost_s))


def of_run(folder: Path, plan: Plan, hosts: Sequence[str], earlier: Sequence[Attempt]) -> tuple[Straggler, ...]:
    """Those of all steps of a run, in whichever start they were trained."""
    turns = [StepTimes(*one) for one in rundir.read_busy(folder)]
    return find(plan, turns, hosts, {0, *(one.resumed_from for one in earlier)})


def _peers(plan: Plan, rank: int) -> list[int]:
    """The other ranks that do the same work: those of the same pipeline stage."""
    stage = coordinates(plan.layout, rank)["pp"]
    others = (one for one in range(plan.layout.world_size) if one != rank)
    return [one for one in others if coordinates(plan.layout, one)["pp"] == stage]


def _slow(rank: int, peers: Sequence[int], turns: Sequence[StepTimes], hosts: Sequence[str]) -> Straggler | None:
    if not peers:
        return None
    others = [statistics.median(one.busy_s[peer] for peer in peers) for one in turns]
    steps = sum(one.busy_s[rank] > SLOW * other for one, other in zip(turns, others, strict=True))
    lost_s = statistics.median(one.busy_s[rank] - other for one, other in zip(turns, others, strict=True))
    if steps < MOSTLY * len(turns) or lost_s < LEAST_SHARE * statistics.median(one.step_s for one in turns):
        return None
    return Straggler(
        rank=rank,
        host=hosts[rank],
        kind="slow",
        busy_s=statistics.median(one.busy_s[rank] for one in turns),
        usual_s=statistics.median(others),
        lost_s=lost_s,
        steps=steps,
        of=len(turns),
    )


def _stalled(rank: int, usual: Sequence[float], turns: Sequence[StepTimes], hosts: Sequence[str]) -> Straggler | None:
    stalls = [one for one in turns if _is_stall(rank, usual, one)]
    if not stalls or len(stalls) > (1 - MOSTLY) * len(turns):
        return None
    return Straggler(
        rank=rank,
        host=hosts[rank],
        kind="stalled",
        busy_s=max(one.busy_s[rank] for one in stalls),
        usual_s=usual[rank],
        lost_s=sum(one.busy_s[rank] - usual[rank] for one in stalls),
        steps=len(stalls),
        of=len(turns),
        at=tuple(one.step + 1 for one in stalls),
    )


def _is_stall(rank: int, usual: Sequence[float], turn: StepTimes) -> bool:
    mine, own = turn.busy_s[rank], usual[rank]
    others = statistics.median(busy / usual[one] for one, busy in enumerate(turn.busy_s) if one != rank)
    return mine >= STALL * own and mine >= own + STALL_S and mine / own >= STALL_BEYOND_OTHERS * others


def sentence(one: Straggler) -> str:
    """Who, where, and by how much."""
    who = f"rank {one.rank} on {one.host}"
    busy, usual, lost = map(format_seconds, (one.busy_s, one.usual_s, one.lost_s))
    if one.kind == "slow":
        often = f"in {one.steps} of {one.of} steps"
        return f"{who} is slow {often}: busy for {busy} of a step, its peers for {usual} (median); others wait {lost}"
    many = "once" if one.steps == 1 else f"{one.steps} times"
    steps = ", ".join(map(str, one.at[:LISTED])) + ", ..." * (len(one.at) > LISTED)
    at = f"step{'s' * (one.steps > 1)} {steps}"
    return f"{who} stalled {many}, at {at}: busy for {busy} where {usual} is its median; {lost} lost"
