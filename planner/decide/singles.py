"""A small space, layout by layout in plain numbers: nothing waits for NumPy, and a browser needs none.

Answers search.py as blocks.py does for large spaces. Not here: what the space is (space.py), or which layouts are good
(search.py).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import NamedTuple

import msgspec

from planner.ask.question import Question, case_of
from planner.decide.bounds import bound_lines
from planner.decide.candidates import LayoutFigures
from planner.decide.space import by_batch, spaces
from planner.decide.star import Complexity, parts_of
from planner.figures.memory import device_bytes, peak_at
from planner.parallelism.rule import Rule
from planner.spec import Layout


class BatchGroup(NamedTuple):
    """Layouts that differ in the batch alone: (micro_batch_size, grad_accum) of each, smallest micro-batch first. All
    accumulate, or none does; in a pipeline all accumulate as much. No other takes fewer seconds a sequence than the
    last."""

    template: Layout
    batches: tuple[tuple[int, int], ...]

    @property
    def size(self) -> int:
        """How many layouts."""
        return len(self.batches)

    def layout(self, row: int) -> Layout:
        """One of them."""
        micro, accum = self.batches[row]
        return msgspec.structs.replace(self.template, micro_batch_size=micro, grad_accum=accum)


class BoundedGroup(NamedTuple):
    """A group's legal layouts that may fit, with bounds from below, a row each: seconds a sequence, as predicted and if
    nothing overlapped, and bytes on the device."""

    block: BatchGroup
    seconds: Sequence[float]
    serial: Sequence[float]
    memory: Sequence[float]

    def within(self, limit_s: float) -> BoundedGroup:
        """The rows whose bound on time is within a limit."""
        return self._rows([row for row, seconds in enumerate(self.seconds) if seconds <= limit_s])

    def _rows(self, rows: list[int]) -> BoundedGroup:
        batches = tuple(self.block.batches[row] for row in rows)
        columns = ([column[row] for row in rows] for column in self[1:])
        return BoundedGroup(self.block._replace(batches=batches), *columns)


def blocks_of(question: Question, engines: tuple[str, ...] | None = None) -> Iterator[BatchGroup]:
    """Everything that the engines may do on this cluster, within what the person fixed."""
    for facts in spaces(question, engines):
        for layout, batches in by_batch(question, facts):
            alike: dict[int, list[tuple[int, int]]] = {}
            for micro, accum in sorted(batches):
                alike.setdefault(accum if layout.pp > 1 else min(accum, 2), []).append((micro, accum))
            for some in alike.values():
                yield BatchGroup(layout, tuple(some))


def legal(
    question: Question, block: BatchGroup, rules: Iterable[tuple[str, Rule]], rejected: Counter[str]
) -> BatchGroup | None:
    """The group where it breaks no rule; `rejected` counts its layouts under the first that it breaks."""
    case = case_of(question, block.layout(0))
    for name, rule in rules:
        if not rule.holds(case):
            rejected[name] += block.size
            return None
    return block


def bounds(figures: LayoutFigures, block: BatchGroup, lost_s: float) -> tuple[BoundedGroup, list[tuple[float, Layout]]]:
    """(the layouts whose bound on memory is within the limit, (bound on memory, layout) of the one of least bound).

    Where even the fastest surely takes more than `lost_s` a sequence, that is each one's bound on time, and bounds on
    memory are not asked for.
    """
    if lost_s < math.inf:
        least = figures.least_seconds(block.layout(block.size - 1), lost_s)
        if least > lost_s:
            return BoundedGroup(block, [least] * block.size, [least] * block.size, [0.0] * block.size), []
    smallest = block.layout(0)
    case = figures.case(smallest)
    lines = [(float(start), float(slope)) for start, slope in bound_lines(case)]
    limit, needed = figures.limit(case), list[float]()
    seconds, serial, memories, batches = [], [], [], []
    for row, (micro, _) in enumerate(block.batches):
        live, layout = peak_at(lines, micro), block.layout(row)
        if row and live > limit:  # and larger micro-batches need more
            break
        memory = float(device_bytes(figures.case(layout), live))
        needed.append(memory)
        if memory <= limit:
            least = 0.0 if lost_s == math.inf else figures.least_seconds(layout, lost_s)
            predicted, bare = (least, least) if least > lost_s else figures.seconds(layout)
            seconds.append(predicted)
            serial.append(bare)
            memories.append(memory)
            batches.append(block.batches[row])
    return BoundedGroup(block._replace(batches=tuple(batches)), seconds, serial, memories), [(needed[0], smallest)]


def best_first(bounded: Sequence[BoundedGroup]) -> list[tuple[float, int, int]]:
    """(seconds, place in `bounded`, row) of every row, ascending in time's bound, then in memory's."""
    rows = [
        (seconds, memory, place, row)
        for place, one in enumerate(bounded)
        for row, (seconds, memory) in enumerate(zip(one.seconds, one.memory, strict=True))
    ]
    return [(seconds, place, row) for seconds, _, place, row in sorted(rows)]


def least_serial_first(bounded: Sequence[BoundedGroup], most: int | None) -> Iterator[tuple[float, Layout]]:
    """(seconds if nothing overlapped, layout) of the rows that accumulate `most` micro-batches at most (None: of all),
    ascending in the bound."""
    rows = [
        (serial, place, row)
        for place, one in enumerate(bounded)
        for row, serial in enumerate(one.serial)
        if most is None or one.block.batches[row][1] <= most
    ]
    for serial, place, row in sorted(rows):
        yield serial, bounded[place].block.layout(row)


def simplest_first(
    bounded: Sequence[BoundedGroup], seq_len: int, than: Complexity
) -> Iterator[tuple[Complexity, float, float, Layout]]:
    """(parts, memory, seconds if nothing overlapped, layout) of the rows that are as simple as a layout of the parts
    `than` or simpler, the simplest first and then ascending in memory's bound."""
    rows = []
    for one in bounded:
        for row, (memory, serial) in enumerate(zip(one.memory, one.serial, strict=True)):
            layout = one.block.layout(row)
            parts = parts_of(layout, seq_len)
            if parts <= than:
                rows.append((parts, memory, serial, layout))
    yield from sorted(rows, key=itemgetter(0, 1, 2))
