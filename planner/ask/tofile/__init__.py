"""A plan as files of other tools: what each field is there, and what a format cannot say.

`files_of` writes them as text, `FORMATS` names the formats. Not here: reading them (planner/ask/fromfile), or any disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any, NamedTuple

from planner.ask.fromfile import hub
from planner.ask.tofile import accelerate, axolotl, deepspeed, llamafactory, megatron, torchtitan, trl
from planner.ask.tofile.fields import FIELDS, Values, at_rest, implied, told, values_of
from planner.ask.tofile.table import Entries, FieldKeys, FileOfFormat
from planner.ask.tofile.text import Line, command_of, json_of, yaml_of
from planner.basics.errors import PlannerError, did_you_mean
from planner.parallelism.case import Case
from planner.spec.engines import ENGINES
from planner.spec.formats import FORMATS as FAMILIES
from planner.spec.formats import wrapped_classes
from planner.spec.options import OPTIONS
from planner.spec.plan import Plan

FORMATS: dict[str, ModuleType] = {
    "accelerate": accelerate,
    "deepspeed": deepspeed,
    "trl": trl,
    "axolotl": axolotl,
    "llamafactory": llamafactory,
    "torchtitan": torchtitan,
    "megatron": megatron,
}
"""By the word of --to. Each has NAME, ENGINES (those that it can ask for) and `parts`: a new format is one module."""
AXES = ("dp_replicate", "tp", "cp", "pp", "ep")
"""Group sizes: without a key for one above 1 the file would be of another layout."""
DECIDING = ("model", "engine", "method", "quantization", "precision", "optimizer", "zero_stage")
"""Fields of which a format that has a key must have a word for the value, too."""
OF_THE_SCRIPT = ("model", "seq_len", "method", "precision", "optimizer", "micro_batch_size", "grad_accum", "recompute")
"""Fields that are told where a file does not say them, whatever their value: the training script has to."""


UNSAID = "not said in these files: "
"""Begins the comment on a field that no key says."""


class UnsaidField(NamedTuple):
    """A field of the plan that no key of the files says."""

    field: str
    value: Any


class WrittenPlan(NamedTuple):
    """The files of a plan by name, and the fields that they do not say."""

    format: str
    files: dict[str, str]
    unsaid: tuple[UnsaidField, ...]
    notes: tuple[str, ...]


def format_of(word: str) -> ModuleType:
    """The format of a word of --to (PlannerError)."""
    if word.lower() not in FORMATS:
        raise PlannerError("to", word, "is not a format that is written", did_you_mean(word.lower(), FORMATS))
    return FORMATS[word.lower()]


def values(plan: Plan | Case) -> dict[str, Any]:
    """The fields of a plan, with what its files need beside them."""
    classes = ",".join(wrapped_classes(plan.model)) if plan.model.described or plan.model.family in FAMILIES else ""
    return values_of(plan) | {"classes": classes, "spec": plan.model, "device_kind": plan.cluster.gpu.kind}


def files_of(plan: Plan, word: str, own: Sequence[Line] = ()) -> WrittenPlan:
    """A plan in a format (PlannerError for one that it cannot hold). `own` are lines of one run in the first file, its
    model and its steps among them; they stand in the place of the plan's."""
    kind, found = format_of(word), values(plan)
    parts = kind.parts(found) if found["engine"] in kind.ENGINES else ()
    lines, unsaid = said_by(kind, parts, found)
    if own:
        keys = {line.key for line in own}
        lines[0] = [line for line in lines[0] if line.key not in keys] + list(own)
        unsaid = tuple(one for one in unsaid if one.field != "steps")
    notes = _notes(plan, unsaid, own)
    head = _heading(plan)
    files = {
        part.file: _text(part, lines[place], [*head, *notes] if place == 0 else head, found)
        for place, part in enumerate(parts)
    }
    return WrittenPlan(kind.NAME, files, unsaid, tuple(notes))


def said_by(
    kind: ModuleType, parts: tuple[FileOfFormat, ...], found: Values
) -> tuple[list[list[Line]], tuple[UnsaidField, ...]]:
    """The lines of each file, and what none of them says (PlannerError for a field that decides)."""
    lines: list[dict[str, Line]] = [
        {key: Line(key, value, why) for key, (value, why) in part.fixed.items()} for part in parts
    ]
    if not parts:
        raise _refusal(kind, "engine", found)
    missing, follow = [], implied(found)
    rest = {**at_rest(), "runtime": ENGINES[found["engine"]].runtime}
    for field in FIELDS:
        value = found.get(field)
        if value is None:
            if field in getattr(kind, "OWN", ()):
                missing.append(UnsaidField(field, PLANNED_DEFAULT))
            continue
        rows = [(place, part.rows[field]) for place, part in enumerate(parts) if field in part.rows]
        written = [(place, row.write(value, found)) for place, row in rows]
        for place, entries in written:
            for key, one in (entries or {}).items():
                earlier = lines[place].get(key)
                reason = why(field, value, found)
                lines[place][key] = Line(key, one, earlier.why if earlier and earlier.why else reason)
        if _is_said(parts, written) or field in follow:
            continue
        if (field in AXES and value != 1) or _decides(parts, field, value):
            raise _refusal(kind, field, found)
        own = field in getattr(kind, "OWN", ()) or (field == "runtime" and rows)
        if own or field in OF_THE_SCRIPT or (value != rest.get(field) and value != ()):
            missing.append(UnsaidField(field, value))
    return [list(one.values()) for one in lines], tuple(missing)


