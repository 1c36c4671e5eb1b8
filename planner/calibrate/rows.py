"""Measured rows: one line of JSON each, what ran and what was measured; read, checked and written.

The format is that of docs/adding-a-measurement.md. Not here: the question a row asks (asked.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar

import msgspec

from planner.basics import reading
from planner.basics.errors import PlannerError, refusing
from planner.basics.reading import NOT_JSON
from planner.spec.plan import Plan, decode_plan

SCHEMA = "row/2"
OWN_SOURCE = "meshwright"
"""`source.repo_or_paper` of rows that `executor measure` writes: this project's trainer ran."""

PositiveFinite = Annotated[float, msgspec.Meta(gt=0, le=1e30)]
NotNegativeFinite = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who measured and where it is written; `path_or_table` is a place in the repository or paper."""

    repo_or_paper: str
    path_or_table: str | None = None
    commit_or_date: str | None = None


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured. None: not measured, or not said. `mfu` and `hfu` are fractions, bandwidths are GB/s.

    `memory_kind` says what `peak_memory_gib` is: "allocated", "reserved", "device" ("nvidia-smi"), or an honest
    "unknown"; `memory_stage` is the pipeline stage of the rank that it was read on, `forwards_ahead` how many forward
    passes the host had launched there before the device did the first, whose freed blocks reserved memory still has
    (None: none, as far as is known). `phases_gib` are allocated peaks
    by phase (load, forward, backward, optimizer), `terms_gib` what lived at the peak by the planner's terms,
    `context_gib` device memory beside what the allocator reserved. `oom` None: the source does not tell an
    out-of-memory from another crash. `largest_micro_batch` and `largest_seq_len` are the largest that ran where the
    next step was out of memory, all else being as in the row.
    """

    peak_memory_gib: PositiveFinite | None = None
    memory_kind: str | None = None
    memory_stage: Literal["fullest", "first"] = "fullest"
    forwards_ahead: NotNegativeFinite | None = None
    reserved_gib: PositiveFinite | None = None
    device_gib: PositiveFinite | None = None
    context_gib: NotNegativeFinite | None = None
    phases_gib: dict[str, float] | None = None
    terms_gib: dict[str, float] | None = None
    tokens_per_s_per_gpu: PositiveFinite | None = None
    tflops_per_gpu: PositiveFinite | None = None
    mfu: Fraction | None = None
    hfu: Fraction | None = None
    step_time_s: PositiveFinite | None = None
    step_times_s: tuple[PositiveFinite, ...] | None = None
    wall_time_s: PositiveFinite | None = None
    train_minutes: PositiveFinite | None = None
    busbw_gbps: PositiveFinite | None = None
    algbw_gbps: PositiveFinite | None = None
    oom: bool | None = None
    largest_micro_batch: PositiveFinite | None = None
    largest_seq_len: PositiveFinite | None = None

    @property
    def of_a_run(self) -> bool:
        """Whether there is a figure of the very batch and length that the row says, not of the largest alone."""
        figures = (self.peak_memory_gib, self.reserved_gib, self.device_gib, self.tokens_per_s_per_gpu)
        return self.oom is not None or any(one is not None for one in (*figures, self.step_time_s))

    @property
    def largest(self) -> bool:
        """Whether the largest micro-batch or length that ran is known."""
        return self.largest_micro_batch is not None or self.largest_seq_len is not None


