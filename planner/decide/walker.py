"""Walk layouts one by one, those of the least bounds first, until no bound is left that could win.

Not here: the bounds (bounds.py), or which layouts are looked at (search.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

from planner.ask.question import Question
from planner.basics.progress import Progress
from planner.decide.candidates import Candidate, LayoutFigures, beats, order_of, thing_of
from planner.decide.star import Complexity, order_of_star, parts_of
from planner.parallelism.rule import Rule
from planner.spec import Layout

TOO_LARGE = "does not fit in memory with headroom"
TOO_LARGE_FOR_HOSTS = "does not fit in the hosts' memory"
TOO_SLOW = "misses the deadline"
FRONT_SPAN = 2.0
"""Layouts more than this many times as slow as the fastest are left out of the Pareto front."""
MOST_WALKED = 2000
"""Single layouts evaluated at most while nothing fits: by then the cheap bounds have failed to tell."""


class LayoutRows(Protocol):
    """Layouts that share their categories."""

    @property
    def template(self) -> Layout:
        """Their categories."""

    @property
    def size(self) -> int:
        """How many."""

    def layout(self, row: int, /) -> Layout:
        """One of them."""


class BoundedRows(Protocol):
    """Legal layouts that may fit, with bounds from below: seconds a sequence, as predicted and if nothing overlapped,
    and bytes on the device."""

    @property
    def block(self) -> LayoutRows:
        """The layouts."""

    @property
    def memory(self) -> Sequence[float]:
        """Bytes on the device, a row each."""

    def within(self, limit_s: float, /) -> BoundedRows:
        """The rows whose bound on time is within a limit."""


class Space(Protocol):
    """Ways to look at a space of layouts: one by one (singles.py), or in columns (blocks.py)."""

    def blocks_of(self, question: Question, engines: tuple[str, ...] | None, /) -> Iterator[LayoutRows]:
        """Everything that the engines may do on this cluster, within what the person fixed."""

    def legal(
        self, question: Question, block: LayoutRows, rules: Iterable[tuple[str, Rule]], rejected: Counter[str], /
    ) -> LayoutRows | None:
        """The layouts that break no rule, None of none; `rejected` counts how many break each first."""

    def bounds(
        self, figures: LayoutFigures, block: LayoutRows, lost_s: float, /
    ) -> tuple[BoundedRows, list[tuple[float, Layout]]]:
        """(the rows that may fit, (bound on memory, layout) of those of least bound). Rows that surely take more than
        `lost_s` a sequence have a bound on time above it, which may be lower than others'."""

    def best_first(self, bounded: Sequence[BoundedRows], /) -> Sequence[tuple[float, int, int]]:
        """(seconds, place in `bounded`, row) of every row, ascending in time's bound, then in memory's."""

    def least_serial_first(self, bounded: Sequence[BoundedRows], most: int | None, /) -> Iterator[tuple[float, Layout]]:
        """(seconds if nothing overlapped, layout) of the rows that accumulate `most` micro-batches at most (None: of
        all), ascending in the bound."""

    def simplest_first(
        self, bounded: Sequence[BoundedRows], seq_len: int, than: Complexity, /
    ) -> Iterator[tuple[Complexity, float, float, Layout]]:
        """(parts, memory, seconds if nothing overlapped, layout) of the rows that are as simple as a layout of the
        parts `than` or simpler, the simplest first and then ascending in memory's bound."""


class Smallest:
    """The legal layout that needs least memory, for when none fits: each block's few of the least bound are walked,
    least bound first, until no bound is left that could be less."""

    def __init__(self, figures: LayoutFigures, progress: Progress) -> None:
        self._figures, self._progress = figures, progress
        self._bounds: list[tuple[float, Layout]] = []
        self._least: tuple[float, Layout | None] = (math.inf, None)

    def offer(self, bounds: Iterable[tuple[float, Layout]]) -> None:
        """Layouts by their bound on memory."""
        self._bounds += bounds

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
            self.walked(layout, self._figures.bytes(layout))
        return self._least[1]


