"""Search the whole space: rules as masks, memory and time bounded from below in columns, then single layouts best-first
until no bound is left that could win.

No layout that fits is missed: memory's bound is below the real peak, time's below the real step. Not here: what the
space is (space.py), or the side-by-side view of strategies (strategies.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from planner.arith import Number, by_value, maximum, where
from planner.case import LAYERS, Case, StageClass
from planner.engines import engine_of
from planner.engines.base import held_when_filled
from planner.inventory.walk import kept_by_layer
from planner.memory import (
    BATCH_BYTES_PER_TOKEN,
    device_bytes,
    hosts_hold,
    memory_lines,
    of_same_lines,
    peak_at,
    peak_bytes,
)
from planner.parallelism.schedules import in_flight as in_flight_of
from planner.progress import Cancelled, Progress
from planner.question import Question, case_of, limit_bytes
from planner.rules import Rule
from planner.space import Block, blocks_of
from planner.spec import Layout, Runtime
from planner.steptime import step_time, whole_pass_seconds

if TYPE_CHECKING:
    import numpy as np

    Column = np.ndarray[Any, np.dtype[np.float64]]

TOO_LARGE = "does not fit in memory with headroom"
TOO_LARGE_FOR_HOSTS = "does not fit in the hosts' memory"
TOO_SLOW = "misses the deadline"
REFUSED = "backend refuses"
FRONT_SPAN = 2.0
"""Layouts more than so many times as slow as the fastest are left out of the Pareto front."""
MOST_WALKED = 2000
"""Single layouts evaluated at most while nothing fits: by then the cheap bounds have failed to tell."""


SMALLEST_OF_BLOCK = 8
"""Rows of a block, of least bound on memory, that may be named as the nearest to fit."""


MoreRules = Callable[[Runtime], tuple[Rule, ...]]
"""What is asked of an engine's cases beyond its own rules: those of the backend that launches them."""


class Candidate(NamedTuple):
    """A layout that fits, with what ranks it: seconds a sequence (a bound below when rates are unknown)."""

    layout: Layout
    seconds_per_sequence: float
    device_bytes: float


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


class _Bounded(NamedTuple):
    """A block's legal rows that may fit, with bounds from below."""

    block: Block
    seconds: Column
    memory: Column


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
    smallest = _Smallest(question, progress)
    walker = _Walker(question, k, slowest, front, smallest, progress)
    bounded: list[_Bounded] = []
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
            order = _best_first(bounded)
            if walker.run(order, bounded, considered - waiting):
                pruned += waiting - walker.seen
                bounded, waiting, walker.seen = [], 0, 0
        if bounded:  # walked in part: what was found later may prune the rest
            walker.run(_best_first(bounded), bounded, considered - waiting)
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
    floors: dict[float, list[Block]] = {}
    for block in blocks:
        progress.at(0)
        floors.setdefault(_floor_seconds(question, block.template), []).append(block)
    return sorted(floors.items())


def _floor_seconds(question: Question, template: Layout) -> float:
    one = msgspec.structs.replace(template, sequence_parallel=False, virtual_stages=1, pp_schedule="1f1b")
    seconds = whole_pass_seconds(case_of(question, one), question.calibration)
    return seconds / question.cluster.gpus


def together(rankings: Sequence[Ranking], k: int, question: Question) -> Ranking:
    """Searches of spaces that share no layout, as one."""
    rejected: Counter[str] = Counter()
    for one in rankings:
        rejected.update(one.rejected)
    best = sorted((found for one in rankings for found in one.best), key=order_of)[:k]
    front: list[Candidate] = []
    for found in sorted((found for one in rankings for found in one.front), key=order_of):
        if not any(_beats(other, found) for other in front):
            front.append(found)
    smallest = None
    if not best:
        layouts = [one.smallest for one in rankings if one.smallest is not None]
        smallest = min(layouts, key=lambda layout: _exact_bytes(question, layout), default=None)
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


