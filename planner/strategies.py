"""The best layout of each named strategy of data parallelism: what `planner estimate` shows side by side.

A few dozen layouts each, one by one and without NumPy, since start time counts here. Not here: the whole space of
layouts (space.py, search.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

import msgspec

from planner.arith import Number
from planner.case import Case
from planner.comm import Traffic
from planner.engines import engine_of
from planner.memory import device_bytes, hosts_hold, memory_lines, peak_at, peak_bytes
from planner.progress import Progress
from planner.question import Question, batches_of, case_of, limit_bytes
from planner.rules import divisors
from planner.spec import Layout
from planner.spec.layout import STRATEGIES as STRATEGIES  # others ask for them here, where they are ranked
from planner.spec.layout import Strategy
from planner.steptime import step_time, step_traffic

Seen = dict[Layout, list[tuple[Traffic, Number]]]
"""What layouts send, by layout."""

LORA_SHARDINGS = ("single", "ddp", "fsdp", "zero3")
"""What suits LoRA: a frozen base whole, on one device or on each, or one that is sharded too."""


class Row(NamedTuple):
    """The numbers of one layout."""

    dp_replicate: int
    dp_shard: int
    micro_batch_size: int
    grad_accum: int


class Block(NamedTuple):
    """Layouts that share every category; `template` holds them, `rows` the numbers."""

    template: Layout
    rows: tuple[Row, ...]

    def layout(self, row: Row) -> Layout:
        """One of them."""
        return msgspec.structs.replace(
            self.template,
            dp_replicate=row.dp_replicate,
            dp_shard=row.dp_shard,
            micro_batch_size=row.micro_batch_size,
            grad_accum=row.grad_accum,
        )


class Candidate(NamedTuple):
    """A layout that runs and fits, with what ranks it: seconds a sequence (a bound below when rates are unknown)."""

    layout: Layout
    seconds_per_sequence: float
    device_bytes: float


class Ranking(NamedTuple):
    """The fastest layout that fits; `smallest` is the legal one with the least memory, when none does."""

    best: Layout | None
    smallest: Layout | None
    considered: int


def blocks_of(question: Question, strategy: Strategy) -> list[Block]:
    """Everything a strategy may do on this cluster, within what the person fixed."""
    pins = question.pins
    if pins.zero_stage not in (None, strategy.zero_stage):
        return []
    if pins.runtime is not None and pins.runtime.engine != strategy.engine:
        return []
    sizes = _sizes(question.cluster.gpus, strategy)
    rows = tuple(Row(r, d, m, a) for r, d in sizes for m, a in batches_of(question, r * d))
    sharded = strategy.engine == "fsdp2"
    found = []
    for recompute, reshard, accumulates in product(("none", "full"), (True, False), (False, True)):
        if pins.recompute not in (None, recompute) or (not reshard and not sharded):
            continue
        if pins.reshard_after_forward not in (None, reshard) and sharded:
            continue
        some = tuple(row for row in rows if (row.grad_accum > 1) is accumulates)
        for sync in (False, True) if sharded and accumulates else (False,):
            if pins.sync_each_micro_batch is not None:
                sync = pins.sync_each_micro_batch
            template = Layout(
                engine=strategy.engine,
                zero_stage=strategy.zero_stage,  # type: ignore[arg-type]  # 0 to 3
                recompute=recompute,
                reshard_after_forward=reshard,
                sync_each_micro_batch=sync,
            )
            block = Block(pins.applied(template), some)
            if some and block not in found:
                found.append(block)
    return found


def _sizes(gpus: int, strategy: Strategy) -> list[tuple[int, int]]:
    """(dp_replicate, dp_shard)."""
    if strategy.shards == "one device":
        return [(1, 1)] if gpus == 1 else []
    if strategy.shards == "nothing":
        return [(gpus, 1)] if gpus > 1 else []
    if strategy.shards == "all ranks":
        return [(1, gpus)] if gpus > 1 or strategy.engine == "deepspeed" else []
    return [(gpus // shard, shard) for shard in divisors(gpus) if 1 < shard < gpus]


def rank(question: Question, blocks: Sequence[Block]) -> Ranking:
    """The fastest layout of the blocks that fits. Whoever watches (progress.py) sees it move, without a count."""
    seen: Seen = {}
    progress = Progress()
    groups = []
    for block in blocks:
        progress.at(0)
        groups += _groups(question, block, seen)
    best: Candidate | None = None
    for group in sorted(groups, key=lambda group: group.bound):
        if best is not None and group.bound >= best.seconds_per_sequence:
            break
        progress.at(0)
        found = _best_of(question, group, seen)
        if found is not None and (best is None or _order(found) < _order(best)):
            best = found
    considered = sum(len(block.rows) for block in blocks)
    return Ranking(best and best.layout, None if best else _smallest(question, blocks), considered)


def _order(candidate: Candidate) -> tuple[float, float]:
    return candidate.seconds_per_sequence, candidate.device_bytes


class Group(NamedTuple):
    """Rows of a block with equal group sizes, ascending in micro-batch: they differ in batches alone.

    No row takes fewer seconds a sequence than `bound`, that of the largest micro-batch.
    """

    block: Block
    rows: tuple[Row, ...]
    bound: float

    def layout(self, place: int) -> Layout:
        """One of them."""
        return self.block.layout(self.rows[place])


def _groups(question: Question, block: Block, seen: Seen) -> list[Group]:
    rows: dict[tuple[int, int], list[Row]] = {}
    for row in block.rows:
        rows.setdefault((row.dp_replicate, row.dp_shard), []).append(row)
    ascending = [tuple(sorted(some, key=lambda row: row.micro_batch_size)) for some in rows.values()]
    return [Group(block, some, _seconds(question, block.layout(some[-1]), seen)) for some in ascending]


def _seconds(question: Question, layout: Layout, seen: Seen) -> float:
    """Neither the micro-batch's size nor recomputation changes what is sent: `seen` keeps it."""
    key = msgspec.structs.replace(layout, micro_batch_size=1, recompute="none")
    if key not in seen:
        seen[key] = step_traffic(case_of(question, key))
    time = step_time(case_of(question, layout), question.calibration, seen[key])
    step_s = time.comm_s if time.step_s is None else time.step_s
    return float(step_s) / layout.global_batch_size


