"""The space of layouts as columns, for a search of millions.

A block holds layouts that share every category (engine, stage, recomputation, schedule, switches); its numbers are
columns. Not here: what the space is (space.py), or which layouts are good (search.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from planner.ask.question import Question, case_of
from planner.basics.arith import Number
from planner.decide.bounds import bound_lines, memory_bound
from planner.decide.candidates import LayoutFigures, least_seconds, seconds_per_sequence
from planner.decide.space import Groups, LayoutColumns, belongs, spaces, splits, templates
from planner.decide.star import Complexity, parts_of, simpler
from planner.parallelism.rule import Rule
from planner.spec import Layout
from planner.spec.engines import EngineFacts

if TYPE_CHECKING:
    import numpy as np

    Column = np.ndarray[Any, np.dtype[np.float64]]
    Columns = dict[str, Column]
    Index = np.ndarray[Any, np.dtype[np.int32]]

LEAST_OF_BLOCK = 8
"""Rows of a block, of least bound on memory, that may be named as the nearest to fit."""
LARGEST_BLOCK = 2**16
"""Rows evaluated at once: a few hundred columns of them stay below the memory a search may use."""


class Block(NamedTuple):
    """Layouts that share every category, which `template` holds; their numbers are the `chosen` rows of a `table` that
    many blocks share (None: all of them). A row is copied only when it is looked at: whole spaces have millions.
    `split` numbers the table's rows alike that differ in the micro-batch alone."""

    template: Layout
    table: Columns
    chosen: Index | None = None
    split: Index | None = None

    @property
    def size(self) -> int:
        """How many layouts."""
        return len(self.table["tp"] if self.chosen is None else self.chosen)

    @property
    def rows(self) -> Columns:
        """The numbers, by field."""
        return {name: self.column(name) for name in self.table}

    def column(self, name: str) -> Column:
        """One field's numbers."""
        return self.table[name] if self.chosen is None else self.table[name][self.chosen]

    def columns(self) -> Layout:
        """The block as one layout whose numbers are columns (structs do not check types when built in code)."""
        numbers: dict[str, Any] = dict(self.rows)
        for axis in ("pp", "cp", "tp", "ep", "grad_accum"):  # what all rows share is one number, which costs less
            column = numbers[axis]
            if column.size and (column == column[0]).all():
                numbers[axis] = int(column[0])
        return msgspec.structs.replace(self.template, **numbers)

    def layout(self, row: int) -> Layout:
        """One of them."""
        place = row if self.chosen is None else self.chosen[row]
        numbers = {name: int(column[place]) for name, column in self.table.items()}
        return msgspec.structs.replace(self.template, **numbers)

    def only(self, chosen: Any) -> Block:
        """The rows that a mask or an index chooses."""
        import numpy as np  # large spaces only

        every = np.arange(self.size, dtype=np.int32) if self.chosen is None else self.chosen
        return self._replace(chosen=every[chosen])

    def splits(self) -> tuple[Block, Any]:
        """(one row for all that differ in the micro-batch alone, the place there of each row)."""
        import numpy as np  # large spaces only

        if self.split is None or not self.size:
            return self, np.arange(self.size)
        numbers = self.split if self.chosen is None else self.split[self.chosen]
        numbers = numbers - numbers.min()
        row = np.full(int(numbers.max()) + 1, -1, dtype=np.int32)
        row[numbers] = np.arange(self.size, dtype=np.int32)
        found = row >= 0
        return self.only(row[found]), (np.cumsum(found, dtype=np.int32) - 1)[numbers]


def blocks_of(question: Question, engines: tuple[str, ...] | None = None) -> Iterator[Block]:
    """Everything that the engines may do on this cluster, within what the person fixed."""
    for facts in spaces(question, engines):
        rows, split = _columns(question, facts)
        piped = rows["pp"] > 1
        for template in templates(question, facts):
            whole = Block(template, rows, split=split)
            mask = belongs(question, facts, template, LayoutColumns(**rows))
            for part in (whole.only(mask & ~piped), whole.only(mask & piped)):
                for alike in _alike(part, facts.apart):
                    yield from _cut(alike)


