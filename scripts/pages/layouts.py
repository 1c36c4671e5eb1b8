"""Layouts that were trained for real: the record that the tests keep of each, and its tables for two pages.

The record is docs/accuracy/layouts.json, one row a case of tests/cluster/cases.py. Not here: the runs, or what is asked
of them (tests/cluster).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from planner.basics.errors import PlannerError
from planner.basics.reading import NOT_JSON

SCHEMA = "layouts/1"
FILE = "layouts.json"


class LayoutRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One case: against one process that trains the same, and planned beside measured in a steady step.

    `loss` and `grad_norm` are the largest relative deviation at any step, `weights` the relative L2 of what was
    trained. Errors are planned / measured - 1 in percent; the worst term is of those with 2 % of the peak or more.
    """

    name: str
    layout: str
    method: str
    model: str
    precision: str = "fp32"
    processes: int
    steps: int
    loss: float | None = None
    grad_norm: float | None = None
    weights: float | None = None
    payload_exact: bool | None = None
    peak_bytes: float | None = None
    peak_error_percent: float | None = None
    activation_share: float | None = None
    worst_term: str | None = None
    worst_term_error_percent: float | None = None
    date: str
    versions: dict[str, str]


class LayoutRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file."""

    schema: str = SCHEMA
    rows: tuple[LayoutRow, ...] = ()


def read_record(path: Path) -> LayoutRecord:
    """The record, or a refusal."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=LayoutRecord)
    except (OSError, *NOT_JSON) as error:
        raise PlannerError("layouts", path, f"cannot be read: {error}", "Make it again: make layouts") from None


def encode_record(rows: list[LayoutRow]) -> bytes:
    """The file, one row a line, so that a diff shows which case changed."""
    lines = b",\n".join(msgspec.json.encode(row) for row in rows)
    return b'{"schema":"' + SCHEMA.encode() + b'","rows":[\n' + lines + b"\n]}\n"


ABOUT = (
    "Every case of `tests/cluster/cases.py`, trained by CPU processes as two nodes over gloo, or by one alone: fp32 "
    "unless its layout says otherwise, gradients clipped, "
    "{steps} steps, beside one process that takes all sequences of a step in one micro-batch; in bf16, which rounds "
    "the gradient of each micro-batch to 16 bits, in the micro-batches of two ranks, whose sum has no order.",
    "Loss and gradient norm are the largest relative deviation at any step, weights the relative L2 of what was "
    "trained.",
    "Payload is every collective's bytes and count in a steady step on every rank; memory errors are planned / "
    "measured - 1, of the peak and of the worst term that has 2 % of it or more.",
    "`make layouts` runs them and writes `docs/accuracy/layouts.json`, which this table is made of.",
)

HEAD = """| case | processes | layout | loss | gradient norm | weights | payload | peak memory | error | worst term |
|---|---:|---|---:|---:|---:|---|---:|---:|---|"""


def section(record: LayoutRecord) -> str:
    """The table of docs/accuracy.md, with what the runs were made with."""
    rows = [_line(row) for row in record.rows]
    steps = " or ".join(sorted({str(row.steps) for row in record.rows}))
    about = "\n".join(ABOUT).format(steps=steps)
    return "\n".join(["## Layouts that were run\n", about, "", HEAD, *rows, "", f"Made {_made(record.rows)}.", ""])


def summary(record: LayoutRecord) -> str:
    """The short table of docs/how-far-off.md."""
    rows = record.rows
    count = len(rows)
    exact = sum(row.payload_exact is True for row in rows)
    peak = max((row for row in rows if row.peak_error_percent is not None), key=_peak_error)
    term = max((row for row in rows if row.worst_term_error_percent is not None), key=_term_error)
    least = min(row.activation_share for row in rows if row.activation_share is not None)
    processes = " or ".join(sorted({str(row.processes) for row in rows}))
    wide = sum(row.precision == "fp32" for row in rows)
    one = {what: max(getattr(row, what) or 0.0 for row in rows) for what in ("loss", "grad_norm", "weights")}
    return "\n".join(
        [
            f"On {count} real runs of {processes} CPU processes as two nodes "
            f"([all of them](accuracy.md#layouts-that-were-run); {wide} in fp32, gradients clipped, "
            f"20 steps; made {_made(rows)}):",
            "",
            "| figure | result |",
            "|---|---|",
            f"| peak of live memory | within {_peak_error(peak):.2f} %; activations are at least"
            f" {100 * least:.0f} % of it in each |",
            f"| every memory term of 2 % or more of the peak | within {_term_error(term):.2f} %; worst:"
            f" {term.worst_term} of `{term.name}` |",
            "| payload and count of every collective of a steady step |"
            f" equal to the byte on {exact} of {count} runs, every rank |",
            f"| against one process on the same batches | losses within {one['loss']:.0e}, gradient norms within"
            f" {one['grad_norm']:.0e}, final weights within {one['weights']:.0e}, relative |",
        ]
    )


def _line(row: LayoutRow) -> str:
    payload = {True: "equal", False: "differs", None: "n/a"}[row.payload_exact]
    peak = "n/a" if row.peak_bytes is None else f"{row.peak_bytes / 2**20:.2f} MiB"
    term = "n/a" if row.worst_term is None else f"{_percent(row.worst_term_error_percent)} {row.worst_term}"
    deviations = [_deviation(value) for value in (row.loss, row.grad_norm, row.weights)]
    layout = row.layout if row.method == "full" else f"{row.layout}, {row.method}"
    layout += "" if row.precision == "fp32" else f", {row.precision}"
    cells = (row.name, str(row.processes), layout, *deviations, payload, peak, _percent(row.peak_error_percent), term)
    return f"| {' | '.join(cells)} |"


def _made(rows: tuple[LayoutRow, ...]) -> str:
    dates = sorted({row.date for row in rows})
    versions = sorted({", ".join(f"{name} {version}" for name, version in row.versions.items()) for row in rows})
    when = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
    return f"{when} with {'; or '.join(versions)}"


def _deviation(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1e}"


def _percent(value: float | None) -> str:
    return "n/a" if value is None else f"{value:+.2f} %"


def _peak_error(row: LayoutRow) -> float:
    return abs(row.peak_error_percent or 0.0)


def _term_error(row: LayoutRow) -> float:
    return abs(row.worst_term_error_percent or 0.0)
