"""Towers as they run on images, and what the model's own units do where its sequences have some.

No gradient goes into a frozen tower, and autograd keeps nothing of it: its bytes over time are all that there is to
know. Not here: towers that train (trained.py), what a model is given of images (pictures.py), or units with text alone
(describe.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from executor.worker.imported.lengths import RecordedLengths, recordings
from executor.worker.imported.levels import Solved, highest, levels, watched
from executor.worker.imported.operations import ATTENTION, PRODUCTS, UnitProducts, bytes_of, columns
from executor.worker.imported.pictures import Pictures, pictures_of, tensors_of
from executor.worker.imported.record import (
    CodeFails,
    ModelRecording,
    NotDescribed,
    UnitName,
    fake_device,
)
from executor.worker.imported.trained import training_of
from executor.worker.model.layers import can_recompute, decoder_config
from planner.spec.described import (
    BETWEEN,
    TOWER,
    DescribedUnit,
    Linear,
    OtherProduct,
    Program,
    TowerAttention,
    TowerProgram,
    Towers,
)

POSITIONS = (12, 24, 36, 20)
"""Positions of images that towers without a fixed size are recorded at; the last ones are foretold."""
IMAGES = (1, 2, 3, 5)
"""Images of those of one size. Of a single one other operations sum the gradient of its places."""
BESIDE_TEXT = (12, 8, 24)
"""Positions of images a sequence at the first lengths, at one more, and at the last, which is foretold."""

Formats = Mapping[str, tuple[torch.dtype, bool]]


class Tower(NamedTuple):
    """What is recorded of a model's towers in one number format: their program, products and attention, and the bytes
    of what they are given."""

    program: TowerProgram
    products: tuple[OtherProduct, ...]
    attention: tuple[TowerAttention, ...]
    given_bytes: Linear


class SeenOnDevice(NamedTuple):
    """What is recorded of a model with images on one kind of device: its towers and the model's units by number format,
    and the units' attention and products."""

    towers: dict[str, Tower]
    units: dict[str, dict[str, Program]]
    beside: dict[str, UnitProducts]


class Small(NamedTuple):
    """The small model that is recorded: how it is built in a number format, the lengths of its recordings with text
    alone, which of its layers each kind is, the names of its units' weights, and the units with weights of experts."""

    build: Callable[..., Any]
    lengths: RecordedLengths
    spots: Mapping[str, int]
    names: Callable[[Any, Mapping[str, int]], dict[str, dict[str, str]]]
    experts: Collection[str]


def seen_on(small: Small, formats: Formats, between: bool, device: str) -> SeenOnDevice:
    """Recordings of a small model with images on a kind of device, in each number format that its code takes."""
    spots: dict[str, UnitName] = {"embed": ("embed", 0), "tail": ("tail", 0)}
    spots |= {kind: ("layer", place) for kind, place in small.spots.items()}
    spots |= {BETWEEN: ("gap", 0)} if between else {}
    units: dict[str, dict[str, Program]] = {unit: {} for unit in spots}
    towers: dict[str, Tower] = {}
    beside: dict[str, UnitProducts] = {}
    for variant, (dtype, autocast) in formats.items():
        with fake_device(cuda=device == "cuda"):
            model = small.build(dtype)
            try:
                trained = list(small.names(model, small.spots)[TOWER]) if variant != "adapted" else ()
                tower = tower_of(model, trained, autocast=autocast, checks=not towers)
                runs = recordings(model, with_images(small.lengths), autocast=autocast)
            except CodeFails as error:
                failed = error  # of a number format that its code does not take
                continue
            names = small.names(model, small.spots) | {BETWEEN: {}}
        towers[f"{variant}-{device}"] = tower
        for unit in spots:
            made, units[unit][f"{variant}-{device}"] = runs.program(unit, spots, names)
            beside.setdefault(unit, made.products(experts=unit in small.experts))
    if not towers:
        raise failed
    return SeenOnDevice(towers, units, beside)


def with_images(lengths: RecordedLengths) -> RecordedLengths:
    """The lengths to record a model at whose sequences have images: those without, and one more number of images."""
    *few, last = lengths.points
    some, other, most = BESIDE_TEXT
    points = (*((*point, some) for point in few), (*few[0], other), (*last, most))
    return lengths._replace(points=points)


def tower_of(model: Any, order: Sequence[str], *, autocast: bool, checks: bool) -> Tower:
    """A model's towers: all figures are linear in images' positions, by two recordings, exact at two more. They are
    frozen, and trained as well where the `order` of their weights is given, exact at one more where that `checks`."""
    pictures = pictures_of(model.config)
    assert pictures is not None
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    for weight in weights:
        weight.requires_grad_(False)
    runs, positions, held, given, every = [], [], [], [], []
    precision = partial(torch.autocast, "cpu", torch.bfloat16) if autocast else nullcontext
    for count in IMAGES if pictures.per_image else POSITIONS:
        images, each = (count, pictures.per_image) if pictures.per_image else (1, count)
        inputs = pictures.made(images, each)
        every.append(inputs)
        runs.append(_run(model, inputs, precision()))
        positions.append(images * each)
        given.append(sum(one.nbytes for one in tensors_of(inputs)))
        held.append(_held(runs[-1]))
    for weight in weights:
        weight.requires_grad_(True)
    names = [[op.name for op in run.operations] for run in runs]
    if any(one != names[0] for one in names):
        raise NotDescribed("its towers do other operations for other images")
    solve = Solved(positions)
    moments = {solve.of([series[place] for series in held]) for place in range(len(held[0]))}
    counted = [i for i, op in enumerate(runs[0].operations) if _counts(op)]
    moved = [float(sum(sum(bytes_of(run.operations[i])) for i in counted)) for run in runs]
    trained = again = None
    if order:
        few = slice(1, None if checks else 3)
        passes = partial(training_of, model, every[few], positions[few], order, precision)
        trained = passes(again=False)
        again = passes(again=True) if can_recompute(model) else None
    program = TowerProgram(
        moments=highest(moments), left=solve.of([series[-1] for series in held]), moved=solve.of(moved),
        starts=len(counted), trained=trained, again=again,
    )  # fmt: skip
    return Tower(program, _products(runs, solve), _attention(runs[0], pictures), solve.of(given))


