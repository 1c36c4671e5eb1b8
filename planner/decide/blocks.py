"""The space of layouts as columns, for a search of millions.

A block holds layouts that share every category (engine, stage, recomputation, schedule, switches); its numbers are
columns. Not here: what the space is (space.py), or which layouts are good (search.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from planner.ask.question import Question
from planner.basics.arith import Number
from planner.decide.space import Groups, Row, belongs, spaces, splits, templates
from planner.spec import Layout
from planner.spec.engines import EngineFacts

if TYPE_CHECKING:
    import numpy as np

    Column = np.ndarray[Any, np.dtype[np.float64]]
    Columns = dict[str, Column]
    Index = np.ndarray[Any, np.dtype[np.int32]]

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
            mask = belongs(question, facts, template, Row(**rows))
            for part in (whole.only(mask & ~piped), whole.only(mask & piped)):
                for alike in _alike(part, facts.apart):
                    yield from _cut(alike)


def _columns(question: Question, facts: EngineFacts) -> tuple[Columns, Index]:
    """The numbers of an engine's layouts, by field, and `Block.split`."""
    import numpy as np  # large spaces only

    tables, numbers, known = [np.empty((0, len(Row._fields)))], [np.empty(0, dtype=np.int32)], 0
    for groups, experts, batches in splits(question, facts):
        some = np.empty((len(experts) * len(batches), len(Row._fields)))
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
    columns = {name: np.ascontiguousarray(table[:, place]) for place, name in enumerate(Row._fields)}
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
