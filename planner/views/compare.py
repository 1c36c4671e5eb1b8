"""`planner compare` as text: what differs, then memory, bytes and speed side by side with ratios to the first plan.

Not here: any figure (planner.studies.compare).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from planner.basics.display import Element, Table, as_text
from planner.basics.quantities import format_bytes, format_duration, format_seconds, format_volume
from planner.studies.compare import Comparison, Side, Volume, ratio
from planner.views.render import NOT_KNOWN, count_text, layout_text

LONGEST_VALUE = 40


def compare_text(found: Comparison, width: int | None = None) -> str:
    """`planner compare` as text."""
    return as_text(compare_view(found), width)


def compare_view(found: Comparison) -> list[Element]:
    """Names first: columns are A, B, ..."""
    letters = letters_of(found.sides)
    parts: list[Element] = [
        f"{letter}: {side.name}: {side.plan.model.name} on {side.plan.cluster.gpus} {side.plan.cluster.gpu.name}, "
        f"{side.plan.layout.engine}, {layout_text(side.plan.layout)}"
        for letter, side in zip(letters, found.sides, strict=True)
    ]
    parts += ["", *_differences(found, letters), "", _figures(found, letters), ""]
    return [*parts, *training_text(found), *(f"note: {note}." for note in found.notes)]


def letters_of(sides: Sequence[Any]) -> list[str]:
    """A, B, ... for what stands side by side."""
    return [chr(ord("A") + place) for place in range(len(sides))]


def training_text(found: Comparison) -> list[str]:
    """Whether the sides train the same."""
    if not found.other_training:
        return ["The same training, split differently." if found.differences else "The same inputs."]
    names = dict.fromkeys(map(_training_name, found.other_training))
    told = [f"Not the same training: {', '.join(names)} not equal. Speeds compare, results do not."]
    if "global_batch_size" in names:
        told.append("Plans made with the same --global-batch-size would compare the split alone.")
    return told


def _training_name(field: str) -> str:
    """The model as a whole, a field of the job by its own name."""
    part, _, rest = field.partition(".")
    return part if part == "model" else rest.partition(".")[0] if not rest.startswith("recipe.") else rest


def _differences(found: Comparison, letters: list[str]) -> list[Element]:
    if not found.differences:
        return ["No input differs."]
    rows = tuple((field, *map(_value, values)) for field, values in found.differences.items())
    return [Table(("what differs", *letters), rows)]


def _value(value: Any) -> str:
    text = "-" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 3] + "..."


def _figures(found: Comparison, letters: list[str]) -> Table:
    sides = found.sides
    terms = [term for term in dict.fromkeys(term for side in sides for term in side.terms) if _any(sides, term)]
    saved = [side.plan.prediction.checkpoint for side in sides]
    kinds = list(dict.fromkeys(op for side in sides for op in side.collectives))
    rows = [
        _row("memory on the card", [side.device_bytes for side in sides], format_bytes),
        _row("peak memory, live", [side.peak_bytes for side in sides], format_bytes),
        ("  in", *(side.peak_phase or NOT_KNOWN for side in sides), *("",) * (len(sides) - 1)),
        *(_row(f"  {term}", [side.terms.get(term) for side in sides], format_bytes) for term in terms),
    ]
    for op in kinds:
        volumes = [side.collectives.get(op, Volume()) for side in sides]
        rows.append(_row(f"{op} payload", [one.payload_bytes for one in volumes], format_volume))
        rows.append(_row(f"{op} wire/GPU", [one.wire_bytes_per_rank for one in volumes], format_volume))
    rows += [
        _row("step", [side.step_s for side in sides], format_seconds),
        _row("tokens/s", [side.tokens_per_s for side in sides], count_text),
        _row("tokens/s/GPU", [_per_gpu(side) for side in sides], count_text),
        _row("checkpoint", [None if one is None else one.bytes for one in saved], format_bytes),
        _row("  written in", [None if one is None else one.seconds for one in saved], format_seconds),
        _row("  best after", [None if one is None else one.interval_s for one in saved], format_duration),
    ]
    return Table(("", *letters, *(f"{letter}/A" for letter in letters[1:])), tuple(rows))


def _any(sides: tuple[Side, ...], term: str) -> bool:
    return any(side.terms.get(term) for side in sides)


def _per_gpu(side: Side) -> float | None:
    return None if side.tokens_per_s is None else side.tokens_per_s / side.plan.cluster.gpus


def _row(name: str, values: Sequence[float | None], text: Callable[[float | None], str]) -> tuple[str, ...]:
    ratios = [ratio(value, values[0]) for value in values[1:]]
    return (name, *map(text, values), *("" if one is None else f"{one:.3g}x" for one in ratios))
