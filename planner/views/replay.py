"""`planner replay` as text: its tables one below the other, and as JSON: the replay/1 contract.

Not here: any figure (calibrate/score.py), or what the tables hold (calibrate/tables.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from planner.basics.display import Element, Table, as_text
from planner.calibrate.predict import Replayed
from planner.calibrate.score import Summary
from planner.calibrate.tables import tables

SCHEMA = "replay/1"


def replay_text(found: Summary, calibration: str, width: int | None = None) -> str:
    """What was replayed, and every table."""
    rows, predicted = (sum(counts[place] for counts in found.rows.values()) for place in (0, 1))
    parts: list[Element] = [f"{predicted} of {rows} rows predicted, calibration {calibration}."]
    for one in tables(found):
        parts += ["", one.title.upper(), Table(tuple(one.head), tuple(map(tuple, one.rows)), one.left)]
    return as_text(parts, width)


def as_json(replayed: Sequence[Replayed], found: Summary, calibration: str) -> bytes:
    """One object: every row, and the statistics."""
    rows = [row_dict(one) for one in replayed]
    return msgspec.json.encode({"schema": SCHEMA, "calibration": calibration, "rows": rows, "summary": found})


def row_dict(one: Replayed) -> dict[str, Any]:
    """One row of the contract; what was not measured, or is not known, is null or left out."""
    measured = msgspec.to_builtins(one.row.measured)
    return {
        "id": one.row.id,
        "source": one.row.file,
        "predicted": one.predicted,
        "measured": {key: value for key, value in measured.items() if value is not None},
        "skipped": one.skipped,
        "assumptions": one.assumptions,
    }
