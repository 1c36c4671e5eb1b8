"""Loops over a sequence: recordings with more iterations beside one with fewer, and the iteration that repeats.

Not here: making recordings (record.py, lengths.py), or repeating the iteration (planner/spec/loops.py).
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from executor.worker.imported.record import ModelRecording, NotDescribed, UnitName, named
from planner.inventory.tensors import Size
from planner.spec.described import ByteCount, Loop, Program
from planner.spec.described_file import with_sizes
from planner.spec.loops import lengthened

WINDOWS = (1, 2)
UnitDirection = tuple[str, UnitName]
"""Forward or backward, and the unit whose operations they are."""


class Repeated(NamedTuple):
    """Of the shortest recording: the place among a part's operations where longer ones have more, and the operations of
    one iteration."""

    at: int
    width: int


class Aligned(NamedTuple):
    """Recordings that have the operations of the first and no others, storages numbered as there; which operations each
    has beside them, by part; and those of the first that are the repeated iteration of each part."""

    runs: tuple[ModelRecording, ...]
    more: tuple[dict[UnitDirection, list[int]], ...]
    repeated: dict[UnitDirection, list[int]]


def aligned(runs: Sequence[ModelRecording]) -> Aligned:
    """Recordings at several lengths, the shortest first; NotDescribed where they differ by more than iterations."""
    parts = [_Parts(run) for run in runs]
    maps: list[dict[int, int]] = [{} for _ in runs]
    more: list[dict[UnitDirection, list[int]]] = [{} for _ in runs]
    repeated: dict[UnitDirection, list[int]] = {}

    def align(each: Sequence[list[int]], part: UnitDirection) -> None:
        names = [[_name(run, place) for place in places] for run, places in zip(runs, each, strict=True)]
        loop, first = _repeated(names, part), each[0]
        for places, own, beyond in zip(each, maps, more, strict=True):
            extra = len(places) - len(first)
            beyond.setdefault(part, []).extend(places[loop.at : loop.at + extra])
            own.update(zip(first, places[: loop.at] + places[loop.at + extra :], strict=True))
        repeated.setdefault(part, []).extend(first[loop.at - loop.width : loop.at])

    for unit in dict.fromkeys(unit for one in parts for unit in one.ahead):
        align([one.ahead.get(unit, []) for one in parts], ("forward", unit))
    seen: list[set[int]] = [set() for _ in runs]
    for node in parts[0].behind:
        nodes = [one.node_as(parts[0], node, own) for one, own in zip(parts, maps, strict=True)]
        align([one.behind.get(found, []) for one, found in zip(parts, nodes, strict=True)], parts[0].part_of(node))
        for known, found in zip(seen, nodes, strict=True):
            known.add(found)
    for one, beyond, known in zip(parts, more, seen, strict=True):
        for node, places in one.behind.items():
            if node not in known:
                beyond.setdefault(one.part_of(node), []).extend(places)
    both = (_as_first(runs[0], run, own) for run, own in zip(runs, maps, strict=True))
    return Aligned(tuple(both), tuple(more), repeated)


class _Parts:
    """Operations of a recording: those of its forward by unit (`ahead`), those of its backward by autograd node."""

    def __init__(self, run: ModelRecording) -> None:
        events = run.events
        begun = next((place for place, event in enumerate(events) if event.kind == "begin"), len(events))
        self.run = run
        self.order: list[int] = [event.what for event in events[:begun] if event.kind == "op"]
        self.numbers = list(accumulate((run.operations[place].node for place in self.order), max))
        self.ahead: dict[UnitName, list[int]] = {}
        for place in self.order:
            self.ahead.setdefault(run.operations[place].unit, []).append(place)
        self.behind: dict[int, list[int]] = {}
        node = -1
        for event in events[begun:]:
            if event.kind == "begin":
                node = event.what
            elif event.kind == "op":
                self.behind.setdefault(node, []).append(event.what)

    def _of(self, node: int) -> int:
        """The first operation of the forward after which a node is there."""
        return self.order[min(bisect_left(self.numbers, node), len(self.order) - 1)]

    def part_of(self, node: int) -> UnitDirection:
        """The part that a node's backward belongs to."""
        return "backward", self.run.operations[self._of(node)].unit

    def node_as(self, first: _Parts, node: int, own: dict[int, int]) -> int:
        """The node that is what a node of the first recording is there, whose operations `own` maps to these."""
        place = first._of(node)
        return self.run.operations[own[place]].node + node - first.run.operations[place].node


