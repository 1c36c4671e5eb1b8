"""Search the whole space: rules as masks, memory and time bounded from below in columns, then single layouts best-first
until no bound is left that could win.

No layout that fits is missed: memory's bound is below the real peak, time's below the real step. Not here: what the
space is (space.py, blocks.py), the bounds (bounds.py, candidates.py), or the walk (walker.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from planner.ask.question import Question, case_of, limit_bytes
from planner.basics.progress import Cancelled, Progress
from planner.decide.blocks import Block, as_column, blocks_of
from planner.decide.bounds import bound_lines, memory_bound
from planner.decide.candidates import (
    Candidate,
    beats,
    exact_bytes,
    floor_seconds,
    of_same_floor,
    order_of,
    seconds_per_sequence,
)
from planner.decide.walker import TOO_LARGE, TOO_SLOW, Bounded, Smallest, Walker, best_first
from planner.engines import engine_of
from planner.parallelism.rules import Rule
from planner.spec import Layout, Runtime

REFUSED = "backend refuses"

MoreRules = Callable[[Runtime], tuple[Rule, ...]]
"""What is asked of an engine's cases beyond its own rules: those of the backend that launches them."""


class Ranking(NamedTuple):
    """`best` first; `front` those that no other beats in both time and memory, fastest first.

    `smallest` is the legal layout that needs least memory, when none fits. `considered` layouts were in the space:
    `rejected` counts those that a rule or memory turned away, by reason; `pruned` those whose bound could not win;
    `evaluated` those walked one by one. `interrupted`: whoever watched ended the search (progress.py), `unseen` layouts
    were not looked at to the end, and what is best is the best of the others.
    """

    best: tuple[Candidate, ...]
    front: tuple[Candidate, ...]
    smallest: Layout | None
    considered: int
    evaluated: int
    pruned: int
    rejected: dict[str, int]
    unseen: int = 0
    interrupted: bool = False


def rank(
    question: Question,
    k: int = 1,
    *,
    engines: tuple[str, ...] | None = None,
    slowest: float | None = None,
    front: int = 0,
    more_rules: MoreRules | None = None,
    own_rules: tuple[Rule, ...] = (),
) -> Ranking:
    """The k best layouts of the space; with `front`, up to that many of the Pareto front too, the fastest of it.

    `slowest` is the most seconds a sequence may take (a deadline). `engines` limits the space, `more_rules` (of a
    backend) and `own_rules` too.
    """
    rejected: Counter[str] = Counter()
    progress = Progress()
    smallest = Smallest(question, progress)
    walker = Walker(question, k, slowest, front, smallest, progress)
    bounded: list[Bounded] = []
    considered = pruned = waiting = 0
    interrupted, nearest = False, None
    try:
        groups = _by_floor(question, blocks_of(question, engines), progress)
        progress.total = sum(block.size for _, blocks in groups for block in blocks)
        for floor, blocks in groups:
            rows = sum(block.size for block in blocks)
            if slowest is not None and floor > slowest:
                considered += rows
                rejected[TOO_SLOW] += rows
                continue
            if not walker.open_to(floor):
                considered += rows
                pruned += rows
                continue
            for block in blocks:
                progress.at(considered - waiting)
                legal = _legal(question, block, rejected, more_rules, own_rules)
                if legal.size:
                    bounded.append(_bounds(question, legal, rejected, smallest))
                    waiting += len(bounded[-1].seconds)
                considered += block.size
            order = best_first(bounded)
            if walker.run(order, bounded, considered - waiting):
                pruned += waiting - walker.seen
                bounded, waiting, walker.seen = [], 0, 0
        if bounded:  # walked in part: what was found later may prune the rest
            walker.run(best_first(bounded), bounded, considered - waiting)
            pruned += waiting - walker.seen
            waiting = 0
        nearest = None if walker.best else smallest.found()
    except Cancelled:
        interrupted = True
    rejected.update(walker.rejected)
    unseen = progress.total - considered + max(waiting - walker.seen, 0)
    return Ranking(
        best=tuple(walker.best),
        front=tuple(walker.within_span()[:front]),
        smallest=nearest,
        considered=progress.total,
        evaluated=walker.evaluated,
        pruned=pruned,
        rejected=dict(+rejected),
        unseen=unseen,
        interrupted=interrupted,
    )