def _columns(question: Question, facts: EngineFacts) -> tuple[Columns, Index]:
    """The numbers of an engine's layouts, by field, and `Block.split`."""
    import numpy as np  # large spaces only

    tables, numbers, known = [np.empty((0, len(LayoutColumns._fields)))], [np.empty(0, dtype=np.int32)], 0
    for groups, experts, batches in splits(question, facts):
        some = np.empty((len(experts) * len(batches), len(LayoutColumns._fields)))
        if len(some):
            some[:, : len(Groups._fields)] = groups
            some[:, len(Groups._fields)] = np.repeat(experts, len(batches))
            some[:, len(Groups._fields) + 1 :] = np.tile(batches, (len(experts), 1))
            accums, place = np.unique(np.asarray(batches)[:, 1], return_inverse=True)
            alike = np.arange(len(experts))[:, None] * len(accums) + place[None, :] + known
            numbers.append(alike.ravel().astype(np.int32))
            known += len(experts) * len(accums)
        tables.append(some)
    table = np.concatenate(tables)
    columns = {name: np.ascontiguousarray(table[:, place]) for place, name in enumerate(LayoutColumns._fields)}
    return columns, np.concatenate(numbers)


def _alike(block: Block, apart: str) -> Iterator[Block]:
    """Rows whose experts are split apart from those whose are not (their collectives are others), and values of an axis
    that the engine wants apart."""
    key = 0.5 * (block.column("ep") > 1) + (block.column(apart) if apart else 0.0)
    left = key
    while left.size:  # a few values of very many rows
        value = left.min()
        yield block.only(key == value)
        left = left[left > value]


def _cut(block: Block) -> Iterator[Block]:
    for begin in range(0, block.size, LARGEST_BLOCK):
        yield block.only(slice(begin, begin + LARGEST_BLOCK))


def as_column(value: Number, rows: int) -> Column:
    """A figure that all rows may share, for each of them."""
    import numpy as np  # large spaces only

    return np.broadcast_to(np.asarray(value, dtype=np.float64), (rows,))


# -- what a search asks --------------------------------------------------------------------------------------------


class BoundedBlock(NamedTuple):
    """A block's legal rows that may fit, with bounds from below, a row each: seconds a sequence, as predicted and if
    nothing overlapped, and bytes on the device."""

    block: Block
    seconds: Column
    serial: Column
    memory: Column

    def within(self, limit_s: float) -> BoundedBlock:
        """The rows whose bound on time is within a limit."""
        mask = self.seconds <= limit_s
        return BoundedBlock(self.block.only(mask), self.seconds[mask], self.serial[mask], self.memory[mask])


def legal(question: Question, block: Block, rules: Iterable[tuple[str, Rule]], rejected: Counter[str]) -> Block | None:
    """The rows that break no rule, None of none; `rejected` counts how many break each first."""
    import numpy as np  # large spaces only

    case = case_of(question, block.columns())
    mask = np.ones(block.size, dtype=bool)
    for name, rule in rules:
        holds = rule.holds(case)
        if holds is True:
            continue
        still = mask & np.asarray(holds, dtype=bool)
        before, left = int(np.count_nonzero(mask)), int(np.count_nonzero(still))
        if left < before:
            rejected[name] += before - left
            mask = still
            if 2 * left < block.size:  # most rows are settled: ask no more of them
                block = block.only(mask)
                case, mask = case_of(question, block.columns()), np.ones(block.size, dtype=bool)
    block = block if mask.all() else block.only(mask)
    return block if block.size else None