class Walker:
    """Walks candidates best-first, each exactly; `best` and `front` grow from one run to the next.

    `best` has one layout of each thing (candidates.thing_of), its fastest. `reopened` counts those walked after all
    runs, which could not be among the best but might be the star.
    """

    def __init__(
        self, figures: LayoutFigures, k: int, slowest: float | None, front: int, smallest: Smallest, progress: Progress
    ) -> None:
        self._figures, self._smallest, self._progress = figures, smallest, progress
        self._k, self._slowest, self._points = k, slowest, front
        self._known: dict[Layout, Candidate | None] = {}
        self._near: dict[Layout, Candidate | None] = {}
        self.rejected: Counter[str] = Counter()
        self.best: list[Candidate] = []
        self.front: list[Candidate] = []
        self.seen = self.evaluated = self.reopened = 0

    def run(self, order: Sequence[tuple[float, int, int]], bounded: Sequence[BoundedRows], done: int) -> bool:
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

    def lost_above(self, tie: float) -> float:
        """Seconds a sequence above which no layout is walked, is near the best or is counted as too slow: infinite
        while any may be."""
        if len(self.best) < self._k or self._points or self._slowest is not None:
            return math.inf
        return max(self.best[-1].seconds_per_sequence, self.best[0].seconds_per_sequence * (1 + tie))

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
        """The front without layouts that are far too slow."""
        front = self.front
        return [one for one in front if one.seconds_per_sequence <= FRONT_SPAN * front[0].seconds_per_sequence]

    def _offer(self, one: Candidate | None) -> None:
        if one is None or one in self.best:
            return
        thing = thing_of(one.layout)
        twin = next((other for other in self.best if thing_of(other.layout) == thing), None)
        if twin is None or order_of(one) < order_of(twin):
            others = [other for other in self.best if other is not twin]
            self.best = sorted([*others, one], key=order_of)[: self._k]
        if self._points and one not in self.front and not any(beats(other, one) for other in self.front):
            self.front = sorted([*(other for other in self.front if not beats(one, other)), one], key=order_of)

    def _exact(self, layout: Layout, memory: float) -> Candidate | None:
        if layout not in self._known:
            self._known[layout] = self._walked(layout, memory)
        return self._known[layout]

    def _walked(self, layout: Layout, memory: float) -> Candidate | None:
        """The candidate; None when it misses the deadline, cannot win with so much `memory`, or does not fit."""
        self.evaluated += 1
        seconds = self._figures.seconds(layout)[0]
        if self._slowest is not None and seconds > self._slowest:
            self.rejected[TOO_SLOW] += 1
            return None
        return self._sized(layout) if self._open_to_both(seconds, memory) else None

    def _sized(self, layout: Layout) -> Candidate | None:
        """The candidate; None when it does not fit, which is counted once."""
        case = self._figures.case(layout)
        limit = self._figures.limit(case)
        # Once a layout fits, nothing depends on which of those that do not is the smallest.
        size = self._figures.bytes(layout, limit if self.best else math.inf)
        reason = TOO_LARGE if size > limit else None if self._figures.hosts_hold(case) else TOO_LARGE_FOR_HOSTS
        if reason is None:
            seconds, serial = self._figures.seconds(layout)
            return Candidate(layout, seconds, size, serial)
        if layout not in self._known:
            self.rejected[reason] += 1
            if not self.best:
                self._smallest.walked(layout, size)
        return None

    def star(
        self, space: Space, near: Sequence[BoundedRows], limit_s: float, tie: float, *, one_batch: bool
    ) -> Candidate:
        """The star (star.py) of the best and of the rows of `near`, which hold all that take at most `limit_s` a
        sequence."""
        seq_len = self._figures.question.job.seq_len
        tied = [one for one in self.best if one.seconds_per_sequence <= limit_s]
        least: dict[int | None, float] = {}

        def serial_limit(layout: Layout) -> float:
            """The most that a layout of such accumulation may take if nothing overlapped."""
            most = None if one_batch else layout.grad_accum
            if most not in least:
                known = (one.serial_seconds for one in tied if most is None or one.layout.grad_accum <= most)
                least[most] = min(known, default=math.inf)
                for bound, other in space.least_serial_first(near, most):
                    if bound >= least[most]:
                        break
                    one = self._tied(other, limit_s)
                    least[most] = least[most] if one is None else min(least[most], one.serial_seconds)
            return least[most] * (1 + tie)

        able = [one for one in tied if one.serial_seconds <= serial_limit(one.layout)]
        found = min(able, key=lambda one: order_of_star(one, seq_len), default=None)
        than = parts_of(found.layout, seq_len) if found else (math.inf,) * len(parts_of(self.best[0].layout, seq_len))
        for parts, memory, serial, layout in space.simplest_first(near, seq_len, than):
            if found is not None and (parts, memory) > (parts_of(found.layout, seq_len), found.device_bytes):
                break
            if serial > serial_limit(layout):
                continue
            one = self._tied(layout, limit_s)
            if one is None or one.serial_seconds > serial_limit(layout):
                continue
            if found is None or order_of_star(one, seq_len) < order_of_star(found, seq_len):
                found = one
        assert found is not None  # the one of least seconds if nothing overlapped, of those that accumulate least
        return found

    def _tied(self, layout: Layout, limit_s: float) -> Candidate | None:
        """The candidate; None when it takes longer, or does not fit."""
        if layout not in self._near:
            self._progress.at(self._progress.total)
            seconds = self._figures.seconds(layout)[0]
            found = None if seconds > limit_s else self._sized(layout)
            if layout not in self._known:
                self.evaluated += 1
                self.reopened += 1
                self._known[layout] = found
            self._near[layout] = found
        return self._near[layout]
