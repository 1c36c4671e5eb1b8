"""Walk layouts one by one, those of the least bounds first, until no bound is left that could win.

Not here: the bounds (bounds.py), or which layouts are looked at (search.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from planner.ask.question import Question, case_of, limit_bytes
from planner.basics.progress import Progress
from planner.decide.blocks import Block, as_column
from planner.decide.candidates import Candidate, beats, exact_bytes, order_of, seconds_per_sequence
from planner.decide.ties import Parts, parts_of, simpler
from planner.figures.memory import LinesByStage, device_bytes, hosts_hold, of_same_lines
from planner.parallelism.case import Case
from planner.spec import Layout

if TYPE_CHECKING:
    from planner.decide.blocks import Column

TOO_LARGE = "does not fit in memory with headroom"
TOO_LARGE_FOR_HOSTS = "does not fit in the hosts' memory"
TOO_SLOW = "misses the deadline"
FRONT_SPAN = 2.0
"""Layouts more than so many times as slow as the fastest are left out of the Pareto front."""
MOST_WALKED = 2000
"""Single layouts evaluated at most while nothing fits: by then the cheap bounds have failed to tell."""
SMALLEST_OF_BLOCK = 8
"""Rows of a block, of least bound on memory, that may be named as the nearest to fit."""


class Bounded(NamedTuple):
    """A block's legal rows that may fit, with bounds from below."""

    block: Block
    seconds: Column
    memory: Column


def simplest_first(bounded: list[Bounded], seq_len: int, than: Parts) -> Iterator[tuple[Parts, float, Layout]]:
    """(parts, seconds, layout) of the rows that are simpler than a layout of the parts `than`, the simplest first and
    then ascending in time's bound."""
    import numpy as np  # large spaces only

    chosen, table = [], []
    for place, one in enumerate(bounded):
        columns = [as_column(part, one.block.size) for part in parts_of(one.block.columns(), seq_len)]
        (rows,) = np.nonzero(as_column(simpler(tuple(columns), than), one.block.size))
        chosen += [(place, int(row)) for row in rows]
        table.append(np.stack([*columns, one.seconds])[:, rows])
    if not chosen:
        return
    keys = np.concatenate(table, axis=1)
    for one in np.lexsort(keys[::-1]):
        place, row = chosen[one]
        *parts, seconds = keys[:, one].tolist()
        yield tuple(parts), seconds, bounded[place].block.layout(row)


def best_first(bounded: list[Bounded]) -> Any:
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


class Smallest:
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
            self.walked(layout, exact_bytes(self._question, layout))
        return self._least[1]


class Walker:
    """Walks candidates best-first, each exactly; `best` and `front` grow from one run to the next. `reopened` counts
    those walked after all runs, which could not be among the best but might be the simplest that ties with them."""

    def __init__(
        self,
        question: Question,
        k: int,
        slowest: float | None,
        front: int,
        smallest: Smallest,
        progress: Progress,
    ) -> None:
        self._smallest, self._progress = smallest, progress
        self._question, self._k, self._slowest, self._points = question, k, slowest, front
        self._known: dict[Layout, Candidate | None] = {}
        self._lines: dict[Layout, LinesByStage] = {}
        self.rejected: Counter[str] = Counter()
        self.best: list[Candidate] = []
        self.front: list[Candidate] = []
        self.seen = self.evaluated = self.reopened = 0

    def run(self, order: Any, bounded: list[Bounded], done: int) -> bool:
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
        """Seconds a sequence above which no layout is walked, ties or is counted as too slow: infinite while any may
        be."""
        if len(self.best) < self._k or self._points or self._slowest is not None:
            return float("inf")
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
        """The front without what nobody would wait for."""
        front = self.front
        return [one for one in front if one.seconds_per_sequence <= FRONT_SPAN * front[0].seconds_per_sequence]

    def _offer(self, one: Candidate | None) -> None:
        if one is None or one in self.best:
            return
        self.best = sorted([*self.best, one], key=order_of)[: self._k]
        if self._points and one not in self.front and not any(beats(other, one) for other in self.front):
            self.front = sorted([*(other for other in self.front if not beats(one, other)), one], key=order_of)

    def _exact(self, layout: Layout, memory: float) -> Candidate | None:
        if layout not in self._known:
            self._known[layout] = self._walked(layout, memory)
        return self._known[layout]

    def _walked(self, layout: Layout, memory: float) -> Candidate | None:
        """The candidate; None when it misses the deadline, cannot win with so much `memory`, or does not fit."""
        self.evaluated += 1
        seconds = float(seconds_per_sequence(self._question, layout))
        if self._slowest is not None and seconds > self._slowest:
            self.rejected[TOO_SLOW] += 1
            return None
        if not self._open_to_both(seconds, memory):
            return None
        return self._sized(layout, seconds)

    def _sized(self, layout: Layout, seconds: float) -> Candidate | None:
        """The candidate of known seconds; None when it does not fit, which is counted once."""
        case = case_of(self._question, layout)
        limit = limit_bytes(self._question, case)
        # Once a layout fits, nobody asks which of those that do not is the smallest.
        size = self._size(case, limit if self.best else float("inf"))
        reason = TOO_LARGE if size > limit else TOO_LARGE_FOR_HOSTS if hosts_hold(case) is False else None
        if reason is None:
            return Candidate(layout, seconds, size)
        if layout not in self._known:
            self.rejected[reason] += 1
            if not self.best:
                self._smallest.walked(layout, size)
        return None

    def simplest(self, near: list[Bounded], limit_s: float, known: Candidate | None = None) -> Candidate:
        """The simplest of the layouts that take at most `limit_s` a sequence: of the best, of the rows of `near`, and
        the one `known` from rows before them. Of equally simple ones the fastest."""
        seq_len = self._question.job.seq_len
        tied = [one for one in self.best if one.seconds_per_sequence <= limit_s] + ([known] if known else [])
        found = min(tied, key=lambda one: (parts_of(one.layout, seq_len), order_of(one)))
        own = than = parts_of(found.layout, seq_len)
        for parts, bound, layout in simplest_first(near, seq_len, than):
            if own != than and (parts != own or bound > found.seconds_per_sequence):
                break
            self._progress.at(self._progress.total)
            one = self._tied(layout, limit_s)
            if one is not None and (own == than or order_of(one) < order_of(found)):
                found, own = one, parts
        return found

    def _tied(self, layout: Layout, limit_s: float) -> Candidate | None:
        """The candidate; None when it takes longer, or does not fit."""
        seconds = float(seconds_per_sequence(self._question, layout))
        found = None if seconds > limit_s else self._sized(layout, seconds)
        if layout not in self._known:
            self.evaluated += 1
            self.reopened += 1
            self._known[layout] = found
        return found

    def _size(self, case: Case, enough: float) -> float:
        """Bytes of a device at the layout's peak; where a stage has more than `enough`, those of the first such stage
        that was looked at."""
        key = of_same_lines(case.layout)
        if key not in self._lines:
            self._lines[key] = LinesByStage(case_of(self._question, key))
        live = size = 0.0
        for peak in self._lines[key].peaks(case.layout.micro_batch_size):
            if peak > live:
                live, size = peak, float(device_bytes(case, peak))
            if size > enough:
                break
        return size
