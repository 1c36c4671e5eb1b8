"""Measured rows: one line of JSON each, what ran and what was measured; read, checked and written.

The format is that of tests/truth/README.md. Not here: what a row means to the planner (cases.py).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import msgspec

from planner.contents import NOT_JSON
from planner.errors import PlannerError
from planner.model_rules import LARGEST
from planner.spec import Implementation

Count = Annotated[int, msgspec.Meta(ge=1, le=2**30)]
Elements = Annotated[int, msgspec.Meta(ge=1, le=10**15)]
Positive = Annotated[float, msgspec.Meta(gt=0, le=1e30)]
NotNegative = Annotated[float, msgspec.Meta(ge=0, le=1e30)]
Fraction = Annotated[float, msgspec.Meta(ge=0, le=1)]


class Source(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who measured and where it is written; `path_or_table` is a place in the repository or paper."""

    repo_or_paper: str
    path_or_table: str | None = None
    commit_or_date: str | None = None


class RowModel(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The model's sizes as the source states them; `ffn` is one expert's width in a mixture of experts.

    `family` is a model_type of Transformers, for rows that know it; otherwise the name says it.
    """

    name: str | None = None
    params_b: Positive | None = None
    layers: Annotated[int, msgspec.Meta(ge=1, le=LARGEST["layers"])] | None = None
    hidden: Annotated[int, msgspec.Meta(ge=1, le=LARGEST["hidden"])] | None = None
    heads: Annotated[int, msgspec.Meta(ge=1, le=LARGEST["heads"])] | None = None
    kv_heads: Annotated[int, msgspec.Meta(ge=1, le=LARGEST["kv_heads"])] | None = None
    head_dim: Annotated[int, msgspec.Meta(ge=1, le=LARGEST["head_dim"])] | None = None
    ffn: Annotated[int, msgspec.Meta(ge=1, le=LARGEST["ffn"])] | None = None
    vocab: Annotated[int, msgspec.Meta(ge=1, le=LARGEST["vocab"])] | None = None
    experts: Count | None = None
    top_k: Count | None = None
    tied: bool | None = None
    family: str | None = None


class Hardware(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The machines: a GPU's name as the source writes it or a preset's, and the links in words.

    `cluster` names a cluster preset, for rows measured on one that is known here. `memory_gib` is what a rank could
    take of its device, where it was held to less than all of it.
    """

    gpu: str | None = None
    gpus: Count | None = None
    gpus_per_node: Count | None = None
    intra_link: str | None = None
    inter_link: str | None = None
    cluster: str | None = None
    memory_gib: Positive | None = None


class RowLora(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Adapters: rank, the adapted modules in the source's words, elements that are trained."""

    rank: Count | None = None
    alpha: Count | None = None
    targets: str | None = None
    trainable: Elements | None = None


class RowLayout(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the work was split, in the source's words; batches count sequences, `seq` tokens.

    `optimizer_implementation` is how AdamW stepped; where neither the row nor its source says, it was foreach.
    `switches` are fields of planner.spec.Layout that the rest does not say (reshard_after_forward, pp_schedule, ...):
    they win over everything else.
    """

    dp: Count | None = None
    tp: Count | None = None
    pp: Count | None = None
    cp: Count | None = None
    ep: Count | None = None
    vp: Count | None = None
    zero_or_fsdp: str | None = None
    micro_batch: Count | None = None
    global_batch: Count | None = None
    grad_accum: Count | None = None
    seq: Count | None = None
    recompute: str | None = None
    precision: str | None = None
    optimizer: str | None = None
    optimizer_implementation: Implementation | None = None
    compile: bool | None = None
    attention: str | None = None
    sequence_parallel: bool | None = None
    offload: str | None = None
    quant: str | int | None = None
    overlap: str | None = None
    switches: dict[str, Any] = {}


class Measured(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What was measured. None: not measured, or not said. `mfu` and `hfu` are fractions, bandwidths are GB/s.

    `memory_kind` says what `peak_memory_gib` is: "allocated", "reserved", "device" ("nvidia-smi"), or an honest
    "unknown". `phases_gib` are allocated peaks by phase (load, forward, backward, optimizer), `terms_gib` what lived
    at the peak by the planner's terms, `context_gib` device memory beside what the allocator
    reserved. `oom` None: the source does not tell an out-of-memory from another crash.
    """

    peak_memory_gib: Positive | None = None
    memory_kind: str | None = None
    reserved_gib: Positive | None = None
    device_gib: Positive | None = None
    context_gib: NotNegative | None = None
    phases_gib: dict[str, float] | None = None
    terms_gib: dict[str, float] | None = None
    tokens_per_s_per_gpu: Positive | None = None
    tflops_per_gpu: Positive | None = None
    mfu: Fraction | None = None
    hfu: Fraction | None = None
    step_time_s: Positive | None = None
    step_times_s: tuple[Positive, ...] | None = None
    wall_time_s: Positive | None = None
    train_minutes: Positive | None = None
    busbw_gbps: Positive | None = None
    algbw_gbps: Positive | None = None
    oom: bool | None = None


class Collective(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bandwidth row's call: its name and the bytes it was given (None: not said)."""

    op: str
    bytes: Positive | None = None


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One configuration and what was measured of it.

    `runtime` says whose code ran: a key of sources.RUNTIMES, or a runtime preset. `boundary` marks the largest value
    that ran. `versions` are packages and their versions, `gpu_facts` what the driver said. Keys beside these are the
    source's own and are left where they are: they decide nothing.
    """

    id: str
    source: Source
    runtime: str | None = None
    model: RowModel = RowModel()
    hardware: Hardware = Hardware()
    method: str
    lora: RowLora | None = None
    layout: RowLayout = RowLayout()
    measured: Measured
    collective: Collective | None = None
    best_reported: bool = False
    boundary: str | None = None
    status: str | None = None
    derived_label: str | None = None
    per_rank_max_allocated_mb: tuple[float, ...] | None = None
    versions: dict[str, str] | None = None
    gpu_facts: dict[str, Any] | None = None
    notes: str | None = None
    file: str = ""

    @property
    def failed(self) -> bool:
        """Whether the run ended without a result: out of memory, or a crash that the source lists with those."""
        return bool(self.measured.oom) or (self.status or "").startswith("crashed")


_DECODER = msgspec.json.Decoder(Row)
_KEYS = msgspec.json.Decoder(dict[str, msgspec.Raw])
_FIELDS = frozenset(Row.__struct_fields__)
UNKNOWN_FIELD = re.compile(r"unknown field `(\w+)`")
PLACE = re.compile(r" - at `\$\.?(.*)`$")


def read_rows(paths: Sequence[str | os.PathLike[str]]) -> list[Row]:
    """The rows of JSON Lines files in order; `file` of each is its file's name without the ending.

    Refuses a file that cannot be read, a line that is no JSON object or breaks the format, and an id given twice
    (PlannerError with file and line).
    """
    rows = []
    for one in each_row(paths):
        if isinstance(one, Unread):
            raise one.refusal
        rows.append(one)
    return rows


class Unread(NamedTuple):
    """A line that is no row: the file's name without the ending, the line's number from 1, and why."""

    file: str
    line: int
    refusal: PlannerError


def each_row(paths: Sequence[str | os.PathLike[str]]) -> Iterator[Row | Unread]:
    """The lines of JSON Lines files in order, each as a row, or with the reason why it is none. PlannerError for a file
    that cannot be read."""
    seen: dict[str, str] = {}
    for path in map(Path, paths):
        for number, line in enumerate(_lines(path), 1):
            if not line.strip():
                continue
            place = f"{path}:{number}"
            try:
                row = msgspec.structs.replace(_row(line, place), file=path.stem)
                if row.id in seen:
                    rule = f"was given in {seen[row.id]} already"
                    raise PlannerError(f"{place}: id", row.id, rule, "Ids name one row")
            except PlannerError as error:
                yield Unread(path.stem, number, error)
                continue
            seen[row.id] = place
            yield row


def encode_row(row: Row) -> bytes:
    """One line of JSON without what is unknown, newline included."""
    kept = msgspec.to_builtins(row)
    kept.pop("file", None)
    return msgspec.json.encode(_known(kept)) + b"\n"


def append_rows(path: str | os.PathLike[str], rows: Iterable[Row]) -> None:
    """Add rows to a file, each on disk before the next: a run that is cut short keeps what it measured (PlannerError
    where it cannot be written)."""
    try:
        with Path(path).open("ab") as stream:
            for row in rows:
                stream.write(encode_row(row))
                stream.flush()
                os.fsync(stream.fileno())
    except OSError as error:
        raise PlannerError(
            "output", path, f"cannot be written ({error.strerror})", "Name a file that is yours"
        ) from None


def _known(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, inner in value.items():
        kept = _known(inner) if isinstance(inner, dict) else inner
        if kept is not None and (kept != {} or key == "measured"):
            found[key] = kept
    return found


def _lines(path: Path) -> list[bytes]:
    try:
        return path.read_bytes().split(b"\n")
    except OSError as error:
        raise PlannerError("rows", path, f"cannot be read ({error.strerror})", "Give JSON Lines files") from None


def _row(line: bytes, place: str) -> Row:
    try:
        row = _DECODER.decode(line)
        _no_slips(line, place)
        return row
    except msgspec.ValidationError as error:
        raise _refusal(line, place, str(error)) from None
    except NOT_JSON as error:
        raise PlannerError(place, None, f"is not a line of JSON ({error})", "One object a line") from None


def _no_slips(line: bytes, place: str) -> None:
    """Refuse a key of the source's own that is nearly one of ours: what it holds would count for nothing."""
    others = _KEYS.decode(line).keys() - _FIELDS
    if not others:
        return
    from difflib import get_close_matches  # only for sources with keys of their own

    for key in sorted(others):
        if near := get_close_matches(key, _FIELDS, n=1, cutoff=0.8):
            raise PlannerError(f"{place}: {key}", None, "is not a field of a row", f"Did you mean {near[0]}?")


def _refusal(line: bytes, place: str, told: str) -> PlannerError:
    """Field, value and rule of what broke the format."""
    where = PLACE.search(told)
    field = where[1] if where else ""
    rule = told[: where.start()] if where else told
    if unknown := UNKNOWN_FIELD.search(rule):
        field = f"{field}.{unknown[1]}".strip(".")
        return PlannerError(f"{place}: {field}", None, "is not a field of a row", "tests/truth/README.md lists them")
    value: Any = None
    with suppress(*NOT_JSON):  # what comes after the field need not be JSON
        value = msgspec.json.decode(line) if field else None
    for part in filter(None, field.split(".")):
        value = value.get(part) if isinstance(value, dict) else None
    rule = rule[:1].lower() + rule[1:]
    return PlannerError(f"{place}: {field}" if field else place, value, rule, "tests/truth/README.md has the format")
