"""Recordings of one model at several batches and lengths, taken together: sizes as polynomials, and what died when.

Every size must be exact at a batch and length that the fit did not use. Not here: making recordings (record.py), or
the program of a unit (programs.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cached_property

import numpy as np

from executor.worker.imported.loops import aligned
from executor.worker.imported.record import (
    Happening,
    ModelRecording,
    NotDescribed,
    Operation,
    Place,
    TensorSeen,
    UnitName,
)
from executor.worker.imported.split import Point, SplitRecordings, added, value_at
from planner.spec.described import ByteCount


def size_of(points: Sequence[Point], values: Sequence[float], what: Callable[[], str]) -> ByteCount:
    """Bytes at each point as a polynomial of batch and length: it is solved from six, and exact at all. Of one point
    they are a fixed size. Where sequences have images it is solved from seven, and the last term is that of images'
    positions."""
    if len(points) == 1:
        return 0.0, 0.0, float(values[0])
    unit = points[0][1]  # lengths are counted in it, so that terms of chunks are whole numbers
    parts = [(batch, seq / unit, [batch * one for one in images]) for batch, seq, *images in points]
    rows = np.array([(batch * seq, seq, 1.0, batch * seq * seq, batch, seq * seq, *more) for batch, seq, more in parts])
    terms_count = rows.shape[1]
    solved = np.linalg.solve(rows[:terms_count], np.array(values[:terms_count], float))
    whole = np.round(solved * 4096) / 4096
    exact = [one for one in (whole, solved) if np.allclose(rows @ one, values, rtol=1e-9, atol=0.5)]
    if not exact:
        raise NotDescribed(f"the size of {what()} is no polynomial of batch and length: {values} bytes at {points}")
    found = exact[0]
    found = found / [unit, unit, 1, unit * unit, 1, unit * unit, 1][:terms_count]
    return added([float(one) + 0.0 for one in found], ())  # no -0.0


class OtherWithoutGradients(NotDescribed):
    """A model computes otherwise where no gradients are wanted: torch.matmul folds other products, attention takes
    another kernel for a mask that is learned."""


class Recorded:
    """Recordings with gradients at each of `points`, and one in which autograd keeps nothing at the first, which says
    when variables go out of scope."""

    def __init__(
        self,
        runs: Sequence[ModelRecording],
        plain: ModelRecording,
        points: Sequence[Point],
        like: Recorded | None = None,
        split: SplitRecordings | None = None,
        *,
        dealt: bool = False,
    ) -> None:
        """A single run may be `like` others of the same model, whose tensors tell how those of its sizes grow. `split`
        tells what of them tensor ranks divide; or experts are `dealt` to ranks."""
        self.split = split or SplitRecordings("")
        self.over_ranks = dealt or self.split.near is not None
        self.like, self.points, self.plain, self.base = like, points, plain, runs[0]
        self.whole = runs
        self.runs, self.more, self.repeated = aligned(runs)
        first = next(event for event in self.base.events if event.kind == "begin")
        before = self.base.events[: self.base.events.index(first)]
        # The last operation before makes the gradient of the logits.
        self.forward = max(event.what for event in before if event.kind == "op")
        theirs, ours = _makers(plain, len(plain.operations)), _makers(self.base, self.forward)
        self.pairs: list[tuple[int, int]] = []
        self.copies: set[int] = set()
        """Copies that autograd alone makes of what is written over."""
        for one in theirs:
            while ours and self.base.operations[ours[0]].name == "clone" != plain.operations[one].name:
                self.copies.add(ours.pop(0))
            if not ours or plain.operations[one].name != self.base.operations[ours[0]].name:
                name, unit, place = plain.operations[one].name, *plain.operations[one].unit
                raise OtherWithoutGradients(f"{name} in {unit} {place} is there without gradients alone")
            self.pairs.append((one, ours.pop(0)))
        for index in self.copies:
            copy, writes = self.base.operations[index : index + 2]
            copy.node = writes.node = copy.node - 1
        for operation in self.base.operations[: self.forward]:
            after = self.base.nodes.get(operation.node + 1)
            if operation.name.endswith("_") and after is not None and after.name.endswith("CopySlices"):
                operation.node += 1  # it wrote to a part of a tensor, and has its node within that

    @cached_property
    def halves(self) -> tuple[list[Happening], list[Happening]]:
        """Events of the forward and of the backward."""
        events = self.base.events
        first = next(place for place, event in enumerate(events) if event.kind == "begin")
        return events[:first], events[first:]

    @cached_property
    def first_operation(self) -> dict[int, int]:
        """The operation of each autograd node; of a function that is written in Python, which has several, the one that
        makes its result."""
        found: dict[int, int] = {}
        makes: dict[tuple[int, int], int] = {}
        read: dict[Place, int] = {}
        for index, operation in enumerate(self.base.operations[: self.forward]):
            if operation.node in self.base.nodes and index not in self.copies:
                found.setdefault(operation.node, index)
                makes.update({(operation.node, storage): index for storage in operation.made})
            read.update({one.place: one.storage for one in operation.inputs if one.place is not None})
        for number, index in found.items():
            result = read.get((number, 0))
            if result is not None and all(one.storage != result for one in self.base.operations[index].results):
                found[number] = makes.get((number, result), index)
        return found

    @cached_property
    def parted(self) -> set[str]:
        """Weights that are read more than once, beside embeddings' tables: in parts, by iterations of a loop, or by
        several layers."""
        edges = Counter(
            edge
            for node in self.base.nodes.values()
            if not node.name.startswith("EmbeddingBackward")
            for edge in node.edges
            if isinstance(edge, str)
        )
        return {name for name, times in edges.items() if times > 1} | self.base.common.keys()

    def unit_of(self, node: int) -> UnitName | None:
        """The unit of a node's operation."""
        index = self.first_operation.get(node)
        return None if index is None else self.base.operations[index].unit

    def of_linear(self, op: Operation) -> bool:
        """Whether an operation is of a linear module that the planner computes itself: of none of several layers."""
        return bool(op.inside) and f"{op.inside}.weight" not in self.base.common

    def in_linear(self, node: int) -> bool:
        """Whether a node's operation is."""
        index = self.first_operation.get(node)
        return index is not None and self.of_linear(self.base.operations[index])

    def first_reader(self, name: str) -> UnitName | None:
        """The unit that is the first to read a weight."""
        found = (self.first_operation.get(node.number) for node in self.base.nodes.values() if name in node.edges)
        first = min((index for index in found if index is not None), default=None)
        return None if first is None else self.base.operations[first].unit

    @cached_property
    def used(self) -> dict[int, list[int]]:
        """Which results of each node some other reads, in order."""
        found: dict[int, set[int]] = {}
        places = [edge for node in self.base.nodes.values() for edge in node.edges if isinstance(edge, tuple)]
        places += [
            event.tensor.place
            for event in self.halves[0]
            if isinstance(event.tensor, TensorSeen) and event.tensor.place
        ]
        if self.base.logits is not None and self.base.logits.place is not None:
            places.append(self.base.logits.place)
        for number, which in places:
            found.setdefault(number, set()).add(which)
        return {number: sorted(which) for number, which in found.items()}

    @cached_property
    def backward_of(self) -> dict[int, list[Happening]]:
        """Events of each node's backward, from its "begin" to its "end"."""
        found: dict[int, list[Happening]] = {}
        current: list[Happening] | None = None
        for event in self.halves[1]:
            if event.kind == "begin":
                current = found[event.what] = []
            if current is not None:
                current.append(event)
            if event.kind == "end":
                current = None
        return found

    @cached_property
    def deaths(self) -> list[tuple[int, UnitName, int]]:
        """Each storage that dies in the forward: after which operation, in which unit, and which (as the first
        recording numbers them). What dies with gradients too is seen there: a graph that leads to no loss keeps its
        tensors until its last variable goes out of scope."""
        same: dict[int, int] = {}
        for theirs, ours in self.pairs:
            one, other = self.plain.operations[theirs], self.base.operations[ours]
            for here, there in zip(one.inputs + one.results, other.inputs + other.results, strict=True):
                same.setdefault(here.storage, there.storage)
        after = dict(self.pairs)
        seen = {storage: (at, unit) for at, unit, storage in _frees(self.halves[0])}
        found = []
        for theirs, unit, storage in _frees(self.plain.events):
            if storage in same:
                mine = same[storage]
                at = next((after[one] for one in range(theirs, -1, -1) if one in after), -1)
                found.append((*seen.get(mine, (at, unit)), mine))
        return found

    def size(self, storage: int) -> ByteCount:
        """Bytes of a storage."""
        if self.like is not None:
            found = self.like.growing.get(self.base.sizes[storage])
            if found is None:
                raise NotDescribed(f"{self._maker(storage)} has a size of its own where weights are frozen")
            return found
        return self.split.sized(self._whole(storage), lambda run: run.sizes[storage], lambda: self._maker(storage))

    def _whole(self, storage: int) -> ByteCount:
        """Bytes of a storage where weights are whole."""
        if any(storage not in run.sizes for run in self.runs):
            raise NotDescribed(f"{self._maker(storage)} is made by no operation")
        return size_of(self.points, [run.sizes[storage] for run in self.runs], lambda: self._maker(storage))

    def value(self, size: ByteCount) -> int:
        """The bytes that a size is in the first recording."""
        return round(value_at(size, self.points[0]))

    @cached_property
    def growing(self) -> dict[int, ByteCount]:
        """Sizes by the bytes that they are in the first recording; of several those that grow with the tokens alone."""
        found: dict[int, ByteCount] = {}
        for storage, size in self.base.sizes.items():
            if storage not in self.base.weights and not isinstance(found.get(size), float):
                with suppress(NotDescribed):
                    found[size] = self._whole(storage)
        return found

    def bytes_of(self, look: Callable[[ModelRecording], float], what: str) -> ByteCount:
        """A figure of each recording."""
        return self.split.sized(self.polynomial([look(run) for run in self.runs], what), look, lambda: what)

    def polynomial(self, values: Sequence[float], what: str) -> ByteCount:
        """A figure that each recording has."""
        return size_of(self.points, values, lambda: what)

    def _maker(self, storage: int) -> str:
        for operation in self.base.operations:
            if storage in operation.made:
                return f"a result of {operation.name} in {operation.unit[0]} {operation.unit[1]} {operation.inside}"
        return "a tensor"


def _frees(events: Sequence[Happening]) -> Iterator[tuple[int, UnitName, int]]:
    """Each storage that dies in a forward: after which operation, in which unit, and which."""
    at, unit = -1, ("embed", 0)
    layers = max((event.what[1] for event in events if event.kind == "leave"), default=0)
    for event in events:
        if event.kind == "op":
            at = event.what
        elif event.kind == "enter":
            unit = event.what
        elif event.kind == "leave":
            unit = ("gap", event.what[1]) if event.what[1] < layers else ("tail", 0)
        elif event.kind == "free":
            yield at, unit, event.what


def _makers(run: ModelRecording, stop: int) -> list[int]:
    """Operations that make storages or write to them: views differ with and without gradients."""
    return [i for i, op in enumerate(run.operations[:stop]) if op.made or op.name.endswith("_")]
