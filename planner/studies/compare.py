"""Plans side by side: what differs in their inputs, and what that does to memory, bytes on the wire and speed.

Stands on what the plan files say; what a card shows beside their live bytes is added up anew. Not here: reading plans
(plan.py), or the table (views/).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from planner.basics.display import Displayed
from planner.basics.errors import PlannerError
from planner.figures.memory import shown_by
from planner.spec.plan import Plan

SCHEMA = "compare/1"
PARTS = ("model", "job", "layout", "runtime", "cluster")
MOST_PLANS = 16

EVALUATION_ONLY = ("job.recipe.validation_data", "job.recipe.eval_every")
"""Fields of a job that leave the trained weights as they are."""


class Volume(msgspec.Struct, frozen=True):
    """One kind of collective over a whole step of one rank."""

    payload_bytes: float = 0.0
    wire_bytes_per_rank: float = 0.0


class Side(msgspec.Struct, frozen=True):
    """One plan's figures. `device_bytes` is what the card shows, `peak_bytes` and `terms` live bytes at the fullest
    moment; None where the plan has no such prediction."""

    name: str
    plan: Plan
    peak_phase: str | None
    device_bytes: float | None
    peak_bytes: float | None
    terms: dict[str, float]
    collectives: dict[str, Volume]
    step_s: float | None
    tokens_per_s: float | None


class Comparison(Displayed, msgspec.Struct, frozen=True):
    """`differences` by field, one value a side (None: the side has no such field, or it is not set).

    `other_training` names the fields that make the sides train different things: their speeds compare, their results
    do not. `notes` says what weakens the comparison.
    """

    sides: tuple[Side, ...]
    differences: dict[str, tuple[Any, ...]]
    other_training: tuple[str, ...]
    notes: tuple[str, ...]


def compare(plans: Sequence[tuple[str, Plan]]) -> Comparison:
    """Two plans or more, in the order given; the first is what ratios refer to."""
    check_count(len(plans))
    flat = [_flat(plan) for _, plan in plans]
    fields = list(dict.fromkeys(field for one in flat for field in one))
    differences = {
        field: values for field in fields if len(set(map(repr, values := tuple(one.get(field) for one in flat)))) > 1
    }
    other = tuple(field for field in differences if _changes_training(field))
    return Comparison(tuple(_side(*one) for one in plans), differences, other, _notes([plan for _, plan in plans]))


def check_count(count: int) -> None:
    """Refuse too few or too many to stand side by side (PlannerError)."""
    if count < 2:
        fix = 'Give another plan.json, or options in quotes, "--model 7b --gpus 8"'
        raise PlannerError("plans", count, "a comparison needs two plans or questions, or more", fix)
    if count > MOST_PLANS:
        raise PlannerError("plans", count, f"at most {MOST_PLANS} are compared", "Compare fewer at a time")


def _flat(plan: Plan) -> dict[str, Any]:
    """Fields by dotted path. A global batch is what the layout makes, whether or not the job fixed it."""
    found: dict[str, Any] = {}
    for part in PARTS:
        _flatten(part, msgspec.to_builtins(getattr(plan, part)), found)
    found["job.global_batch_size"] = plan.layout.global_batch_size
    return found


def _flatten(path: str, value: Any, found: dict[str, Any]) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _flatten(f"{path}.{key}", inner, found)
    else:
        found[path] = value


def _changes_training(field: str) -> bool:
    return field.startswith(("model.", "job.")) and field not in (*EVALUATION_ONLY, "model.name", "model.parameters")


def _side(name: str, plan: Plan) -> Side:
    memory = plan.prediction.memory
    peak = max(memory, key=lambda phase: phase.total) if memory else None
    volumes: dict[str, Volume] = {}
    for call in plan.prediction.collectives:
        before = volumes.get(call.op, Volume())
        volumes[call.op] = Volume(
            before.payload_bytes + call.payload_bytes, before.wire_bytes_per_rank + call.wire_bytes_per_rank
        )
    return Side(
        name=name,
        plan=plan,
        peak_phase=None if peak is None else peak.phase,
        device_bytes=shown_by(plan),
        peak_bytes=None if peak is None else peak.total,
        terms={} if peak is None else peak.terms,
        collectives=volumes,
        step_s=plan.prediction.step_s,
        tokens_per_s=plan.prediction.tokens_per_s,
    )


def _notes(plans: Sequence[Plan]) -> tuple[str, ...]:
    notes = []
    makers = dict.fromkeys(plan.made_by for plan in plans)
    if len(makers) > 1:
        notes.append(f"predicted by different versions ({', '.join(makers)}): part of a difference may be theirs")
    if len({plan.content_hash for plan in plans}) < len(plans):
        notes.append("some of these plans are the same plan")
    return tuple(notes)


def ratio(value: float | None, first: float | None) -> float | None:
    """A figure over the first side's; None where either is unknown or the first is zero."""
    return None if value is None or not first else value / first


# -- compare/1 -----------------------------------------------------------------------------------------------------


def as_json(found: Comparison) -> bytes:
    """One object, as `as_json_object`."""
    return msgspec.json.encode(as_json_object(found))


def as_json_object(found: Comparison) -> dict[str, Any]:
    """The sides' figures, what differs, and whether it is the same training."""
    first = found.sides[0]
    sides: list[dict[str, Any]] = [
        {
            "plan": side.name,
            "content_hash": side.plan.content_hash,
            "made_by": side.plan.made_by,
            "gpus": side.plan.cluster.gpus,
            "global_batch_size": side.plan.layout.global_batch_size,
            "memory": {
                "device_bytes": side.device_bytes,
                "live_bytes": side.peak_bytes,
                "peak_phase": side.peak_phase,
                "peak_bytes": side.peak_bytes,
                "terms": side.terms,
            },
            "collectives": side.collectives,
            "step_s": side.step_s,
            "tokens_per_s": side.tokens_per_s,
            "peak_bytes_ratio": ratio(side.peak_bytes, first.peak_bytes),
            "step_s_ratio": ratio(side.step_s, first.step_s),
            "tokens_per_s_ratio": ratio(side.tokens_per_s, first.tokens_per_s),
        }
        for side in found.sides
    ]
    return {
        "schema": SCHEMA,
        "plans": sides,
        "differences": found.differences,
        "same_training": not found.other_training,
        "other_training": found.other_training,
        "notes": found.notes,
    }