PLANNED_DEFAULT = "as the runtime has it"
"""Of a field that a plan leaves to its runtime, and a format's own configuration sets."""


def _is_said(parts: Sequence[FileOfFormat], written: Sequence[tuple[int, Entries | None]]) -> bool:
    """Whether a field is said by the files; of a recipe and a launcher's file the recipe has the last word."""
    if _is_recipe(parts[0]) and written and written[0][0] == 0:
        return written[0][1] is not None
    return any(entries is not None for _, entries in written)


def _decides(parts: Sequence[FileOfFormat], field: str, value: Any) -> bool:
    """Whether files that have a key for a field must have a word for its value: all but a launcher's, which leave what
    is trained to the script, with weights of 16 bits."""
    has_key = field in DECIDING and any(field in part.rows for part in parts)
    return has_key and (_is_recipe(parts[0]) or (field == "precision" and value != "pure-bf16"))


def _is_recipe(part: FileOfFormat) -> bool:
    """Whether a file says what is trained."""
    return "method" in part.rows


def can_say(field: str, found: Values) -> list[str]:
    """The formats that can say a field of a plan."""
    return [word for word, kind in FORMATS.items() if _says(kind, field, found)]


def _says(kind: ModuleType, field: str, found: Values) -> bool:
    if found["engine"] not in kind.ENGINES:
        return False
    parts = kind.parts(found)
    rows = [(place, part.rows[field]) for place, part in enumerate(parts) if field in part.rows]
    written = [(place, row.write(found[field], found)) for place, row in rows]
    return field == "engine" or _is_said(parts, written)


def _refusal(kind: ModuleType, field: str, found: Values) -> PlannerError:
    able = can_say(field, found)
    fix = f"Formats that say it: {', '.join(able)}" if able else "No format says it: plan again without it"
    return PlannerError(f"plan: {field}", told(found[field]), f"cannot be said in a file of {kind.NAME}", fix)


def why(field: str, value: Any, found: Values) -> str:
    """Why a key has its value, in the plan's words."""
    if field == "grad_accum":
        ranks = found["global_batch_size"] // (found["micro_batch_size"] * value)
        return (
            f"global batch {found['global_batch_size']} = {ranks} data-parallel ranks x micro-batch "
            f"{found['micro_batch_size']} x {value}"
        )
    if field == "gpus":
        return f"{found['nodes']} x {value // found['nodes']} GPUs"
    about = OPTIONS[field].about.partition(";")[0].rstrip(".") if field in EXPLAINED else ""
    return f"{field} {told(value)}" + (f" ({about})" if about else "")


EXPLAINED = frozenset(name for name, option in OPTIONS.items() if option.part == "layout")
"""Fields whose comment says what they are, too."""


def _heading(plan: Plan) -> list[str]:
    """What the plan predicted, and of what."""
    layout = plan.layout
    told_by = f"{plan.model.name} on {layout.world_size} x {plan.cluster.gpu.name}, {ENGINES[layout.engine].name}"
    found = [f"made by {plan.made_by} of plan {plan.sealed().content_hash[:19]}: {told_by}"]
    if plan.prediction.memory:
        peak = max(plan.prediction.memory, key=lambda one: one.total)
        found.append(f"predicted: {peak.total / 2**30:.1f} GiB of live tensors at the fullest moment, in {peak.phase}")
    return found


def _notes(plan: Plan, unsaid: tuple[UnsaidField, ...], own: Sequence[Line]) -> list[str]:
    found = [f"{UNSAID}{one.field} {told(one.value)}" for one in unsaid]
    if not own and not any(one.field == "model" for one in unsaid) and hub.id_of(plan.model.name) is None:
        found.append(f"no id of a hub is known for {plan.model.name}: put the model's folder in its place")
    return found


def _text(part: FileOfFormat, lines: list[Line], notes: list[str], found: Values) -> str:
    if part.kind == "json":
        return json_of(lines, notes)
    if part.kind == "yaml":
        return yaml_of(lines, notes)
    return command_of(part.head(found), lines, notes)


def rows_of(kind: ModuleType) -> dict[str, tuple[FieldKeys, ...]]:
    """For each field the rows of all files that a format may have, over its engines; of a recipe's own fields its."""
    found: dict[str, dict[tuple[str, ...], FieldKeys]] = {}
    for engine in kind.ENGINES:
        first, *others = kind.parts({"engine": engine, "classes": ""})
        for part in (first, *others):
            for field, row in part.rows.items():
                if part is first or not (_is_recipe(first) and field in first.rows):
                    found.setdefault(field, {})[row.keys] = row
    return {field: tuple(rows.values()) for field, rows in found.items()}