def _run(model: Any, inputs: dict[str, Any], precision: AbstractContextManager[Any]) -> ModelRecording:
    with watched(model, inputs) as recorder, precision:
        kept = model.get_image_features(**inputs)
    del kept
    return recorder.found


def _held(run: ModelRecording) -> list[int]:
    """Bytes that are held as each operation ends, and at the end."""
    every = list(levels(run))
    return [*(held for event, held in every if event.kind == "op"), every[-1][1]]


def _counts(op: Any) -> bool:
    """Whether an operation only moves bytes."""
    fused = op.name in PRODUCTS or op.name.startswith(ATTENTION)
    return bool(op.made or op.name.endswith("_")) and not fused


def _products(runs: Sequence[ModelRecording], solve: Solved) -> tuple[OtherProduct, ...]:
    found: Counter[tuple[Any, int, int]] = Counter()
    for index, op in enumerate(runs[0].operations):
        if op.name in PRODUCTS:
            n, k = columns(op)
            size = [float(np.prod(run.operations[index].results[0].shape)) / n for run in runs]
            found[solve.of(size), n, k] += 1
    return tuple(OtherProduct((rows[0], 0.0, rows[1]), n, k, float(times)) for (rows, n, k), times in found.items())


def _attention(run: ModelRecording, pictures: Pictures) -> tuple[TowerAttention, ...]:
    calls = Counter((op.inputs[0].shape[1], op.inputs[0].shape[3]) for op in run.operations if ATTENTION in op.name)
    narrow, window = pictures.windows
    found = []
    for (heads, width), times in calls.items():
        apart = min(narrow, times)
        found += [TowerAttention(heads, width, times - apart)] if times > apart else []
        found += [TowerAttention(heads, width, apart, window)] if apart else []
    return tuple(found)


def with_layers_between(config: Any, small: Small, few: Callable[[Sequence[int]], Any]) -> tuple[Small, int]:
    """The small model of `config` with what is done between its first layers, of which it has two more then; and
    between how many layers of the whole model that is. `few` builds a model of some of its layers."""
    between = len(getattr(config.vision_config, "deepstack_visual_indexes", None) or ())
    if not between:
        return small, 0
    if len(small.spots) > 1:
        raise NotDescribed("images' features are added between layers of several kinds")
    (kind,) = small.spots
    layers = decoder_config(config).num_hidden_layers
    if between >= layers:
        raise NotDescribed(f"it has {layers} layers, and adds images' features after {between}")
    count = min(layers, between + 3)
    return small._replace(build=few(range(count)), spots={kind: min(between + 1, count - 1)}), between


def seeing(
    config: Any, small: Small, few: Callable[[Sequence[int]], Any], formats: Formats, on_each: Callable[[Any], Any],
    plain: Mapping[str, DescribedUnit],
) -> tuple[Towers, dict[str, DescribedUnit]]:  # fmt: skip
    """A model's towers, and its units that images change: those that are not as in `plain`. `on_each` calls what it is
    given on every kind of device."""
    pictures = pictures_of(config)
    if pictures is None:
        raise NotDescribed(f"how {config.model_type} is given images is not known")
    if small.lengths.loops:
        raise NotDescribed("the loops of its layers are not described with images")
    small, between = with_layers_between(config, small, few)
    seen: list[SeenOnDevice] = on_each(partial(seen_on, small, formats, between > 0))
    first, lengths = seen[0], small.lengths
    tower = next(iter(first.towers.values()))
    towers = Towers(
        patches=pictures.patches,
        per_image=pictures.per_image,
        given_bytes=tower.given_bytes,
        beside_bytes=float(sum(one.nbytes for one in tensors_of(pictures.beside(1, 1)))),
        programs={name: one.program for each in seen for name, one in each.towers.items()},
        products=tower.products,
        attention=tower.attention,
        between=between,
        shortest=lengths.shortest,
        longest=lengths.longest(decoder_config(config)),
    )
    if towers.programs.keys() != plain["tail"].programs.keys():
        raise NotDescribed("its code does not run with images in all of its number formats")
    changed: dict[str, DescribedUnit] = {}
    for unit in first.units:
        programs = {name: one for each in seen for name, one in each.units[unit].items()}
        if unit not in plain or programs != plain[unit].programs:
            fused, others, scores = first.beside[unit]
            changed[unit] = DescribedUnit(
                weights=(), programs=programs, attention=fused, products=others, scores=scores
            )
    return towers, changed
