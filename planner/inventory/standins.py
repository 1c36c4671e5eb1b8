"""Operations of a described unit that a function stands in for: which they are, found by the weights among them and by
what reads their results.

Not here: what the functions keep and make (functions.py, fused.py), or playing them (played.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from planner.inventory.functions import MLP, OUT, QKV
from planner.spec import ModelSpec
from planner.spec.described import CAST, TOWER, ByteCount, Described, Step

ADAPTED = (QKV, OUT, MLP)
"""Linear modules that Axolotl's functions take with their adapters."""


class StandIn(NamedTuple):
    """A function in place of the steps that are `inner`, of these `weights`, played where step `first` is; `results`
    are the steps whose results it makes, in its order. Liger's functions read the places `reads`, and turned queries
    and keys need the storages `tables`."""

    weights: tuple[str, ...]
    first: int
    inner: frozenset[int]
    results: tuple[int, ...]
    part: str = "adapters"
    reads: tuple[int, ...] = ()
    tables: tuple[int, ...] = ()


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


LIGER_TYPES = ("exaone4", "gemma", "gemma3", "granite", "hunyuan_v1_dense", "ministral", "olmo2", "olmo3", "smollm3")
"""Types of imported models of which Liger-Kernel replaces every norm, gated MLP and turn of queries and keys (00eba63,
transformers/monkey_patch.py, MODEL_TYPE_TO_APPLY_LIGER_FN)."""


def has_liger(model: ModelSpec, parts: Sequence[str], numbers: str) -> bool:
    """Whether Liger-Kernel replaces these parts of an imported model, and their places are found in the programs of a
    number format. Under autocast of fp32 weights its results are narrower than those that the operations after them
    were recorded with."""
    if model.described is None or model.family not in LIGER_TYPES or numbers == "mixed":
        return False
    programs = (unit.programs for name, unit in model.described.units.items() if name != TOWER)
    return all(
        of_liger(program.steps, parts) is not None
        for some in programs
        for variant, program in some.items()
        if variant.startswith(f"{numbers}-")
    )


def of_liger(steps: Sequence[Step], parts: Sequence[str], places: int = 1) -> list[StandIn] | None:
    """Liger-Kernel's functions of these parts in place of RMSNorms, gated products and turned queries and keys; None
    where one of those is among the steps and is not what it stands in for."""
    made = _made(steps, places)
    found: list[StandIn | None] = []
    if "norm" in parts:
        found += [_norm(steps, made, place) for place, step in enumerate(steps) if step.op == "rsqrt"]
    if "mlp" in parts:
        found += [_gated(steps, made, place) for place, step in enumerate(steps) if step.weight == MLP[0]]
    if "rotary" in parts:
        found += [_turned(steps, made, place) for place, step in enumerate(steps) if step.op == "neg"]
    known = [one for one in found if one is not None]
    return known if len(known) == len(found) and all(_closed(steps, made, one) for one in known) else None


def _norm(steps: Sequence[Step], made: list[set[int | str | None]], root: int) -> StandIn | None:
    """An RMSNorm around its reciprocal root: square, mean, sum and product, with casts before and after, and the
    product with the weight, which other operations may have made of it."""
    first = root - 3
    if first < 0 or [step.op for step in steps[first : root + 2]] != ["pow", "mean", "add", "rsqrt", "mul"]:
        return None
    wide = first > 0 and steps[first - 1].op == CAST and made[first - 1] == _reads(steps[first])
    first -= wide
    inner, weights = set(range(first, root + 2)), set[int | str | None]()
    for place in range(root + 2, len(steps)):
        reads, own = _reads(steps[place]), {one for step in inner for one in made[step]}
        if (
            steps[place].op not in (CAST, "add", "mul")
            or not reads
            or any(isinstance(one, int) and one not in own for one in reads)
        ):
            return None
        inner.add(place)
        weights |= {one for one in reads if isinstance(one, str)}
        if len(reads) == 2:  # the normalised input and the weight
            break
    else:
        return None
    last = max(inner)
    if wide and steps[last].new == steps[first].new:  # multiplied before it is cast back
        last += 1
        if last == len(steps) or steps[last].op != CAST or _reads(steps[last]) != made[last - 1]:
            return None
        inner.add(last)
    read = _reads(steps[first])
    if len(weights) != 1 or len(read) != 1:
        return None
    return StandIn(tuple(map(str, weights)), first, frozenset(inner), (last,), "norm", _places(read))


def _gated(steps: Sequence[Step], made: list[set[int | str | None]], gate: int) -> StandIn | None:
    """An activation of the gate, and its product with what the module beside it makes."""
    up = next((place for place, step in enumerate(steps) if step.weight == MLP[1]), None)
    if up is None:
        return None
    way, inner = set(made[gate]), set[int]()
    for place in range(gate + 1, len(steps)):
        reads = _reads(steps[place])
        if not way & reads:
            continue
        inner.add(place)
        if made[up] & reads:
            return StandIn((), place, frozenset(inner), (place,), "mlp", (*_places(made[gate]), *_places(made[up])))
        way |= made[place]
    return None


def _turned(steps: Sequence[Step], made: list[set[int | str | None]], minus: int) -> StandIn | None:
    """x * cos + (-x2, x1) * sin, with the cast of a wider result."""
    first, last = minus - 3, minus + 3
    ops = ["mul", "slice", "slice", "neg", "cat", "mul", "add"]
    if first < 0 or [step.op for step in steps[first : last + 1]] != ops:
        return None
    read = _reads(steps[first])
    tables = [place for step in (steps[first], steps[last - 1]) if step.node for place in step.node.keeps]
    if len(read) != 1 or len(tables) != 2 or any(_reads(steps[place]) != read for place in (first + 1, first + 2)):
        return None
    inner, whole = set(range(first, last + 1)), tuple(map(_doubled, steps[minus].new))
    if steps[last].new != whole:  # wider tables, of which the result is cast back
        reading = [place for place in range(last + 1, len(steps)) if made[last] & _reads(steps[place])]
        if len(reading) != 1 or steps[reading[0]].op != CAST or steps[reading[0]].new != whole:
            return None
        last = reading[0]
        inner.add(last)
    return StandIn((), first, frozenset(inner), (last,), "rotary", _places(read), tuple(tables))


def _doubled(size: ByteCount) -> ByteCount:
    return 2 * size if isinstance(size, float) else tuple(2 * term for term in size)


def _closed(steps: Sequence[Step], made: list[set[int | str | None]], one: StandIn) -> bool:
    """Whether nothing beside a function's operations reads what they make on the way."""
    way = {place for step in one.inner for place in made[step]} - made[one.results[0]]
    return not any(way & _reads(step) for place, step in enumerate(steps) if place not in one.inner)


def _places(reads: set[int | str | None]) -> tuple[int, ...]:
    return tuple(one for one in reads if isinstance(one, int))


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