def _exact_bytes(question: Question, layout: Layout) -> float:
    case = case_of(question, layout)
    return float(device_bytes(case, peak_bytes(case)))


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
    return block if legal.all() else block.only(legal)


class _Smallest:
    """The legal layout that needs least memory, for when none fits: each block's few of the least bound are walked,
    least bound first, until no bound is left that could be less."""

    def __init__(self, question: Question, progress: Progress) -> None:
        self._question, self._progress = question, progress
        self._bounds: list[tuple[float, Layout]] = []
        self._least: tuple[float, Layout | None] = (float("inf"), None)

    def offer(self, block: Block, memory: Column) -> None:
        """Rows by their bound on memory."""
        import numpy as np  # large spaces only

        some = (
            np.argpartition(memory, SMALLEST_OF_BLOCK)[:SMALLEST_OF_BLOCK] if block.size > SMALLEST_OF_BLOCK else None
        )
        for row in range(block.size) if some is None else some:
            self._bounds.append((float(memory[row]), block.layout(int(row))))

    def walked(self, layout: Layout, size: float) -> None:
        """A layout that was walked and does not fit."""
        if size < self._least[0]:
            self._least = size, layout

    def found(self) -> Layout | None:
        """The one; None when no layout is legal."""
        for bound, layout in sorted(self._bounds, key=lambda pair: pair[0]):
            if bound >= self._least[0]:
                break
            self._progress.at(0)
            self.walked(layout, _exact_bytes(self._question, layout))
        return self._least[1]


def _bounds(question: Question, block: Block, rejected: Counter[str], smallest: _Smallest) -> _Bounded:
    """Bounds of the rows whose bound on memory is within the limit."""
    import numpy as np  # large spaces only

    memory = as_column(memory_bound(case_of(question, block.columns())), block.size)
    smallest.offer(block, memory)
    may_fit = memory <= limit_bytes(question)
    rejected[TOO_LARGE] += block.size - int(may_fit.sum())
    if not may_fit.all():
        block, memory = block.only(may_fit), memory[may_fit]
    if not block.size:
        return _Bounded(block, np.empty(0), memory)
    seconds = as_column(time_bound(question, block.columns()), block.size)
    return _Bounded(block, seconds, memory)


def as_column(value: Number, rows: int) -> Column:
    """A figure that all rows may share, for each of them."""
    import numpy as np  # large spaces only

    return np.broadcast_to(np.asarray(value, dtype=np.float64), (rows,))


def memory_bound(case: Case) -> Number:
    """Device bytes that no stage's peak is below: what stays between steps, and what the layers of a stage keep for the
    micro-batches in flight.

    What is kept beside layers, and everything that comes and goes, is left out.
    """
    stages = [next(case.stages())]
    if case.pipelined and case.model.dense_layers:  # the first stage is the light one
        least, more = case.model.layers // case.layout.pp, case.model.layers % case.layout.pp
        second = least + where(more > 1, 1, 0)
        spilled = maximum(case.model.dense_layers - least - where(more > 0, 1, 0), 0)
        stages.append(StageClass(False, False, 1, (0 * least, maximum(second - spilled, 0))))
    bounds = [_stage_bound(case.at(stage)) for stage in stages]
    if len(bounds) > 1:  # with two stages the second has the head too, and holds more
        bounds[1] = where(case.layout.pp > 1, bounds[1], 0.0)
    return device_bytes(case, maximum(*bounds))


def _stage_bound(case: Case) -> Number:
    layout = case.layout
    engine = engine_of(layout.engine)
    resident = sum(held_when_filled(engine, case).values())
    flying: Number = 1
    if case.pipelined:
        flying = in_flight_of(layout.pp_schedule, layout.pp, case.here.place, layout.grad_accum, layout.virtual_stages)
        # No gradient is made while all are in flight: with what accumulates there is one micro-batch less.
        flying = flying - where((flying >= layout.grad_accum) & (layout.grad_accum > 1), 1, 0)
    kept: Number = 0.0
    for unit, count in zip(LAYERS, case.here.layers, strict=True):
        kept = kept + count * _kept_per_token(case, unit)
    return resident + (flying * kept + BATCH_BYTES_PER_TOKEN) * case.tokens


