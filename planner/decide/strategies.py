"""The best layout of each named strategy of data parallelism: what `planner estimate` shows side by side.

A few dozen layouts each, one by one and without NumPy, since start time counts here. Not here: which layouts a strategy
has (space.py), or the search of a whole space (search.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from planner.ask.question import Question, case_of, limit_bytes
from planner.basics.arith import Number
from planner.basics.progress import Progress
from planner.decide.bounds import bound_lines
from planner.decide.candidates import Candidate, floor_bytes, floor_seconds, order_of, seconds_per_sequence
from planner.decide.space import by_batch, spaces
from planner.engines import engine_of
from planner.figures.comm import Traffic
from planner.figures.memory import device_bytes, hosts_hold, memory_lines, peak_at, peak_bytes
from planner.figures.steptime import step_traffic
from planner.parallelism.rules import broken
from planner.spec import Layout
from planner.spec.layout import Strategy

Seen = dict[Layout, list[tuple[Traffic, Number]]]
"""What layouts send, by layout."""

LORA_SHARDINGS = ("single", "ddp", "fsdp", "zero3")
"""What suits LoRA: a frozen base whole, on one device or on each, or one that is sharded too."""


Group = tuple[Layout, ...]
"""Layouts that differ in the batch alone, smallest micro-batch first; all accumulate, or none does. No other takes
fewer seconds a sequence than the last."""


def groups_of(question: Question, strategies: Sequence[Strategy]) -> Iterator[Group]:
    """All layouts of these strategies on this cluster, within what the person fixed."""
    for strategy in strategies:
        asked = msgspec.structs.replace(question, strategy=strategy.name)
        for facts in spaces(asked):
            for layout, batches in by_batch(asked, facts):
                for accumulates in (False, True):
                    some = [(micro, accum) for micro, accum in sorted(batches) if (accum > 1) is accumulates]
                    if some:
                        yield tuple(
                            msgspec.structs.replace(layout, micro_batch_size=micro, grad_accum=accum)
                            for micro, accum in some
                        )


def best_of(question: Question, strategies: Sequence[Strategy]) -> tuple[Layout, int] | None:
    """(layout, layouts considered): the fastest that fits, else the legal one with the least memory.

    Whoever watches (progress.py) sees it move, without a count.
    """
    seen: Seen = {}
    progress = Progress()
    groups = list(groups_of(question, strategies))
    best: Candidate | None = None
    for floor, alike in _by_floor(question, groups):
        if best is not None and floor > best.seconds_per_sequence:
            break
        bounded = []
        for group in alike:
            progress.at(0)
            if not _illegal(question, group):
                bounded.append((_seconds(question, group[-1], seen), group))
        for bound, group in sorted(bounded, key=lambda pair: pair[0]):
            if best is not None and (bound >= best.seconds_per_sequence or _loses(question, group, best, seen)):
                continue
            progress.at(0)
            found = _largest_fitting(question, group, seen)
            if found is not None and (best is None or order_of(found) < order_of(best)):
                best = found
    layout = best.layout if best else _smallest(question, groups)
    return None if layout is None else (layout, sum(len(group) for group in groups))


def _by_floor(question: Question, groups: Sequence[Group]) -> list[tuple[float, list[Group]]]:
    """Groups with equal work to do, least first, each with the seconds a sequence takes when nothing else is done."""
    alike: dict[tuple[str, str], list[Group]] = {}
    for group in groups:  # their ranks all run the whole model
        alike.setdefault((group[0].engine, group[0].recompute), []).append(group)
    floors: dict[float, list[Group]] = {}
    for some in alike.values():
        floors.setdefault(floor_seconds(question, some[0][0]), []).extend(some)
    return sorted(floors.items())


def _loses(question: Question, group: Group, best: Candidate, seen: Seen) -> bool:
    """Whether the largest micro-batch that may fit is slower than the best so far: told without walking the model."""
    first = case_of(question, group[0])
    lines = [(float(start), float(slope)) for start, slope in bound_lines(first)]
    limit = limit_bytes(question, first)
    able = [one for one in group if device_bytes(case_of(question, one), peak_at(lines, one.micro_batch_size)) <= limit]
    return not able or _seconds(question, able[-1], seen) > best.seconds_per_sequence


def _illegal(question: Question, group: Group) -> bool:
    """Whether an engine's rule speaks against a group: what it would send is not asked then."""
    first = case_of(question, group[0])
    return broken(first, engine_of(first.layout.engine).rules) is not None


def _seconds(question: Question, layout: Layout, seen: Seen) -> float:
    """Neither the micro-batch's size nor recomputation changes what is sent: `seen` keeps it."""
    key = msgspec.structs.replace(layout, micro_batch_size=1, recompute="none")
    if key not in seen:
        seen[key] = step_traffic(case_of(question, key))
    return float(seconds_per_sequence(question, layout, seen[key]))


def _largest_fitting(question: Question, group: Group, seen: Seen) -> Candidate | None:
    """The largest micro-batch that fits, which is the fastest."""
    first = case_of(question, group[0])
    limit = limit_bytes(question, first)
    if device_bytes(first, floor_bytes(first)) > limit:
        return None
    lines = memory_lines(first)
    for layout in reversed(group):
        case = case_of(question, layout)
        size = float(device_bytes(case, peak_at(lines, layout.micro_batch_size)))
        if size <= limit and hosts_hold(case) is not False:
            return Candidate(layout, _seconds(question, layout, seen), size)
    return None


def _smallest(question: Question, groups: Sequence[Group]) -> Layout | None:
    """The legal layout that needs least memory: the smallest micro-batch, recomputed where that is allowed."""
    recomputed = [group for group in groups if group[0].recompute == "full"]
    cases = [case_of(question, group[0]) for group in recomputed or groups]
    legal = [case for case in cases if broken(case, engine_of(case.layout.engine).rules) is None]
    return min(legal, key=lambda case: float(peak_bytes(case))).layout if legal else None