def _name(run: ModelRecording, place: int) -> tuple[str, str, int]:
    operation = run.operations[place]
    return operation.name, operation.inside, len(operation.made)


def _repeated(names: Sequence[Sequence[Any]], part: UnitDirection) -> Repeated:
    """Where the names of longer recordings have more than the first has."""
    base = names[0]
    low, high = 0, len(base)
    for other in names:
        extra = len(other) - len(base)
        same = _alike(base, other)
        ending = _alike(base[::-1], other[::-1])
        if extra < 0 or same + ending < len(base) or (not extra and same < len(base)):
            begin = base[same][0] if same < len(base) else "the end"
            raise NotDescribed(f"its operations are others at another length, from {begin} in {named(part[1])} on")
        if extra:
            low, high = max(low, len(base) - ending), min(high, same)
    width = math.gcd(*(len(other) - len(base) for other in names))
    at = max((low + high + 1) // 2, low + width)
    if at > high:
        raise NotDescribed(f"the loop in {named(part[1])} has too few iterations that are alike")
    return Repeated(at, width)


def _alike(one: Sequence[Any], other: Sequence[Any]) -> int:
    """How many are the same from the first on."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (here, there) in pairs if here != there), min(len(one), len(other)))


def _as_first(first: ModelRecording, run: ModelRecording, own: dict[int, int]) -> ModelRecording:
    """A recording without what it has more, its storages numbered as the first's, whose operations `own` maps."""
    if len(run.operations) == len(first.operations) and all(one == other for one, other in own.items()):
        return run
    operations = [run.operations[own[place]] for place in range(len(first.operations))]
    known = min((storage for operation in first.operations for storage in operation.made), default=0)
    sizes = {storage: run.sizes[storage] for storage in range(known)}
    for here, operation in zip(first.operations, operations, strict=True):
        sizes |= {one: run.sizes[other] for one, other in zip(here.made, operation.made, strict=True)}
    return ModelRecording(operations=operations, sizes=sizes, weights=first.weights)


def looped(program: Program, longer: Program, base: tuple[int, int], point: tuple[int, int]) -> Program:
    """A unit's program of recordings at `base` (batch and length) and more, with its loop if it has one: lengthened to
    the batch and length of `point` it is the one recorded there, or NotDescribed is raised."""
    here, there = _valued(program, *point), _valued(longer, *point)
    extra, positions = len(there.steps) - len(here.steps), point[1] - base[1]
    if not extra and here == there:
        return program
    for loop in _loops(here, there, positions, base[1]) if extra > 0 else ():
        if lengthened(replace(here, loop=loop), point[1]) == there:
            if any(step.weight for step in here.steps[loop.first : loop.first + loop.steps]):
                raise NotDescribed("a linear module of it runs in every iteration of a loop")
            return replace(program, loop=loop)
    raise NotDescribed(f"its operations at length {point[1]} are not those at {base[1]} with more iterations of a loop")


def _loops(program: Program, longer: Program, positions: int, length: int) -> Iterator[Loop]:
    """Loops that may be what is repeated, the shortest iterations first, those in the middle first."""
    names, others = ([_kind(step) for step in one.steps] for one in (program, longer))
    extra = len(others) - len(names)
    high, low = _alike(names, others), len(names) - _alike(names[::-1], others[::-1])
    for more in range(min(extra, positions), 0, -1):
        if extra % more or positions % more:
            continue
        steps = extra // more
        places = sorted(range(max(low, 0), high - steps + 1), key=lambda at: abs(2 * at + steps - low - high))
        for window in WINDOWS:
            for first in places:
                if first >= window * steps:
                    yield Loop(first=first, steps=steps, positions=positions // more, length=length, window=window)


def _kind(step: Any) -> tuple[Any, ...]:
    return step.op, step.weight, len(step.new), len(step.gives), step.node is None


def _valued(program: Program, batch: int, length: int) -> Program:
    """A program with the bytes that its sizes are at one batch and length."""

    def value(size: ByteCount) -> float:
        return float(round(float(terms(size).at(batch, length))))

    whole = with_sizes(msgspec.to_builtins(program), value)
    for name in ("starts", "starts_back"):
        if isinstance(whole.get(name), tuple | list):
            whole[name] = round(float(Size(*whole[name]).at(batch, length)))
    return msgspec.convert(whole, Program)


def terms(size: ByteCount) -> Size:
    """A size of a description with all its terms."""
    return Size(size) if isinstance(size, float | int) else Size(*size)