def _kept_per_token(case: Case, unit: str) -> Number:
    """Bytes that one layer of a kind keeps for each token; asked once for each tensor degree, with and without shards
    (which may decide the number format) and split experts."""
    if unit == "dense" and not case.model.dense_layers:
        return 0.0
    layout = case.layout
    engine = engine_of(layout.engine)

    def kept(key: float) -> float:
        tp, shards, ep = int(key // 4), 1 + int(key // 2) % 2, 1 + int(key) % 2
        single = msgspec.structs.replace(
            layout, tp=tp, ep=ep, cp=1, pp=1, dp_replicate=1, dp_shard=shards, micro_batch_size=1, grad_accum=1,
            sequence_parallel=layout.sequence_parallel and tp > 1, virtual_stages=1, pp_schedule="1f1b",
        )  # fmt: skip
        one = Case(case.model, case.job, single, case.cluster, case.runtime)
        return kept_by_layer(one.walked_model, engine.compute(one), unit).per_token

    return by_value(kept, layout.tp * 4 + where(layout.dp_shard > 1, 2, 0) + where(layout.ep > 1, 1, 0))


def time_bound(question: Question, layout: Layout) -> Number:
    """Seconds a sequence, which no layout of the columns goes below."""
    time = step_time(case_of(question, layout), question.calibration)
    step_s = time.comm_s if time.step_s is None else time.step_s
    return step_s / layout.global_batch_size


def _best_first(bounded: list[_Bounded]) -> Any:
    """(seconds, block, row) of every row, ascending in time's bound, then in memory's."""
    import numpy as np  # large spaces only

    if not bounded:
        return np.empty((0, 3))
    seconds = np.concatenate([one.seconds for one in bounded])
    memory = np.concatenate([one.memory for one in bounded])
    block = np.concatenate([np.full(len(one.seconds), place) for place, one in enumerate(bounded)])
    row = np.concatenate([np.arange(len(one.seconds)) for one in bounded])
    order = np.lexsort((memory, seconds))
    return np.stack([seconds[order], block[order], row[order]], axis=1)


# -- one by one ----------------------------------------------------------------------------------------------------


class _Walker:
    """Walks candidates best-first, each exactly; `best` and `front` grow from one run to the next."""

    def __init__(
        self,
        question: Question,
        k: int,
        slowest: float | None,
        front: int,
        smallest: _Smallest,
        progress: Progress,
    ) -> None:
        self._smallest, self._progress = smallest, progress
        self._question, self._k, self._slowest, self._points = question, k, slowest, front
        self._limit = limit_bytes(question)
        self._known: dict[Layout, Candidate | None] = {}
        self._lines: dict[Layout, list[tuple[float, float]]] = {}
        self.rejected: Counter[str] = Counter()
        self.best: list[Candidate] = []
        self.front: list[Candidate] = []
        self.seen = self.evaluated = 0

    def run(self, order: Any, bounded: list[_Bounded], done: int) -> bool:
        """Look at these rows, ascending in time's bound, after `done` layouts that are settled; False when it gives up
        with nothing found and more to see."""
        self.seen, before = 0, self.evaluated
        for place, (bound, block, row) in enumerate(order):
            if not self.best and self.evaluated - before >= MOST_WALKED:
                return False
            if self._slowest is not None and bound > self._slowest:
                self.rejected[TOO_SLOW] += len(order) - place
                self.seen += len(order) - place
                break
            if not self.open_to(bound):
                break
            some = bounded[int(block)]
            memory = float(some.memory[int(row)])
            if not self._open_to_both(bound, memory):
                continue
            self._progress.at(done + place)
            self.seen += 1
            self._offer(self._exact(some.block.layout(int(row)), memory))
        return True

    def open_to(self, bound: float) -> bool:
        """Whether a layout that takes no less time may still be among the best, or on the front."""
        if len(self.best) < self._k or bound <= self.best[-1].seconds_per_sequence:
            return True
        return self._front_open_to(bound)

    def _front_open_to(self, bound: float) -> bool:
        points, front = self._points, self.front
        if not points or (front and bound > FRONT_SPAN * front[0].seconds_per_sequence):
            return False
        return len(front) < points or bound <= front[points - 1].seconds_per_sequence

    def _open_to_both(self, bound: float, memory: float) -> bool:
        """The same of one that needs no less memory either."""
        if len(self.best) < self._k or (bound, memory) < order_of(self.best[-1]):
            return True
        beaten = any(one.seconds_per_sequence <= bound and one.device_bytes <= memory for one in self.front)
        return self._front_open_to(bound) and not beaten

    def within_span(self) -> list[Candidate]:
        """The front without what nobody would wait for."""
        front = self.front
        return [one for one in front if one.seconds_per_sequence <= FRONT_SPAN * front[0].seconds_per_sequence]

    def _offer(self, one: Candidate | None) -> None:
        if one is None or one in self.best:
            return
        self.best = sorted([*self.best, one], key=order_of)[: self._k]
        if self._points and one not in self.front and not any(_beats(other, one) for other in self.front):
            self.front = sorted([*(other for other in self.front if not _beats(one, other)), one], key=order_of)

    def _exact(self, layout: Layout, memory: float) -> Candidate | None:
        if layout not in self._known:
            self._known[layout] = self._walked(layout, memory)
        return self._known[layout]

    def _walked(self, layout: Layout, memory: float) -> Candidate | None:
        """The candidate; None when it misses the deadline, cannot win with so much `memory`, or does not fit."""
        self.evaluated += 1
        seconds = exact_seconds(self._question, layout)
        if self._slowest is not None and seconds > self._slowest:
            self.rejected[TOO_SLOW] += 1
            return None
        if not self._open_to_both(seconds, memory):
            return None
        case = case_of(self._question, layout)
        size = float(device_bytes(case, peak_at(self._lines_of(layout), layout.micro_batch_size)))
        if size > self._limit:
            self.rejected[TOO_LARGE] += 1
            self._smallest.walked(layout, size)
            return None
        if hosts_hold(case) is False:
            self.rejected[TOO_LARGE_FOR_HOSTS] += 1
            self._smallest.walked(layout, size)
            return None
        return Candidate(layout, seconds, size)

    def _lines_of(self, layout: Layout) -> list[tuple[float, float]]:
        """`memory_lines` once for all layouts that have the same."""
        key = of_same_lines(layout)
        if key not in self._lines:
            self._lines[key] = memory_lines(case_of(self._question, key))
        return self._lines[key]


def exact_seconds(question: Question, layout: Layout) -> float:
    """Seconds a sequence of one layout, its schedule played out."""
    return float(time_bound(question, layout))


def order_of(candidate: Candidate) -> tuple[float, float]:
    """Faster first, then smaller."""
    return candidate.seconds_per_sequence, candidate.device_bytes


def _beats(one: Candidate, other: Candidate) -> bool:
    return (
        one is not other
        and one.seconds_per_sequence <= other.seconds_per_sequence
        and one.device_bytes <= other.device_bytes
        and order_of(one) != order_of(other)
    )


def all_layouts(question: Question, engines: Iterable[str] | None = None) -> Iterator[Layout]:
    """Every layout of the space, one by one: for small spaces and for tests."""
    for block in blocks_of(question, None if engines is None else tuple(engines)):
        for row in range(block.size):
            yield block.layout(row)
