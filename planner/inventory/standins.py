"""Operations of a described unit that a function stands in for: which they are, found by the names of the linear
modules among them and by what reads their results.

Not here: what the functions keep and make (functions.py), or playing them (played.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from planner.inventory.functions import MLP, OUT, QKV
from planner.spec.described import Described, Step

ADAPTED = (QKV, OUT, MLP)
"""Linear modules that Axolotl's functions take with their adapters."""


class StandIn(NamedTuple):
    """A function in place of the steps from `first` on that are `inner`, of these `weights`; `results` are the steps
    whose results it makes, in its order."""

    weights: tuple[str, ...]
    first: int
    inner: frozenset[int]
    results: tuple[int, ...]


def stand_in(steps: Sequence[Step], names: tuple[str, ...], places: int = 1) -> StandIn | None:
    """A function of these linear modules among steps of which the first makes the place `places` in the graph; None
    where they are not there once each, read other inputs, or something else reads what they make on the way."""
    at = [place for place, step in enumerate(steps) if step.weight in names]
    if sorted(steps[place].weight for place in at) != sorted(names):
        return None
    modules = {steps[place].weight: place for place in at}
    inputs = [_reads(steps[modules[name]]) for name in names]
    first = min(at)
    if names != MLP:
        same = all(one == inputs[0] for one in inputs)
        return StandIn(names, first, frozenset(at), tuple(modules[name] for name in names)) if same else None
    *sources, last = (modules[name] for name in names)
    if inputs[0] != inputs[1] or last != max(at):
        return None
    made = _made(steps, places)
    inner = set(sources)
    way = {one for place in sources for one in made[place]}
    for place in range(first + 1, last + 1):
        if way & _reads(steps[place]):
            inner.add(place)
            way |= made[place] if place != last else set()
    beside = (step for place, step in enumerate(steps) if place not in inner)
    unseen = any(steps[place].node is None and steps[place].new for place in range(first, last))
    if last not in inner or unseen or any(way & _reads(step) for step in beside):
        return None
    return StandIn(names, first, frozenset(inner), (last,))


def has_stand_ins(described: Described, weights: Sequence[str]) -> bool:
    """Whether each function that takes some of these weights, by their last names, is found wherever a layer has its
    modules."""
    taken = [names for names in ADAPTED if all(name.rpartition(".")[2] in weights for name in names)]
    return all(
        stand_in(program.steps, names) is not None
        for unit in described.units.values()
        for names in taken
        if set(names) <= {one.name for one in unit.weights}
        for program in unit.programs.values()
    )


def _reads(step: Step) -> set[int | str | None]:
    return set() if step.node is None else set(step.node.reads) - {None}


def _made(steps: Sequence[Step], places: int) -> list[set[int | str | None]]:
    """The places in the graph that each step makes."""
    made: list[set[int | str | None]] = []
    for step in steps:
        count = 1 if step.weight else len(step.gives)
        made.append(set(range(places, places + count)))
        places += count
    return made