def _by_floor(question: Question, blocks: Iterable[Block], progress: Progress) -> list[tuple[float, list[Block]]]:
    """Blocks with equal work to do, least first, each with the seconds a sequence takes when every GPU does its share
    of that work and nothing else."""
    known: dict[Layout, float] = {}
    floors: dict[float, list[Block]] = {}
    for block in blocks:
        progress.at(0)
        one = of_same_floor(block.template)
        if one not in known:
            known[one] = floor_seconds(question, one)
        floors.setdefault(known[one], []).append(block)
    return sorted(floors.items())


def together(rankings: Sequence[Ranking], k: int, question: Question) -> Ranking:
    """Searches of spaces that share no layout, as one."""
    rejected: Counter[str] = Counter()
    for one in rankings:
        rejected.update(one.rejected)
    best = sorted((found for one in rankings for found in one.best), key=order_of)[:k]
    front: list[Candidate] = []
    for found in sorted((found for one in rankings for found in one.front), key=order_of):
        if not any(beats(other, found) for other in front):
            front.append(found)
    smallest = None
    if not best:
        layouts = [one.smallest for one in rankings if one.smallest is not None]
        smallest = min(layouts, key=lambda layout: exact_bytes(question, layout), default=None)
    return Ranking(
        tuple(best),
        tuple(front),
        smallest,
        sum(one.considered for one in rankings),
        sum(one.evaluated for one in rankings),
        sum(one.pruned for one in rankings),
        dict(rejected),
        sum(one.unseen for one in rankings),
        any(one.interrupted for one in rankings),
    )


# -- columns -------------------------------------------------------------------------------------------------------


def _legal(
    question: Question,
    block: Block,
    rejected: Counter[str],
    more_rules: MoreRules | None,
    own_rules: tuple[Rule, ...] = (),
) -> Block:
    """The rows that break no rule; counts how many break each first."""
    import numpy as np  # large spaces only

    case = case_of(question, block.columns())
    legal = np.ones(block.size, dtype=bool)
    asked = [(rule.name, rule) for rule in (*engine_of(block.template.engine).rules, *own_rules)]
    if more_rules is not None:
        asked += [(f"{REFUSED}: {rule.name}", rule) for rule in more_rules(case.runtime)]
    for name, rule in asked:
        holds = np.broadcast_to(np.asarray(rule.holds(case), dtype=bool), legal.shape)
        broken = int((legal & ~holds).sum())
        if broken:
            rejected[name] += broken
            legal = legal & holds
            if 2 * int(legal.sum()) < block.size:  # most rows are settled: ask no more of them
                block = block.only(legal)
                case, legal = case_of(question, block.columns()), np.ones(block.size, dtype=bool)
    return block if legal.all() else block.only(legal)


def _bounds(question: Question, block: Block, rejected: Counter[str], smallest: Smallest) -> Bounded:
    """Bounds of the rows whose bound on memory is within the limit."""
    import numpy as np  # large spaces only

    few, place = block.splits()
    lines = [
        (as_column(start, few.size)[place], as_column(slope, few.size)[place])
        for start, slope in bound_lines(case_of(question, few.columns()))
    ]
    memory = as_column(memory_bound(case_of(question, block.columns()), lines), block.size)
    smallest.offer(block, memory)
    may_fit = memory <= limit_bytes(question)
    rejected[TOO_LARGE] += block.size - int(may_fit.sum())
    if not may_fit.all():
        block, memory = block.only(may_fit), memory[may_fit]
    if not block.size:
        return Bounded(block, np.empty(0), memory)
    seconds = as_column(seconds_per_sequence(question, block.columns()), block.size)
    return Bounded(block, seconds, memory)
