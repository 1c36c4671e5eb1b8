"""At which lengths a model is recorded: multiples of the chunks that it works on, and enough iterations of its loops.

Not here: one recording (record.py), or what is made of several (recorded.py, loops.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import combinations, pairwise, starmap
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace
from torch import nn

from executor.worker.imported.apart import SpreadRecordings, spread_recordings
from executor.worker.imported.between import joined, takes_part
from executor.worker.imported.loops import aligned, looped
from executor.worker.imported.programs import UnitProgram
from executor.worker.imported.record import ModelRecording, NotDescribed, Place, UnitName, named, record
from executor.worker.imported.recorded import OtherWithoutGradients, Recorded
from executor.worker.imported.split import Point, SplitRecordings, split_recordings
from planner.spec.described import Program

PADS = tuple(2**power for power in range(3, 10))
"""Multiples that are tried beside those that a configuration names."""
MOST_PADDED = 1024
WINDOW = re.compile("window|attention_chunk")
"""Keys of a configuration that name how far attention sees."""
CHUNK = re.compile("^(?!num_).*(chunk|block)")
"""Keys of a configuration that may name a chunk."""
CHOSEN = re.compile("index_topk|indexer_budget")
"""Keys of a configuration that name how many positions attention chooses."""
FAR = 4000
"""Positions at which a model's sizes must still be those polynomials, or as many as it has."""
POSITIONS = ("max_position_embeddings", "max_seq_len", "n_positions")
"""Keys of a configuration that name how many positions a model has."""
DYNAMIC = "dynamic"
"""The kind of rotary positions that change where a sequence is longer than all before it."""
STRAIGHT, LOOPED = ((1, 2, 3), (2, 3, 4)), (4, 5, 6)
"""Steps of lengths: where the number of operations is the same at all (from one chunk on, or from two), and where it
grows."""
UNIT, UNIT_LOOPED = 32, 4
"""Positions of a step where nothing is padded; fewer where a loop may have an iteration for each."""
BEYOND, FAR_LOOPED = 9, 17
"""Steps of the length at which loops must be as foretold with gradients, and (sizes alone) without."""

LOOPS = "its loops over a sequence are not recorded over tensor ranks"


class OverPositions(NotDescribed):
    """A loop over single positions is not described, so nor is it at multiples that the configuration does not name."""


class RecordedLengths(NamedTuple):
    """What lengths must be a multiple of, the batches and lengths to record, and whether operations grow in number."""

    multiple: int
    points: tuple[Point, ...]
    loops: bool

    @property
    def shortest(self) -> int:
        """The fewest positions at which sizes are known: the first of those recorded, where anything is special."""
        first = self.points[0][1]
        return first if self.loops or self.multiple > 1 or first > STRAIGHT[1][0] * UNIT else 1

    def longest(self, config: Any) -> int:
        """The most positions at which sizes are known: the smallest window of a configuration that no recorded length
        is beyond, since attention has other masks there, or the end of its positions where these stretch. 0 without."""
        recorded = max(length for _, length, *_ in self.points)
        ends = re.compile(f"{WINDOW.pattern}|{'|'.join(POSITIONS)}") if _stretches(config) else WINDOW
        values = (value for key, value in vars(config).items() if ends.search(key) and type(value) is int)
        return min((value for value in values if value >= recorded), default=0)


def _stretches(config: Any) -> bool:
    return DYNAMIC in str(getattr(config, "rope_parameters", None))


def lengths_of(model: Any) -> RecordedLengths:
    """The lengths to record of a model: of the smallest multiple at which its forward's sizes are polynomials, so that
    those at three lengths foretell those at one far beyond them. Enter `fake_device` first."""
    runs = _Forwards(model)
    refusals: list[NotDescribed] = []

    def found(multiple: int, unit: int) -> RecordedLengths | None:
        try:
            return _lengths(runs, multiple, unit)
        except NotDescribed as error:
            refusals.append(error)
            return None

    config = model.config.get_text_config()
    named = _named_multiples(config)
    others = sorted({*PADS} - {*named})
    multiples = [*named, *others]
    chosen = _chosen(config)
    compressed = [(rate, one * least) for one in chosen for least, rate in combinations(_rates(config), 2)]
    steps = [(1, UNIT), *compressed, *((1, one) for one in chosen), *((one, one) for one in named)]
    best = next(filter(None, starmap(found, steps)), None)
    if best is None and not any(isinstance(one, OverPositions) for one in refusals):
        steps = [*((one, one) for one in others), *((1, one) for one in PADS[-2:])]
        best = next(filter(None, starmap(found, steps)), None)
    if best is None:
        raise refusals[0]
    while below := [one for one in multiples if one < best.multiple and best.multiple % one == 0]:
        smaller = found(max(below), max(below))
        if smaller is None:
            break
        best = smaller
    return best


