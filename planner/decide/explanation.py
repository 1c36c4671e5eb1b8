"""The derivation of one estimate: where every byte comes from, and every formula that was evaluated, with its source.

Not here: the recording of formulas (formula.py), or the tables of an estimate (render.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec

from planner.basics.errors import PlannerError
from planner.basics.formula import FormulaCall, Noted, trace
from planner.basics.quantities import format_bytes, format_seconds
from planner.decide.answers import Answer, Estimate
from planner.engines.base import Held
from planner.figures.comm import comm_volume
from planner.figures.memory import BATCH_BYTES_PER_TOKEN, PHASES, TERMS, memory_breakdown, moments_of, stage_phases
from planner.figures.steptime import step_time, throughput
from planner.inventory import TERMS as WALK_TERMS
from planner.inventory import Moment, Size
from planner.parallelism.case import Case
from planner.spec import ModelSpec
from planner.spec.calibration import Calibration

SCHEMA = "explain/1"


def derivation(case: Case, known: Calibration) -> dict[str, FormulaCall]:
    """The formula trees of memory, communication and time."""
    found: dict[str, FormulaCall] = {}
    with trace("memory") as found["memory"]:
        memory_breakdown(case)
    with trace("communication") as found["communication"]:
        comm_volume(case)
    with trace("time") as found["time"]:
        throughput(case, step_time(case, known))
    return found


class Origin(msgspec.Struct, frozen=True):
    """One term at the fullest moment of one phase: what the engine holds, and the model code's tensors as a polynomial.

    total = engine_bytes + bytes_per_token * tokens + bytes_per_position * seq_len + fixed_bytes
    + bytes_per_pair * tokens * seq_len, with the tokens and the part of a sequence that one rank has.
    """

    phase: str
    place: str
    term: str
    engine_bytes: float
    bytes_per_token: float
    bytes_per_position: float
    fixed_bytes: float
    bytes_per_pair: float
    total_bytes: float


class Explanation(msgspec.Struct, frozen=True):
    """Where one estimate's figures come from.

    `bytes` are an Origin a phase and term at the fullest moment, in bytes of one rank; `formulas` the calls of memory,
    communication and time as a tree, each with inputs, value, unit and source.
    """

    estimate: Estimate
    bytes: tuple[Origin, ...]
    formulas: dict[str, FormulaCall]


def explain(answer: Answer, place: int | None = None) -> Explanation:
    """Derive the figures of an answer's estimate: the one at `place`, else the recommended one, else the first.

    Raises PlannerError where the answer has no estimate.
    """
    found = chosen(answer, place)
    trees = derivation(found.case, answer.question.calibration)
    return Explanation(found, tuple(origins(found.case)), trees)


def chosen(answer: Answer, place: int | None = None) -> Estimate:
    """The estimate of an answer that is explained: that at `place`, else the recommended one, else the first.

    Raises PlannerError where there is none.
    """
    if not answer.estimates:
        strategy, reason = next(iter(answer.unavailable.items()))
        raise PlannerError("strategy", strategy, f"is not available: {reason}", "Change the options that leave it out")
    places = range(len(answer.estimates))
    if place is not None and place not in places:
        raise PlannerError("place", place, f"must be from 0 to {places[-1]}", f"Try {places[-1]}")
    return answer.estimates[(answer.recommended or 0) if place is None else place]


def origins(case: Case) -> list[Origin]:
    """Where every byte of every phase comes from, on the fullest pipeline stage."""
    stages = list(map(case.at, case.stages()))
    return _stage_origins(max(stages, key=lambda stage: max(phase.total for phase in stage_phases(stage))))


def _stage_origins(case: Case) -> list[Origin]:
    fullest: dict[str, list[Origin]] = {}
    for phase, held, moment in moments_of(case):
        found = _origins_at(case, phase, held, moment)
        if sum(one.total_bytes for one in found) > sum(one.total_bytes for one in fullest.get(phase, [])):
            fullest[phase] = found
    return [one for phase in PHASES for one in fullest.get(phase, []) if one.total_bytes]


def _origins_at(case: Case, phase: str, held: Held, moment: Moment | None) -> list[Origin]:
    place, live = "outside the model code", dict.fromkeys(WALK_TERMS, Size())
    if moment is not None:
        place = f"{moment.unit} {moment.layer}" if moment.layer >= 0 else moment.unit
        live = dict(zip(WALK_TERMS, moment.live, strict=True))
        live["temporaries"] = live["temporaries"] + Size(per_token=BATCH_BYTES_PER_TOKEN)
    found = []
    for term in TERMS:
        own, size = float(held.get(term, 0.0)), live.get(term, Size())
        shape = float(case.layout.micro_batch_size), float(case.rank_seq_len)
        total = own + size.at(*shape)
        found.append(Origin(phase, place, term, own, *size.without_rare(*shape), float(total)))
    return found


def origins_text(case: Case, found: Iterable[Origin]) -> str:
    """One line a term: its bytes, and what they are the sum of."""
    lines: list[str] = []
    heading = ""
    for one in found:
        if heading != (heading := f"{one.phase}, fullest at: {one.place}"):
            lines.append(heading)
        parts = [f"{one.engine_bytes:,.0f} held by {case.layout.engine}"] if one.engine_bytes else []
        parts += [f"{one.bytes_per_token:,.6g} a token x {case.tokens:,.0f} tokens"] if one.bytes_per_token else []
        parts += [f"{one.bytes_per_position:,.6g} a position x {case.rank_seq_len:,}"] if one.bytes_per_position else []
        parts += [f"{one.bytes_per_pair:,.6g} a pair of tokens"] if one.bytes_per_pair else []
        parts += [f"{one.fixed_bytes:,.0f} of the model code's copies"] if one.fixed_bytes else []
        lines.append(f"  {one.term:11} {format_bytes(one.total_bytes):>11} = {' + '.join(parts)}")
    return "\n".join(lines)


def folded(steps: list[FormulaCall]) -> list[tuple[FormulaCall, int]]:
    """Steps in order of first appearance, equal ones (same formula, inputs and value) counted."""
    order: dict[tuple[str, str], tuple[FormulaCall, int]] = {}
    for step in steps:
        key = (step.name, repr(step.inputs))
        first, count = order.get(key, (step, 0))
        order[key] = (first, count + 1)
    return list(order.values())


def as_json_object(found: Explanation) -> dict[str, Any]:
    """Bytes by phase and term, and the formula trees."""
    steps = {name: as_dict(tree)["steps"] for name, tree in found.formulas.items()}
    return {"schema": SCHEMA, "bytes": found.bytes, "derivation": steps}


def as_dict(step: FormulaCall, count: int = 1) -> dict[str, Any]:
    """One formula as JSON."""
    return {
        "formula": step.name,
        "about": step.about,
        "unit": step.unit,
        "source": step.source,
        "calls": count,
        "inputs": {name: _plain(value) for name, value in step.inputs.items()},
        "value": _plain(step.value),
        "steps": [as_dict(*pair) for pair in folded(step.steps)],
    }


def tree_text(root: FormulaCall) -> str:
    """An indented tree: value, formula, inputs and source."""
    lines = [root.name.upper()]
    _lines(root, 1, lines)
    return "\n".join(lines)


def _lines(step: FormulaCall, depth: int, lines: list[str]) -> None:
    for one, count in folded(step.steps):
        times = f" (x{count})" if count > 1 else ""
        inputs = ", ".join(f"{name}={_short(value)}" for name, value in one.inputs.items())
        lines.append(f"{'  ' * depth}{value_text(one)} = {one.name}({inputs}){times}")
        lines.append(f"{'  ' * depth}    {one.about} [{one.source}]")
        _lines(one, depth + 1, lines)


def value_text(step: FormulaCall) -> str:
    """A value in its unit, with the exact number where the unit is rescaled."""
    value = step.value
    if step.unit == "bytes":
        return f"{value:,.0f} bytes ({format_bytes(value)})"
    if step.unit == "s":
        return format_seconds(value)
    return f"{_short(value)} {step.unit}"


def _plain(value: Any) -> Any:
    if isinstance(value, Noted):
        return float(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, ModelSpec):
        return value.name
    return str(value)


def _short(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        text = str(_plain(value))
        return text if len(text) <= 40 else f"{type(value).__name__}(...)"
    if float(value).is_integer() and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:.6g}"
