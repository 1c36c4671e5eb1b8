"""planner/spec/schemas/*.json: JSON Schemas of the files that other programs read or write, from the types that read
them.

Not here: the types (planner.spec.plan, planner.spec.record, planner.calibrate.rows), or what a reader checks beyond its
types: of a plan, its content hash.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from planner.calibrate.rows import Row
from planner.spec.plan import Plan
from planner.spec.record import RunRecord

DIALECT = "https://json-schema.org/draft/2020-12/schema"
FOLDER = Path(__file__).resolve().parents[2] / "planner" / "spec" / "schemas"
FILES: dict[str, tuple[type[msgspec.Struct], str]] = {
    "plan": (Plan, "plan.json: what is trained, where and how, with its prediction (planner recommend -o)"),
    "run": (RunRecord, "run.json of a run folder: how a run ended and what was measured (executor run)"),
    "row": (Row, "One line of a file of measured rows (executor measure -o, planner replay)"),
}
"""The type and the title of each file."""


def major(kind: type[msgspec.Struct]) -> str | None:
    """The schema that a type writes of itself, as name/major; None where it writes none."""
    known = {field.name: field.default for field in msgspec.structs.fields(kind)}
    return str(known["schema"]) if "schema" in known else None


def texts() -> dict[Path, str]:
    """Each schema's file and text."""
    found = {}
    for name, (kind, title) in FILES.items():
        written = major(kind)
        file = f"{(written or f'{name}/1').replace('/', '-')}.json"
        found[FOLDER / file] = json.dumps(schema(kind, title, written), indent=1) + "\n"
    return found


def schema(kind: type[msgspec.Struct], title: str, written: str | None) -> dict[str, Any]:
    """The JSON Schema of one type, which accepts the major version that it writes alone."""
    found = msgspec.json.schema(kind)
    own = found["$defs"][kind.__name__]
    if written is not None:
        own["properties"]["schema"] = {"const": written}
        own["required"] = ["schema", *own["required"]]
    for part in found["$defs"].values():
        if "description" in part:
            part["description"] = " ".join(part["description"].split())
    return {"$schema": DIALECT, "title": title, **found}