def bounds(figures: LayoutFigures, block: Block, lost_s: float) -> tuple[BoundedBlock, list[tuple[float, Layout]]]:
    """(the rows whose bound on memory is within the limit, (bound on memory, layout) of the few of least bound). Rows
    that surely take more than `lost_s` a sequence have a lower bound on time than others, above it."""
    import numpy as np  # large spaces only

    question = figures.question
    few, place = block.splits()
    lines = [
        (as_column(start, few.size)[place], as_column(slope, few.size)[place])
        for start, slope in bound_lines(case_of(question, few.columns()))
    ]
    case = case_of(question, block.columns())
    memory = as_column(memory_bound(case, lines), block.size)
    least = (
        np.argpartition(memory, LEAST_OF_BLOCK)[:LEAST_OF_BLOCK] if block.size > LEAST_OF_BLOCK else range(block.size)
    )
    smallest = [(float(memory[row]), block.layout(int(row))) for row in least]
    may_fit = memory <= figures.limit(case)
    if not may_fit.all():
        block, memory = block.only(may_fit), memory[may_fit]
        if not block.size:
            return BoundedBlock(block, memory, memory, memory), smallest
        case = case_of(question, block.columns())
    if lost_s == float("inf"):
        seconds, serial = (as_column(one, block.size) for one in seconds_per_sequence(question, case))
        return BoundedBlock(block, seconds, serial, memory), smallest
    seconds = as_column(least_seconds(question, case), block.size).copy()
    serial = seconds.copy()
    (open_rows,) = np.nonzero(seconds <= lost_s)
    if len(open_rows):
        left = block.only(open_rows)
        exact = seconds_per_sequence(question, case_of(question, left.columns()))
        seconds[open_rows], serial[open_rows] = (as_column(one, left.size) for one in exact)
    return BoundedBlock(block, seconds, serial, memory), smallest


def best_first(bounded: Sequence[BoundedBlock]) -> Any:
    """(seconds, place in `bounded`, row) of every row, ascending in time's bound, then in memory's."""
    import numpy as np  # large spaces only

    if not bounded:
        return np.empty((0, 3))
    seconds, memory = (np.concatenate([getattr(one, name) for one in bounded]) for name in ("seconds", "memory"))
    place = np.concatenate([np.full(one.block.size, place) for place, one in enumerate(bounded)])
    row = np.concatenate([np.arange(one.block.size) for one in bounded])
    order = np.lexsort((memory, seconds))
    return np.stack([seconds[order], place[order], row[order]], axis=1)


def least_serial_first(bounded: Sequence[BoundedBlock], most: int | None) -> Iterator[tuple[float, Layout]]:
    """(seconds if nothing overlapped, layout) of the rows that accumulate `most` micro-batches at most (None: of all),
    ascending in the bound."""
    import numpy as np  # large spaces only

    chosen, serials = [], []
    for place, one in enumerate(bounded):
        able = np.arange(one.block.size) if most is None else np.nonzero(one.block.column("grad_accum") <= most)[0]
        chosen += [(place, int(row)) for row in able]
        serials.append(one.serial[able])
    if not chosen:
        return
    serial = np.concatenate(serials)
    for at in np.argsort(serial, kind="stable"):
        place, row = chosen[at]
        yield float(serial[at]), bounded[place].block.layout(row)


def simplest_first(
    bounded: Sequence[BoundedBlock], seq_len: int, than: Complexity
) -> Iterator[tuple[Complexity, float, float, Layout]]:
    """(parts, memory, seconds if nothing overlapped, layout) of the rows that are as simple as a layout of the parts
    `than` or simpler, the simplest first and then ascending in memory's bound."""
    import numpy as np  # large spaces only

    chosen, table = [], []
    for place, one in enumerate(bounded):
        columns = [as_column(part, one.block.size) for part in parts_of(one.block.columns(), seq_len)]
        (rows,) = np.nonzero(np.broadcast_to(~np.asarray(simpler(than, tuple(columns)), dtype=bool), (one.block.size,)))
        chosen += [(place, int(row)) for row in rows]
        table.append(np.stack([*columns, one.memory, one.serial])[:, rows])
    if not chosen:
        return
    keys = np.concatenate(table, axis=1)
    for at in np.lexsort(keys[::-1]):
        place, row = chosen[at]
        *parts, memory, serial = keys[:, at].tolist()
        yield tuple(parts), memory, serial, bounded[place].block.layout(row)
