"""Combinations of engine, method, precision and recomputation that were measured: the record that the tests keep of
each, and its tables for docs/accuracy.md.

The record is docs/accuracy/combinations.json, one row a combination of tests/cluster/combinations.py. Not here: the
runs and traces, or what is asked of them (tests/cluster/test_combinations.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Literal, get_args

import msgspec

from planner.basics.errors import PlannerError
from planner.spec.job import Precision
from planner.spec.layout import RECOMPUTE

SCHEMA = "combinations/1"
FILE = "combinations.json"
LARGEST_PEAK_ERROR_PERCENT = 0.5
"""How far a combination's predicted peak may be from what was measured."""


class CombinationRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One combination, planned beside measured in a steady step, on the pipeline `stage` that is furthest off.

    `by` is who measured: real ranks, or a trace on fake tensors. `term` ("phase/term") is what differs by most
    bytes in the phase that was the fullest when measured.
    """

    by: Literal["run", "trace"]
    name: str
    kind: str
    precision: str
    recompute: str
    model: str
    processes: int
    batch: str
    stage: int = 0
    predicted_bytes: float
    measured_bytes: float
    predicted_phase: str
    measured_phase: str
    term: str
    term_predicted_bytes: float | None
    term_measured_bytes: float | None
    date: str
    versions: dict[str, str]

    @property
    def error_percent(self) -> float:
        """Predicted / measured - 1."""
        return 100 * (self.predicted_bytes / self.measured_bytes - 1)

    @property
    def deviates(self) -> bool:
        """Whether its peak is further off than allowed."""
        return abs(self.error_percent) > LARGEST_PEAK_ERROR_PERCENT


class CombinationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file. `refused` counts the combinations that nothing launches, by the rule that they break first."""

    schema: str = SCHEMA
    refused: dict[str, int] = {}
    rows: tuple[CombinationRow, ...] = ()


def read_combinations(path: Path) -> CombinationRecord:
    """The record, or a refusal."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=CombinationRecord)
    except (OSError, msgspec.DecodeError) as error:
        raise PlannerError(
            "combinations", path, f"cannot be read: {error}", "Make it again: make combinations"
        ) from None


def encode_combinations(refused: dict[str, int], rows: Iterable[CombinationRow]) -> bytes:
    """The file, one row a line, so that a diff shows which combination changed."""
    head = b'{"schema":"' + SCHEMA.encode() + b'","refused":' + msgspec.json.encode(refused)
    return head + b',"rows":[\n' + b",\n".join(msgspec.json.encode(row) for row in rows) + b"\n]}\n"


ABOUT = (
    "Every combination of engine, method, precision and recomputation that is launched, `{model}` over two ranks "
    "(`single` has one): cells are planned / measured - 1 of the peak, which may be {allowed} % at most.",
    "What a trace on fake tensors starts is traced as GPUs hold it; what no trace starts is run by CPU processes, "
    "and so is every kind in bf16 and pure-bf16, with no and with full recomputation.",
    "An empty cell is a combination that a rule refuses, or one of the other table.",
    "`make combinations` measures them and writes `docs/accuracy/combinations.json`, which these tables are made of.",
)
TITLES = {"trace": "Traced", "run": "Run by real processes"}


def section(record: CombinationRecord) -> str:
    """The tables of docs/accuracy.md: traces, runs, known deviations, and what is refused."""
    model = " and ".join(sorted({row.model for row in record.rows}))
    about = "\n".join(ABOUT).format(model=model, allowed=LARGEST_PEAK_ERROR_PERCENT)
    parts = ["## Combinations that were measured\n", about, ""]
    for by, title in TITLES.items():
        rows = [row for row in record.rows if row.by == by]
        if rows:
            parts += [f"### {title}\n", _sentence(rows), "", *_matrix(rows), ""]
    parts += ["### Known deviations\n", *_deviations([row for row in record.rows if row.deviates]), ""]
    if record.refused:
        parts += ["### Combinations that are refused\n", *_refused(record.refused), ""]
    return "\n".join(parts)


def _sentence(rows: list[CombinationRow]) -> str:
    worst = max(rows, key=lambda row: abs(row.error_percent))
    inside = sum(not row.deviates for row in rows)
    batches = " and ".join(sorted({row.batch for row in rows}))
    dates = sorted({row.date for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    versions = sorted({", ".join(f"{name} {version}" for name, version in row.versions.items()) for row in rows})
    return (
        f"{inside} of {len(rows)} are within {LARGEST_PEAK_ERROR_PERCENT} %; the worst is {worst.error_percent:+.2f} %,"
        f" `{worst.name}`.\nMicro-batches of {batches}; made {when} with {'; or '.join(versions)}."
    )


def _matrix(rows: list[CombinationRow]) -> list[str]:
    columns = list(dict.fromkeys((row.precision, row.recompute) for row in sorted(rows, key=_column)))
    found = {(row.kind, row.precision, row.recompute): row for row in rows}
    head = ("engine and method", *(f"{precision} {recompute}" for precision, recompute in columns))
    lines = [f"| {' | '.join(head)} |", f"|---|{'---:|' * len(columns)}"]
    for kind in dict.fromkeys(row.kind for row in rows):
        cells = [found.get((kind, *column)) for column in columns]
        shown = ["" if one is None else _error(one) for one in cells]
        lines.append(f"| {' | '.join((kind, *shown))} |")
    return lines


def _column(row: CombinationRow) -> tuple[int, int]:
    """A place by the order of the planner's own lists."""
    return get_args(Precision).index(row.precision), RECOMPUTE.index(row.recompute)


def _error(row: CombinationRow) -> str:
    return f"**{row.error_percent:+.2f}**" if row.deviates else f"{row.error_percent:+.2f}"


def _deviations(rows: list[CombinationRow]) -> list[str]:
    if not rows:
        return [f"None: every peak is within {LARGEST_PEAK_ERROR_PERCENT} %."]
    lines = [
        "| combination | by | planned | measured | error | fullest phase, planned and measured | term that is off |",
        "|---|---|---:|---:|---:|---|---|",
    ]
    for row in sorted(rows, key=lambda row: -abs(row.error_percent)):
        phases = " / ".join(dict.fromkeys((row.predicted_phase, row.measured_phase)))
        term = f"{row.term}: {_size(row.term_predicted_bytes)} for {_size(row.term_measured_bytes)}"
        sizes = (_size(row.predicted_bytes), _size(row.measured_bytes))
        lines.append(f"| {' | '.join((row.name, row.by, *sizes, f'{row.error_percent:+.2f} %', phases, term))} |")
    return lines


def _refused(refused: dict[str, int]) -> list[str]:
    lines = ["| first rule that is broken | combinations |", "|---|---:|"]
    return lines + [f"| {rule} | {count} |" for rule, count in refused.items()]


def _size(value: float | None) -> str:
    return "n/a" if value is None else f"{value / 2**20:.3f} MiB"