def _best_of(question: Question, group: Group, seen: Seen) -> Candidate | None:
    """The largest micro-batch that fits, which is the fastest."""
    first = case_of(question, group.layout(0))
    limit = limit_bytes(question)
    if _broken_rule(first) or device_bytes(first, floor_bytes(first)) > limit:
        return None
    lines = memory_lines(first)
    for place in reversed(range(len(group.rows))):
        size = float(device_bytes(first, peak_at(lines, group.rows[place].micro_batch_size)))
        if size <= limit and _hosts_may_hold(case_of(question, group.layout(place))):
            return Candidate(group.layout(place), _seconds(question, group.layout(place), seen), size)
    return None


def _hosts_may_hold(case: Case) -> bool:
    return hosts_hold(case) is not False


def floor_bytes(case: Case) -> float:
    """Live bytes outside the model code: no micro-batch needs less, and no walk is needed to know it."""
    return float(max(sum(held.values()) for _, held in engine_of(case.layout.engine).outside(case)))


def _smallest(question: Question, blocks: Sequence[Block]) -> Layout | None:
    """The legal layout that needs least memory: the smallest micro-batch, recomputed where that is allowed."""
    recomputed = [block for block in blocks if block.template.recompute == "full"]
    firsts = [
        block.layout(row)
        for block in recomputed or blocks
        for row in {
            (row.dp_replicate, row.dp_shard): row for row in sorted(block.rows, key=lambda row: -row.micro_batch_size)
        }.values()
    ]
    cases = [case for case in (case_of(question, layout) for layout in firsts) if _broken_rule(case) is None]
    return min(cases, key=lambda case: float(peak_bytes(case))).layout if cases else None


def _broken_rule(case: Case) -> str | None:
    return next((rule.name for rule in engine_of(case.layout.engine).rules if not rule.holds(case)), None)