class MeasuredCall(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bandwidth row's call: its name and the bytes it was given (None: not said)."""

    op: str
    bytes: PositiveFinite | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration and what was measured of it: its `plan` by value, or its `options` as `planner estimate` takes
    them; of a collective's row only their cluster counts.

    `status` says how the run ended, `derived_label` a source's word for a failure. `versions` are packages and their
    versions, `gpu_facts` what the driver said. Keys beside these are the source's own: they decide nothing.
    """

    schema: str | None = SCHEMA
    id: str
    source: Source
    plan: Plan | None = None
    options: dict[str, Any] | None = None
    collective: MeasuredCall | None = None
    measured: Measured
    status: str | None = None
    derived_label: str | None = None
    versions: dict[str, str] | None = None
    gpu_facts: dict[str, Any] | None = None
    notes: str | None = None
    file: str = ""

    @property
    def failed(self) -> bool:
        """Whether the run ended without a result: out of memory, or a crash that the source lists with those."""
        return bool(self.measured.oom) or (self.status or "").startswith("crashed")


class OldRow(Row, frozen=True, kw_only=True):
    """A row of before row/2, which names no schema: its configuration in words (old_rows.py)."""

    schema: str | None = None
    method: str
    runtime: str | None = None
    model: dict[str, Any] = {}
    hardware: dict[str, Any] = {}
    lora: dict[str, Any] = {}
    layout: dict[str, Any] = {}


R = TypeVar("R", bound=Row)
_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])
UNKNOWN_FIELD = re.compile(r"unknown field `(.*?)`")
PLACE = re.compile(r" - at `\$\.?(.*)`$")
FORMAT = "docs/adding-a-measurement.md has the format"


class Unread(NamedTuple):
    """A line that is not a row: the file's name without the ending, the line's number from 1, and why."""

    file: str
    line: int
    refusal: PlannerError


def read_rows(paths: Sequence[str | os.PathLike[str]]) -> list[Row]:
    """The rows of JSON Lines files in order; `file` of each is its file's name without the ending.

    Refuses a file that cannot be read, a line that is not a JSON object or breaks the format, and an id given twice
    (PlannerError with file and line).
    """
    rows = []
    for row in each_row(paths, row_of):
        if isinstance(row, Unread):
            raise row.refusal
        rows.append(row)
    return rows


def each_row(paths: Sequence[str | os.PathLike[str]], reader: Callable[[bytes, str], R]) -> Iterator[R | Unread]:
    """The lines of JSON Lines files in order, each as a row that `reader` makes of it and its place, or with the reason
    why it is none. PlannerError for a file that cannot be read."""
    seen: dict[str, str] = {}
    for path in map(Path, paths):
        for number, line in enumerate(_lines(path), 1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                row = msgspec.structs.replace(reader(line, place), file=path.stem)
                if row.id in seen:
                    rule = f"was given in {seen[row.id]} already"
                    raise PlannerError(f"{place}: id", row.id, rule, "Ids name one row")
            except PlannerError as error:
                yield Unread(path.stem, number, error)
                continue
            seen[row.id] = place
            yield row


def row_of(line: bytes, place: str) -> Row:
    """A line as a row of this version, or as one of before (PlannerError with the place)."""
    keys = keys_of(line, place)
    if "schema" not in keys:
        return decoded(line, place, OldRow)
    with _refusing_line(line, place):
        schema = msgspec.json.decode(keys["schema"])
    if schema != SCHEMA:
        raise PlannerError(f"{place}: schema", schema, f"this version reads {SCHEMA}", "Update meshwright")
    if ("plan" in keys) == ("options" in keys):
        rule = "must be given, or options, and not both"
        raise PlannerError(f"{place}: plan", None, rule, "Give a plan, or options of planner estimate")
    if "plan" in keys:
        decode_plan(bytes(keys["plan"]), f"{place}: plan")  # with its own refusals: Row knows no hash
    return decoded(line, place, Row)


def keys_of(line: bytes, place: str) -> dict[str, msgspec.Raw]:
    """A line's fields as they are written (PlannerError for what is not a JSON object)."""
    with _refusing_line(line, place):
        return _KEYS.decode(line)


def decoded(line: bytes, place: str, kind: type[R]) -> R:
    """A line as a row of this kind (PlannerError with the field, and for a key of the source's own that is nearly one
    of ours: what it holds would count for nothing)."""
    with _refusing_line(line, place):
        row = msgspec.json.decode(line, type=kind)
    fields = frozenset(kind.__struct_fields__)
    others = keys_of(line, place).keys() - fields
    if others:
        from difflib import get_close_matches  # only for sources with keys of their own

        for key in sorted(others):
            if near := get_close_matches(key, fields, n=1, cutoff=0.8):
                raise PlannerError(f"{place}: {key}", None, "is not a field of a row", f"Did you mean {near[0]}?")
    return row


def encode_row(row: Row) -> bytes:
    """One line of JSON without what is unknown, newline included; a plan as its file has it."""
    kept = msgspec.to_builtins(msgspec.structs.replace(row, plan=None))
    kept.pop("file", None)
    plan = {} if row.plan is None else {"plan": msgspec.Raw(msgspec.json.encode(row.plan.sealed()))}
    return msgspec.json.encode(_known(kept) | plan) + b"\n"


def append_rows(path: str | os.PathLike[str], rows: Iterable[Row]) -> None:
    """Add rows to a file, each on disk before the next: a run that is cut short keeps what it measured (PlannerError
    where it cannot be written)."""
    with (
        refusing(OSError, "output", path, "cannot be written", "Name a file that is yours"),
        Path(path).open("ab") as to,
    ):
        for row in rows:
            to.write(encode_row(row))
            to.flush()
            os.fsync(to.fileno())


def _known(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, inner in value.items():
        kept = _known(inner) if isinstance(inner, dict) else inner
        if kept is not None and (kept != {} or key == "measured"):
            found[key] = kept
    return found


def _lines(path: Path) -> list[bytes]:
    with refusing(OSError, "rows", path, "cannot be read", "Give JSON Lines files"):
        return reading.read_bytes(path, reading.TABLE_BYTES).split(b"\n")


@contextmanager
def _refusing_line(line: bytes, place: str) -> Iterator[None]:
    """What decoding a line refuses, with its field where it is JSON of another shape."""
    with refusing(NOT_JSON, place, None, "is not a line of JSON", "One object a line"):
        try:
            yield
        except msgspec.ValidationError as error:
            raise _refusal(line, place, str(error)) from None


def _refusal(line: bytes, place: str, told: str) -> PlannerError:
    """Field, value and rule of what broke the format."""
    where = PLACE.search(told)
    field = where[1] if where else ""
    rule = told[: where.start()] if where else told
    if unknown := UNKNOWN_FIELD.search(rule):
        field = f"{field}.{unknown[1]}".strip(".")
        return PlannerError(f"{place}: {field}", None, "is not a field of a row", FORMAT)
    value: Any = None
    with suppress(*NOT_JSON):  # what comes after the field need not be JSON
        value = msgspec.json.decode(line) if field else None
    for part in filter(None, field.split(".")):
        value = value.get(part) if isinstance(value, dict) else None
    rule = rule[:1].lower() + rule[1:]
    return PlannerError(f"{place}: {field}" if field else place, value, rule, FORMAT)
