"""One phase of one layout at its fullest moment: every byte by term, unit and formula, and what would make it smaller.

Not here: all phases side by side (explanation.py), other layouts (levers.py), or the words (views/phase.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from planner.ask.question import Question
from planner.basics.errors import PlannerError, did_you_mean
from planner.basics.formula import FormulaCall, Noted, trace
from planner.decide.explanation import as_dict, folded
from planner.decide.levers import PEAK, Lever, levers
from planner.engines import engine_of
from planner.engines.base import Held
from planner.figures.allocator import parts_beside
from planner.figures.memory import (
    BATCH_BYTES_PER_TOKEN,
    TERMS,
    memory_breakdown,
    moment_total,
    moments_of,
    others_in_flight,
)
from planner.inventory import TERMS as WALK_TERMS
from planner.inventory import Moment, Size, is_layer, walk
from planner.parallelism.case import Case
from planner.spec.described import TOWER

SCHEMA = "explain-phase/1"

SHARED, AT_WORK, IN_FLIGHT, BATCH = "all units", "at work", "in flight", "batch"
"""Units of a part beside the model's own: bytes that no unit needs for itself alone, tensors of the unit whose
operation runs and of the model's ends, other micro-batches' activations, token ids and labels."""

ALIKE = 1e-9
"""Relative difference of two sums that is rounding."""


class Part(msgspec.Struct, frozen=True):
    """Bytes of one term that one unit of the model needs at the moment, on one rank.

    Either the engine holds them: `formulas` gave them, of all `elements` elements of the unit's weights. Or they are
    tensors of the model code: `count` times a polynomial in the micro-batch's tokens, a sequence's positions and pairs
    of tokens.
    """

    term: str
    unit: str
    bytes: float
    elements: float = 0.0
    formulas: tuple[str, ...] = ()
    count: float = 1.0
    bytes_per_token: float = 0.0
    bytes_per_position: float = 0.0
    fixed_bytes: float = 0.0
    bytes_per_pair: float = 0.0


class PhaseExplanation(msgspec.Struct, frozen=True):
    """The fullest moment of `phase`, which is on pipeline stage `stage` at `place` in the model code.

    `parts` add up to `total_bytes`, the largest first; `beside` is what allocator and device have on top of so much
    (allocator.parts_beside). `formulas` are the calls that the engine's parts come from.
    `levers` need less in this phase: first those that train the same and are launched, the one that saves most first.
    """

    phase: str
    stage: int
    place: str
    total_bytes: float
    tokens: float
    positions: float
    parts: tuple[Part, ...]
    formulas: tuple[FormulaCall, ...]
    levers: tuple[Lever, ...] = ()
    beside: dict[str, float] = {}


def explain_phase(question: Question, case: Case, phase: str = PEAK) -> PhaseExplanation:
    """Derive one phase's bytes, or the fullest phase's for "peak", and find the options that make it smaller.

    Raises PlannerError where the layout has no such phase.
    """
    found = derived(case, phase)
    smaller = sorted(
        levers(question, case, phase),
        key=lambda lever: (not (lever.same_training and lever.launchable), -lever.saved_bytes),
    )
    return msgspec.structs.replace(found, levers=tuple(smaller))


def derived(case: Case, phase: str) -> PhaseExplanation:
    """One phase's bytes, without levers."""
    memory = memory_breakdown(case)
    there = {one.phase for stage in memory.stages for one in stage.phases}
    if phase not in (PEAK, *there):
        raise PlannerError("phase", phase, "is not a phase of this layout", did_you_mean(phase, {PEAK, *there}))
    name = memory.peak.phase if phase == PEAK else phase
    at, here, place, total = max(_moments(case, name), key=lambda one: one[-1])
    with trace(name, notes=True) as tree:
        _, held, moment = list(moments_of(here))[at]
    parts = [*_held_parts(here, at, held), *(() if moment is None else _walked_parts(here, name, moment))]
    named = {formula for part in parts for formula in part.formulas}
    return PhaseExplanation(
        phase=name,
        stage=int(here.here.place),
        place=place,
        total_bytes=total,
        tokens=float(here.tokens),
        positions=float(here.rank_seq_len),
        parts=tuple(sorted((part for part in parts if part.bytes), key=lambda part: -part.bytes)),
        formulas=tuple(step for step, _ in folded(tree.steps) if step.name in named),
        beside={part: float(size) for part, size in parts_beside(case, total).items()},
    )


