"""Programs whose loop over a sequence is made longer: one iteration is repeated, and what refers to it follows.

Not here: what a program holds (described.py), or where its loop is found (executor/worker/imported/loops.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from planner.spec.described import AutogradStep, BackwardStep, Give, Loop, Program, StandsFor, Step

T = TypeVar("T")


class Range(NamedTuple):
    """Numbers of the storages, or of the places in the graph, that the repeated iteration makes: from `begin` to before
    `end`. `more` iterations like it follow."""

    begin: int
    end: int
    more: int

    def moved(self, number: int, reach: int | None, copy: int) -> list[int]:
        """What stands for a number after the repeated iteration. From `reach` on it belongs to iterations of which
        each has its own, and moves with the `copy`; other numbers of the repeated iteration stand for all of them."""
        width = self.end - self.begin
        if reach is not None and number >= reach:
            return [number + copy * width]
        if number >= self.end:
            return [number + self.more * width]
        if reach is None and number >= self.begin:
            return [number + each * width for each in range(self.more + 1)]
        return [number]

    def is_repeated(self, number: int | str | None) -> bool:
        """Whether the repeated iteration made it."""
        return isinstance(number, int) and self.begin <= number < self.end

    def is_later(self, number: int | str | None) -> bool:
        """Whether something after the repeated iteration made it."""
        return isinstance(number, int) and number >= self.end

    def is_earlier(self, number: int | str | None) -> bool:
        """Whether the iteration before the repeated one made it."""
        return isinstance(number, int) and 2 * self.begin - self.end <= number < self.begin


MOST = 12
"""Iterations that are added to a program one by one: of more, one in the middle stands for all that are beyond."""


def lengthened(program: Program, length: int, *, most: int = 0) -> Program:
    """A program at `length` positions, or as few more as its loop takes for a whole number of iterations. Of more than
    `most` of these (0: without end) one stands for the others (Step.alike)."""
    loop = program.loop
    more = 0 if loop is None else -((loop.length - length) // loop.positions)
    if loop is None or more <= 0:
        return replace(program, loop=None)
    beyond = max(0, more - most) if most else 0
    return _Longer(program, loop, more - beyond, beyond).made()


class _Longer:
    """Repeats the iteration of a program's loop."""

    def __init__(self, program: Program, loop: Loop, more: int, beyond: int) -> None:
        self.beyond = beyond
        storages, places = 0, 1
        self.at: list[tuple[int, int]] = []
        for step in program.steps:
            self.at.append((storages, places))
            storages += len(step.new) + bool(step.weight)
            places += len(step.gives)
        self.at.append((storages, places))
        begin, end = self.at[loop.first], self.at[loop.first + loop.steps]
        self.program, self.loop, self.more = program, loop, more
        self.storages, self.places = (Range(one, other, more) for one, other in zip(begin, end, strict=True))

    def made(self) -> Program:
        """The longer program."""
        loop, steps = self.loop, self.program.steps
        after = loop.first + loop.steps
        near = after + loop.window * loop.steps
        body = steps[loop.first : after]
        copies = [self._relative(step, 0, copy) for copy in range(1, self.more + 1) for step in body]
        if self.beyond:
            begin = loop.steps * (self.more // 2 - 1)
            copies[begin : begin + loop.steps] = self._alike(copies[begin : begin + loop.steps], self.more // 2)
        following = [
            self._relative(step, 1 + place // loop.steps, self.more) for place, step in enumerate(steps[after:near])
        ]
        later = [self._step(step, None, None, 0) for step in steps[near:]]
        whole = self.storages
        return replace(
            self.program,
            steps=(*steps[:after], *copies, *following, *later),
            output=self.places.moved(self.program.output, None, 0)[-1],
            shared=_listed(self.program.shared, whole, None, 0),
            returned=_listed(self.program.returned, whole, None, 0),
            held=_listed(self.program.held, whole, None, 0),
            loop=None,
        )

    def _alike(self, body: Sequence[Step], copy: int) -> list[Step]:
        """The steps of a copy that stands for the iterations `beyond` too."""
        begin, end, _ = self.storages
        width = end - begin
        begin, reach = begin + copy * width, begin + (copy - self.loop.window) * width
        ended = {(one - reach) % width for step in body for one in step.ends if one >= reach}
        found, storage = [], begin
        for step in body:
            made = range(storage, storage + len(step.new))
            storage += len(step.new)
            stays = tuple(one for one in made if (one - reach) % width not in ended)
            found.append(replace(step, alike=StandsFor(self.beyond, reach, width, stays)))
        return found

    def _relative(self, step: Step, later: int, copy: int) -> Step:
        """A step of the repeated iteration, or of one `later`, for its `copy`."""
        back = self.loop.window - later
        storage, place = (one.begin - back * (one.end - one.begin) for one in (self.storages, self.places))
        return self._step(step, storage, place, copy)

    def _step(self, step: Step, storage: int | None, place: int | None, copy: int) -> Step:
        def node(found: AutogradStep | None) -> AutogradStep | None:
            return None if found is None else self._node(found, storage, place, copy)

        gives = tuple((self.storages.moved(at, storage, copy)[-1], part) for at, part in step.gives)
        ends = _listed(step.ends, self.storages, storage, copy)
        return replace(step, gives=gives, ends=ends, node=node(step.node), frozen=node(step.frozen))

    def _node(self, node: AutogradStep, storage: int | None, place: int | None, copy: int) -> AutogradStep:
        keeps = _listed(node.keeps, self.storages, storage, copy)
        if place is not None or not any(self.places.is_repeated(one) for one in node.reads):
            reads = tuple(
                self.places.moved(one, place, copy)[-1] if isinstance(one, int) else one for one in node.reads
            )
            return replace(node, reads=reads, keeps=keeps)
        numbered = _repeated(list(enumerate(node.reads)), lambda one: one[1], self.places)
        reads = tuple(self._read(one, turn) for (_, one), turn in numbered)
        edges = {(old, turn): new for new, ((old, _), turn) in enumerate(numbered)}

        def read_by(item: BackwardStep) -> int | str | None:
            return node.reads[item.edge] if isinstance(item, Give) else None

        back = tuple(
            Give(edges[item.edge, turn], item.storage) if isinstance(item, Give) else item
            for item, turn in _repeated(node.back, read_by, self.places)
        )
        return replace(node, reads=reads, keeps=keeps, back=back)

    def _read(self, one: int | str | None, turn: int) -> int | str | None:
        if not isinstance(one, int):
            return one
        return self.places.moved(one, None, 0)[turn]


def _listed(numbers: Sequence[int], made: Range, reach: int | None, copy: int) -> tuple[int, ...]:
    if reach is not None:
        return tuple(made.moved(one, reach, copy)[-1] for one in numbers)
    return tuple(made.moved(one, None, 0)[turn] for one, turn in _repeated(numbers, lambda one: one, made))


def _repeated(items: Sequence[T], number_of: Callable[[T], int | str | None], made: Range) -> list[tuple[T, int]]:
    """A list in which neighbours that refer to the repeated iteration come once for it and for each that follows it,
    with the number of that; backwards where the list goes from later iterations to earlier ones."""
    numbers = [number_of(item) for item in items]
    found: list[tuple[T, int]] = []
    place = 0
    while place < len(items):
        end = place
        while end < len(items) and made.is_repeated(numbers[end]):
            end += 1
        if end == place:
            found.append((items[place], 0))
            place += 1
            continue
        before = numbers[place - 1] if place else None
        after = numbers[end] if end < len(items) else None
        backwards = made.is_later(before) or (before is None and made.is_earlier(after))
        turns = range(made.more, -1, -1) if backwards else range(made.more + 1)
        found += [(item, turn) for turn in turns for item in items[place:end]]
        place = end
    return found
