"""`planner replay` of tables of kernels as text and as JSON: the replay-kernels/1 contract.

Not here: any figure (calibrate/kernels).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from planner.basics.display import Element, Table, as_text
from planner.calibrate.kernels.predict import RowPrediction
from planner.calibrate.kernels.score import KernelErrors
from planner.calibrate.kernels.tables import KernelRow

SCHEMA = "replay-kernels/1"
MOST_REASONS = 12
MICRO = 1e6


def text(
    rows: Sequence[KernelRow], answers: Sequence[RowPrediction], found: Sequence[KernelErrors], width: int | None = None
) -> str:
    """How many were predicted, how far off they are by GPU and kind, and why the others were not."""
    predicted = sum(answer.predicted_s is not None for answer in answers)
    head = ("GPU", "kernel", "rows", "compared", "error, median", "p90", "predicted / measured", "numbers of")
    lines = tuple(
        (
            one.gpu or "not said", one.kind, str(one.rows), str(one.compared), _percent(one.median), _percent(one.p90),
            "n/a" if one.factor is None else f"{one.factor:.2f}", one.measured_on or "nobody",
        )
        for one in found
    )  # fmt: skip
    parts: list[Element] = [f"{predicted} of {len(rows)} kernels predicted.", "", Table(head, lines, left=2)]
    reasons = Counter(answer.skipped for answer in answers if answer.skipped)
    if reasons:
        parts += ["", "NOT PREDICTED"]
        parts += [f"{count:6}  {reason}" for reason, count in reasons.most_common(MOST_REASONS)]
        if (more := len(reasons) - MOST_REASONS) > 0:
            parts.append(f"{more} reasons more.")
    return as_text(parts, width)


def as_json(rows: Sequence[KernelRow], answers: Sequence[RowPrediction], found: Sequence[KernelErrors]) -> bytes:
    """One object: every row, and the errors."""
    told = [row_dict(row, answer) for row, answer in zip(rows, answers, strict=True)]
    return msgspec.json.encode({"schema": SCHEMA, "rows": told, "summary": found})


def row_dict(row: KernelRow, answer: RowPrediction) -> dict[str, Any]:
    """One row of the contract; what was not measured, or is not known, is null."""
    return {
        "id": f"{row.file}:{row.line}",
        "source": row.file,
        "kind": row.kind,
        "gpu": row.gpu,
        "variant": row.variant,
        "sizes": row.sizes,
        "predicted_us": _micro(answer.predicted_s),
        "measured_us": _micro(row.measured_s),
        "measured_on": answer.measured_on,
        "skipped": answer.skipped,
    }


def _micro(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds * MICRO:.6g}")


def _percent(share: float | None) -> str:
    return "n/a" if share is None else f"{100 * share:.1f} %"