def lengths_on_all(found: Sequence[RecordedLengths]) -> RecordedLengths:
    """The lengths at which the sizes of every device are known: those of the largest multiple, where it is one of the
    others too, as kernels of attention pad on a GPU alone."""
    widest = max(found, key=lambda one: one.multiple)
    for one in found:
        if widest.multiple % one.multiple or one.loops != widest.loops or one.points[:-1] != widest.points[:-1]:
            raise NotDescribed("its lengths are others on a CPU than on a GPU")
    return widest


def _chosen(config: Any) -> list[int]:
    """How many positions attention chooses: longer sequences are of another kind."""
    values = (value for key, value in vars(config).items() if CHOSEN.search(key) and type(value) is int)
    return [value for value in values if value > UNIT]


def _rates(config: Any) -> list[int]:
    """How many positions a configuration's layers compress into one, of which attention then chooses."""
    found = getattr(config, "compress_rates", None)
    return sorted(set(found.values())) if isinstance(found, dict) else []


def _named_multiples(config: Any) -> list[int]:
    """Numbers of a configuration that may be chunks of its layers."""
    values = {value for key, value in vars(config).items() if CHUNK.search(key) and type(value) is int}
    return sorted(value for value in values if 1 < value <= MOST_PADDED)


class _Forwards:
    """Recordings of a model's forward by length, each made once."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.found: dict[int, ModelRecording] = {}
        named = (getattr(model.config.get_text_config(), key, None) for key in POSITIONS)
        self.positions = min((one for one in named if type(one) is int and one > 0), default=FAR)

    def at(self, length: int) -> ModelRecording:
        """The recording at a length."""
        if length not in self.found:
            self.found[length] = record(self.model, 2, length, autocast=False, forgets=True)
        return self.found[length]

    def count(self, length: int) -> int:
        """Operations at a length."""
        return len(self.at(length).operations)

    def foretell(self, lengths: Sequence[int], far: int) -> None:
        """Raise NotDescribed where sizes at three lengths do not foretell those at one far beyond."""
        runs = aligned([self.at(length) for length in (*lengths, far)]).runs
        sizes = np.array([[one.bytes for op in run.operations for one in op.results] for run in runs], float)
        powers = np.array([[1.0, length / far, (length / far) ** 2] for length in (*lengths, far)])
        if not np.allclose(powers[3] @ np.linalg.solve(powers[:3], sizes[:3]), sizes[3], rtol=1e-6, atol=0.5):
            raise NotDescribed(f"its sizes at {lengths} positions do not foretell those at {far}")


def _lengths(runs: _Forwards, multiple: int, unit: int) -> RecordedLengths:
    count = runs.count(2 * unit)
    within = max(runs.positions, BEYOND * UNIT)
    if all(runs.count(one * unit) == count for one in (3, 4, BEYOND) if one * unit <= within or unit == multiple):
        lengths = [unit * one for one in STRAIGHT[runs.count(unit) != count]]
        far = multiple * max(min(FAR, runs.positions) // multiple, BEYOND)
        far = far if far > lengths[-1] else lengths[-1] + multiple * (unit // 2 // multiple + 1)
        far -= multiple * (far // multiple % 2 == 0 and far > multiple * BEYOND)
        runs.foretell(lengths, far)
        return RecordedLengths(multiple, _points(lengths, far), False)
    unit = UNIT_LOOPED if unit == UNIT else unit
    lengths = [unit * one for one in LOOPED]
    if not all(runs.count(one) < runs.count(other) for one, other in pairwise(lengths)):
        raise NotDescribed(f"its operations at {lengths} positions do not grow in number with the length")
    try:
        runs.foretell(lengths, unit * FAR_LOOPED)
    except NotDescribed as error:
        of_positions = (multiple, unit) == (1, UNIT_LOOPED)
        raise (OverPositions if of_positions else NotDescribed)(str(error)) from None
    return RecordedLengths(multiple, _points(lengths, unit * BEYOND), True)


def _points(lengths: Sequence[int], far: int) -> tuple[Point, ...]:
    return (*((batch, length) for length in lengths for batch in (2, 3)), (4, far))


class Recordings(NamedTuple):
    """All that is recorded of a model in one number format: with gradients at every point, with frozen weights at the
    first, and both at the last, beyond the others; and of one of several ranks that its experts are dealt to."""

    every: Recorded
    frozen: Recorded | None
    far: tuple[Recorded, Recorded | None] | None
    spread: SpreadRecordings

    def program(
        self, unit: str, places: dict[str, UnitName], names: dict[str, dict[str, str]]
    ) -> tuple[UnitProgram, Program]:
        """The program of a unit, with what it was made of. By unit, `places` say where it was recorded and `names` are
        those of its weights by their names in the model."""

        def made_of(every: Recorded, frozen: Recorded | None) -> tuple[UnitProgram, Program]:
            made = UnitProgram(every, places[unit], names[unit], frozen)
            program = made.made()
            outside = tuple(_place_of(every, *one, places, names) for one in made.outside)
            return made, replace(program, outside=outside)

        made, program = made_of(self.every, self.frozen)
        if self.far is None:
            return made, program
        longer = made_of(*self.far)[1]
        (batch, seq), far = self.every.points[0], self.far[0].points[0]
        return made, looped(program, longer, (batch, seq), (far[0], far[1]))

    def programs_apart(self, at: UnitName, names: dict[str, str]) -> dict[str, Program]:
        """Programs of a layer with experts on one of several ranks that these are dealt to, by number format."""
        every = {name: UnitProgram(one, at, names, None) for name, one in self.spread.every.items()}
        programs = {name: one.made() for name, one in every.items()}
        if any(one.outside for one in every.values()):
            raise NotDescribed(f"{named(at)} reads what another layer made, and its experts are dealt to ranks")
        return programs


def _place_of(
    every: Recorded, unit: UnitName, place: Place, places: dict[str, UnitName], names: dict[str, dict[str, str]]
) -> tuple[str, int]:
    """A place in the graph as the program of the unit that made it numbers it."""
    name = next((name for name, at in places.items() if at == unit), "")
    if name:
        made = UnitProgram(every, unit, names[name], None)
        made.made()  # which numbers its places
        if place in made.places:
            return name, made.places[place]
    raise NotDescribed(f"what {named(unit)} made is read beside the layer after it")


def recordings(model: Any, lengths: RecordedLengths, *, autocast: bool, experts: bool = False) -> Recordings:
    """Recordings of a model, whose weights are frozen then, but the token table. Those with `experts` are dealt to
    ranks where nothing is done under autocast, since FSDP2 is there then."""
    first, last = lengths.points[0], lengths.points[-1]
    chosen = _choices(model)
    record(model, *first, autocast=autocast, gradients=False)  # what it changes once, it has changed then
    if other := next((key for key, value in _choices(model).items() if chosen.get(key) != value), None):
        raise NotDescribed(f"it chooses by the length of its sequences ({other})")
    runs = [record(model, *point, autocast=autocast) for point in lengths.points]
    between = len(first) == 2 and takes_part(runs[0])

    def again(point: Point, **how: bool) -> ModelRecording:
        run = record(model, *point, autocast=autocast, **how)
        return joined(run) if between else run

    if between:
        runs = list(map(joined, runs))
    split = SplitRecordings(LOOPS) if lengths.loops else split_recordings(model, lengths.points, runs, again)
    far = None
    try:
        every = Recorded(runs, again(first, gradients=False), lengths.points, split=split)
        if lengths.loops:
            far = Recorded(runs[-1:], again(last, gradients=False), (last,))
    except OtherWithoutGradients:
        every = Recorded(runs, again(first, forgets=True), lengths.points, split=split)
        if lengths.loops:
            far = Recorded(runs[-1:], again(last, forgets=True), (last,))
    spread = SpreadRecordings({})
    if experts and not autocast:
        spread = spread_recordings(model, lengths.points, lengths.loops, again)
    frozen = _frozen(every, model, again)
    return Recordings(every, frozen, None if far is None else (far, _frozen(far, model, again)), spread)


def _choices(model: nn.Module) -> dict[str, str]:
    """Settings of modules that are text, such as the attention implementation."""
    return {
        f"{name}.{key}".removeprefix("."): value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, str)
    }


def _frozen(every: Recorded, model: Any, again: Callable[[Point], ModelRecording]) -> Recorded | None:
    """One more recording, of the same model with all its weights frozen but the token table; None where it computes
    otherwise then, as torch.matmul does."""
    table = model.get_input_embeddings().weight
    for weight in model.parameters():
        weight.requires_grad_(weight is table)
    point = every.points[0]
    one = again(point)
    names = [[op.name for op in run.operations[: every.forward]] for run in (one, every.base)]
    if names[0] != names[1]:
        return None
    return Recorded([one], every.plain, (point,), like=every)