def as_json_object(found: PhaseExplanation) -> dict[str, Any]:
    """The moment's parts, levers and formulas."""
    whole: dict[str, Any] = msgspec.structs.asdict(found)
    return {"schema": SCHEMA} | whole | {"formulas": [as_dict(step) for step in found.formulas]}


def _moments(case: Case, phase: str) -> Iterator[tuple[int, Case, str, float]]:
    """(index among its stage's moments, case of the stage, place in the model code, bytes) of a phase's moments."""
    for here in map(case.at, case.stages()):
        for at, (name, held, moment) in enumerate(moments_of(here)):
            if name == phase:
                yield at, here, _place(moment), float(moment_total(here, held, moment))


def _place(moment: Moment | None) -> str:
    if moment is None:
        return "outside the model code"
    return f"{moment.unit} {moment.layer}" if moment.layer >= 0 else moment.unit


# -- what the engine holds -------------------------------------------------------------------------------------------


def _held_parts(case: Case, at: int, held: Held) -> Iterator[Part]:
    """Each term that the engine holds, over the units whose weights it is of.

    A unit's share is what the term grows by when the unit's weights are there twice. Where shares do not add up to the
    term (a bucket of fixed size, the largest of several), the rest is of all units.
    """
    there = [unit for unit in case.units() if case.units()[unit] and case.repeats(unit)]
    twice = {unit: list(moments_of(msgspec.structs.replace(case, twice=unit)))[at][1] for unit in there}
    for term in TERMS:
        total = float(held.get(term, 0.0))
        if not total:
            continue
        noted = held[term]
        names = noted.formulas if isinstance(noted, Noted) else ()
        shares = {unit: float(more.get(term, 0.0)) - total for unit, more in twice.items()}
        rest = total - sum(shares.values())
        if rest < -ALIKE * total:  # more than there is: no sum of units
            shares, rest = {}, total
        for unit, share in shares.items():
            elements = float(case.repeats(unit) * case.elements(unit))
            yield Part(term, unit, share, elements, names)
        if rest > ALIKE * total:
            yield Part(term, SHARED, rest, 0.0, names)


# -- what the model code holds ---------------------------------------------------------------------------------------


def _walked_parts(case: Case, phase: str, moment: Moment) -> Iterator[Part]:
    """Tensors of the model code: what whole layers keep, other micro-batches, and the rest at the unit that runs."""
    walked = walk(case.walked_model, engine_of(case.layout.engine).compute(case), case.walked_stage)
    others, _ = others_in_flight(case, moment.phase, phase.endswith(".next"))
    apart = case.layout.offload_activations  # what waits in host memory is not a multiple of a layer
    for place, term in enumerate(WALK_TERMS):
        counted = [(IN_FLIGHT, others, walked.kept[place])]
        counted += [(unit, _finished(case, moment, unit), each[place]) for unit, each in walked.layer.items()]
        parts = [] if apart else [_walked(case, term, *each) for each in counted]
        rest = moment.live[place]
        for part, (_, count, each) in zip(parts, counted, strict=False):
            rest = rest - each * count if part.bytes else rest
        if parts and _bytes(case, rest) < 0:  # the last layer keeps less than those before it
            unit, count, each = counted[-1]
            parts[-1], rest = _walked(case, term, unit, count - 1, each), rest + each
        yield from parts
        yield _walked(case, term, f"{_place(moment)}, {AT_WORK}", 1.0, rest)
    yield _walked(case, "temporaries", BATCH, 1.0, Size(per_token=BATCH_BYTES_PER_TOKEN))


def _finished(case: Case, moment: Moment, unit: str) -> float:
    """Layers of a kind whose forward is over and whose backward has not begun."""
    if moment.unit in ("embed", TOWER):
        return 0.0
    done = case.kind_by_layer[: moment.layer] if is_layer(moment.unit) else case.kind_by_layer
    return float(done.count(unit))


def _walked(case: Case, term: str, unit: str, count: float, each: Size) -> Part:
    return Part(term, unit, _bytes(case, each) * count, 0.0, (), count, *each.without_rare(*_shape(case)))


def _shape(case: Case) -> tuple[float, float]:
    return float(case.layout.micro_batch_size), float(case.rank_seq_len)


def _bytes(case: Case, size: Size) -> float:
    return float(size.at(case.layout.micro_batch_size, case.rank_seq_len))
