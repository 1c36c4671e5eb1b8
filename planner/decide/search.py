"""Search the whole space: rules as masks, memory and time bounded from below in columns, then single layouts best-first
until no bound is left that could win.

No layout that fits is missed: memory's bound is below the real peak, time's below the real step. Not here: what the
space is (space.py, blocks.py), the bounds (bounds.py, candidates.py), or the walk (walker.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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
    least_seconds_of_case,
    of_same_floor,
    order_of,
    seconds_of_case,
)
from planner.decide.ties import TIE, Parts, parts_of, simpler
from planner.decide.ties import simplest as simplest_of
from planner.decide.walker import TOO_LARGE, TOO_SLOW, Bounded, Smallest, Walker, best_first
from planner.engines import engine_of
from planner.parallelism.rules import Rule
from planner.spec import Layout, Runtime

REFUSED = "backend refuses"

MoreRules = Callable[[Runtime], tuple[Rule, ...]]
"""What is asked of an engine's cases beyond its own rules: those of the backend that launches them."""


class Ranking(NamedTuple):
    """`best` first, the fastest of all; `simplest` of those that tie with it (ties.py); `front` those that no
    other beats in both time and memory, fastest first.

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
    simplest: Candidate | None = None


def rank(
    question: Question,
    k: int = 1,
    *,
    engines: tuple[str, ...] | None = None,
    slowest: float | None = None,
    front: int = 0,
    more_rules: MoreRules | None = None,
    own_rules: tuple[Rule, ...] = (),
    tie: float = TIE,
) -> Ranking:
    """The k best layouts of the space; with `front`, up to that many of the Pareto front too, the fastest of it.

    Layouts that take at most the share `tie` longer than the fastest tie with it. `slowest` is the most
    seconds a sequence may take (a deadline). `engines` limits the space, `more_rules` (of a backend) and `own_rules`
    too.
    """
    rejected: Counter[str] = Counter()
    progress = Progress()
    smallest = Smallest(question, progress)
    walker = Walker(question, k, slowest, front, smallest, progress)
    bounded: list[Bounded] = []
    near: list[Bounded] = []
    unbounded: list[tuple[float, list[Block]]] = []
    considered = pruned = waiting = 0
    interrupted, nearest, simplest = False, None, None

    def limit_s() -> float:
        """Most seconds a sequence of a layout that ties with the fastest found so far."""
        return min(walker.best[0].seconds_per_sequence * (1 + tie), float("inf") if slowest is None else slowest)

    def tied(some: list[Bounded]) -> list[Bounded]:
        """The rows whose bounds leave it open whether they tie."""
        return [left for one in some if walker.best and (left := _within(one, limit_s())).block.size]

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
                unbounded.append((floor, blocks))
                continue
            for block in blocks:
                progress.at(considered - waiting)
                legal = _legal(question, block, rejected, more_rules, own_rules)
                if legal.size:
                    bounded.append(_bounds(question, legal, rejected, smallest, walker.lost_above(tie)))
                    waiting += len(bounded[-1].seconds)
                considered += block.size
            order = best_first(bounded)
            if walker.run(order, bounded, considered - waiting):
                pruned += waiting - walker.seen
                near += tied(bounded)
                bounded, waiting, walker.seen = [], 0, 0
        if bounded:  # walked in part: what was found later may prune the rest
            walker.run(best_first(bounded), bounded, considered - waiting)
            pruned += waiting - walker.seen
            near += tied(bounded)
            waiting = 0
        if walker.best:
            simplest = walker.simplest(tied(near), limit_s())
            than = parts_of(simplest.layout, question.job.seq_len)
            pruned_before = [block for floor, blocks in unbounded if floor <= limit_s() for block in blocks]
            left = list(_simpler(question, pruned_before, than, progress, more_rules, own_rules))
            simplest = walker.simplest(tied(left), limit_s(), simplest)
        nearest = None if walker.best else smallest.found()
    except Cancelled:
        interrupted = True
    if simplest is None and walker.best:
        simplest = walker.simplest([], limit_s())
    pruned -= walker.reopened
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
        simplest=simplest,
    )


def _within(one: Bounded, limit_s: float) -> Bounded:
    """The rows whose bound on time is within a limit."""
    mask = one.seconds <= limit_s
    return Bounded(one.block.only(mask), one.seconds[mask], one.memory[mask])


def _simpler(
    question: Question,
    blocks: Iterable[Block],
    than: Parts,
    progress: Progress,
    more_rules: MoreRules | None,
    own_rules: tuple[Rule, ...],
) -> Iterator[Bounded]:
    """The rows of blocks that are simpler than a layout of the parts `than`, with bounds; they stay counted as they
    are."""
    for block in blocks:
        progress.at(progress.total)
        mask = as_column(simpler(parts_of(block.columns(), question.job.seq_len), than), block.size) > 0
        legal = _legal(question, block.only(mask), Counter(), more_rules, own_rules) if mask.any() else None
        if legal is not None and legal.size:
            yield _bounds(question, legal, Counter(), Smallest(question, progress))


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


def together(rankings: Sequence[Ranking], k: int, question: Question, tie: float = TIE) -> Ranking:
    """Searches of spaces that share no layout, as one."""
    rejected: Counter[str] = Counter()
    for one in rankings:
        rejected.update(one.rejected)
    best = sorted((found for one in rankings for found in one.best), key=order_of)[:k]
    front: list[Candidate] = []
    for found in sorted((found for one in rankings for found in one.front), key=order_of):
        if not any(beats(other, found) for other in front):
            front.append(found)
    every = (one for ranking in rankings for one in (*ranking.best, ranking.simplest) if one is not None)
    tying = sorted(every, key=order_of)
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
        simplest=simplest_of(
            tying, lambda one: one.seconds_per_sequence, lambda one: one.layout, question.job.seq_len, tie
        ),
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
        holds = rule.holds(case)
        if holds is True:
            continue
        still = legal & np.asarray(holds, dtype=bool)
        before, left = int(np.count_nonzero(legal)), int(np.count_nonzero(still))
        if left < before:
            rejected[name] += before - left
            legal = still
            if 2 * left < block.size:  # most rows are settled: ask no more of them
                block = block.only(legal)
                case, legal = case_of(question, block.columns()), np.ones(block.size, dtype=bool)
    return block if legal.all() else block.only(legal)


def _bounds(
    question: Question, block: Block, rejected: Counter[str], smallest: Smallest, lost_s: float = float("inf")
) -> Bounded:
    """Bounds of the rows whose bound on memory is within the limit; those that surely take more than `lost_s` a
    sequence have a lower bound on time than others, above it."""
    import numpy as np  # large spaces only

    few, place = block.splits()
    lines = [
        (as_column(start, few.size)[place], as_column(slope, few.size)[place])
        for start, slope in bound_lines(case_of(question, few.columns()))
    ]
    case = case_of(question, block.columns())
    memory = as_column(memory_bound(case, lines), block.size)
    smallest.offer(block, memory)
    may_fit = memory <= limit_bytes(question, case)
    rejected[TOO_LARGE] += block.size - int(may_fit.sum())
    if not may_fit.all():
        block, memory = block.only(may_fit), memory[may_fit]
        if not block.size:
            return Bounded(block, np.empty(0), memory)
        case = case_of(question, block.columns())
    if lost_s == float("inf"):
        return Bounded(block, as_column(seconds_of_case(question, case), block.size), memory)
    seconds = as_column(least_seconds_of_case(question, case), block.size).copy()
    (open_rows,) = np.nonzero(seconds <= lost_s)
    if len(open_rows):
        left = block.only(open_rows)
        seconds[open_rows] = as_column(seconds_of_case(question, case_of(question, left.columns())), left.size)
    return Bounded(block, seconds, memory)
