"""Search the whole space: rules and bounds from below for all of it, then single layouts best-first until no bound is
left that could win.

No layout that fits is missed: memory's bound is below the real peak, time's below the real step. A small space is
looked at layout by layout (singles.py), a large one in columns (blocks.py). Not here: what the space is (space.py), the
bounds (bounds.py, candidates.py), the walk (walker.py), or the rule for the star (star.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple, cast

from planner.ask.question import Question
from planner.basics.progress import Cancelled, Progress
from planner.decide import singles
from planner.decide.candidates import Candidate, LayoutFigures, beats, order_of
from planner.decide.star import TIE, starred
from planner.decide.walker import TOO_LARGE, TOO_SLOW, BoundedRows, LayoutRows, Smallest, Space, Walker
from planner.engines import engine_of
from planner.parallelism.rule import Rule
from planner.spec import Layout, Runtime

REFUSED = "backend refuses"
FEW = 5000
"""Layouts up to which a space is looked at one by one: more take longer so than it takes to load NumPy."""

MoreRules = Callable[[Runtime], tuple[Rule, ...]]
"""What is asked of an engine's cases beyond its own rules: those of the backend that launches them."""


class Ranking(NamedTuple):
    """`best` of all, the fastest first, one of each thing (candidates.thing_of); the `star` (star.py); `front` those
    that no other beats in both time and memory, fastest first.

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
    star: Candidate | None = None
    surely: bool = False


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
    figures: LayoutFigures | None = None,
    few: int = FEW,
) -> Ranking:
    """The k best layouts of the space; with `front`, up to that many of the Pareto front too, the fastest of it.

    Layouts that are a `yes` alone, or, where none is, those that fit. Layouts that take at most the share `tie` longer
    than the best are near it. `slowest` is the most seconds a sequence may take (a deadline). `engines` limits the
    space, `more_rules` (of a backend) and `own_rules` too. `figures` of the same question spare working them out again;
    spaces of `few` layouts at most are looked at one by one.
    """
    figures, capacity = figures or LayoutFigures(question), question.cluster.gpu.memory_bytes
    for surely in (True, False):
        figures.surely = surely
        found = _rank(figures, k, engines, slowest, front, more_rules, own_rules, tie, few)
        if found.best or found.interrupted:
            break
        if found.smallest is not None and capacity is not None and figures.bytes(found.smallest) > capacity:
            break  # nor does any fit with less certainty
    return found


def _space(question: Question, engines: tuple[str, ...] | None, few: int) -> tuple[Space, list[LayoutRows]]:
    """How a space is looked at, and its blocks."""
    blocks, size = [], 0
    for block in singles.blocks_of(question, engines):
        blocks.append(block)
        size += block.size
        if size > few and find_spec("numpy") is not None:  # in a browser there is none
            from planner.decide import blocks as columns

            return cast(Space, columns), cast(list[LayoutRows], list(columns.blocks_of(question, engines)))
    return cast(Space, singles), cast(list[LayoutRows], blocks)


def _rank(
    figures: LayoutFigures,
    k: int,
    engines: tuple[str, ...] | None,
    slowest: float | None,
    front: int,
    more_rules: MoreRules | None,
    own_rules: tuple[Rule, ...],
    tie: float,
    few: int,
) -> Ranking:
    question = figures.question
    rejected: Counter[str] = Counter()
    progress = Progress()
    smallest = Smallest(figures, progress)
    walker = Walker(figures, k, slowest, front, smallest, progress)
    space, every = _space(question, engines, few)
    bounded: list[BoundedRows] = []
    near: list[BoundedRows] = []
    unbounded: list[tuple[float, list[LayoutRows]]] = []
    considered = pruned = waiting = 0
    interrupted, nearest, star = False, None, None

    def limit_s() -> float:
        """Most seconds a sequence of a layout that is near the fastest found so far."""
        return min(walker.best[0].seconds_per_sequence * (1 + tie), math.inf if slowest is None else slowest)

    def near_rows(some: list[BoundedRows]) -> list[BoundedRows]:
        """The rows whose bounds leave it open whether they are near the fastest."""
        return [left for one in some if walker.best and (left := one.within(limit_s())).block.size]

    @cache
    def rules_of(engine: str) -> list[tuple[str, Rule]]:
        refused = more_rules(question.runtime(engine)) if more_rules is not None else ()
        own = [(rule.name, rule) for rule in (*engine_of(engine).rules, *own_rules)]
        return own + [(f"{REFUSED}: {rule.name}", rule) for rule in refused]

    def legal(block: LayoutRows, rejected: Counter[str]) -> LayoutRows | None:
        return space.legal(question, block, rules_of(block.template.engine), rejected)

    try:
        groups = _by_floor(figures, every, progress)
        progress.total = sum(block.size for block in every)
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
                left = legal(block, rejected)
                if left is not None:
                    found, least = space.bounds(figures, left, walker.lost_above(tie))
                    smallest.offer(least)
                    rejected[TOO_LARGE] += left.size - found.block.size
                    bounded.append(found)
                    waiting += found.block.size
                considered += block.size
            if walker.run(space.best_first(bounded), bounded, considered - waiting):
                pruned += waiting - walker.seen
                near += near_rows(bounded)
                bounded, waiting, walker.seen = [], 0, 0
        if bounded:  # walked in part: what was found later may prune the rest
            walker.run(space.best_first(bounded), bounded, considered - waiting)
            pruned += waiting - walker.seen
            near += near_rows(bounded)
            waiting = 0
        if walker.best:
            for block in (block for floor, blocks in unbounded if floor <= limit_s() for block in blocks):
                progress.at(progress.total)
                left = legal(block, Counter())
                near += [] if left is None else [space.bounds(figures, left, limit_s())[0]]
            one_batch = question.job.global_batch_size is not None
            star = walker.star(space, near_rows(near), limit_s(), tie, one_batch=one_batch)
        nearest = None if walker.best else smallest.found()
    except Cancelled:
        interrupted = True
    if star is None and walker.best:
        star = starred(walker.best, question.job.seq_len, tie, one_batch=True)
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
        star=star,
        surely=figures.surely,
    )


def _by_floor(
    figures: LayoutFigures, blocks: Iterable[LayoutRows], progress: Progress
) -> list[tuple[float, list[LayoutRows]]]:
    """Blocks with equal work to do, least first, each with the seconds a sequence takes when every GPU does its share
    of that work and nothing else; of equal work, those first that split the model least."""
    floors: dict[tuple[float, int], list[LayoutRows]] = {}
    for block in blocks:
        progress.at(0)
        layout = block.template
        split = layout.pp * layout.cp * layout.tp * layout.ep
        floors.setdefault((figures.floor_seconds(layout), split), []).append(block)
    return [(floor, some) for (floor, _), some in sorted(floors.items(), key=lambda pair: pair[0])]


def together(rankings: Sequence[Ranking], k: int, question: Question, tie: float = TIE) -> Ranking:
    """Searches of spaces that share no layout, as one."""
    rejected: Counter[str] = Counter()
    for one in rankings:
        rejected.update(one.rejected)
    sure = [one for one in rankings if one.best and one.surely]
    able = sure or [one for one in rankings if one.best]
    front: list[Candidate] = []
    for found in sorted((found for one in able for found in one.front), key=order_of):
        if not any(beats(other, found) for other in front):
            front.append(found)
    near = dict.fromkeys(one for ranking in able for one in (*ranking.best, ranking.star) if one is not None)
    smallest = None
    if not able:
        layouts = [one.smallest for one in rankings if one.smallest is not None]
        smallest = min(layouts, key=LayoutFigures(question).bytes, default=None)
    return Ranking(
        tuple(sorted((found for one in able for found in one.best), key=order_of)[:k]),
        tuple(front),
        smallest,
        sum(one.considered for one in rankings),
        sum(one.evaluated for one in rankings),
        sum(one.pruned for one in rankings),
        dict(rejected),
        sum(one.unseen for one in rankings),
        any(one.interrupted for one in rankings),
        star=starred(near, question.job.seq_len, tie, one_batch=question.job.global_batch_size is not None),
        surely=bool(sure),
    )
