"""A configuration file from disk as plain values: YAML, JSON or TOML by its suffix. Nothing in it is evaluated.

Not here: what its keys mean.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from planner.basics import reading
from planner.basics.errors import PlannerError, refusing

SUFFIXES = (".yaml", ".yml", ".json", ".toml")


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The one table a file holds."""
    file = Path(path)
    if file.suffix.lower() not in SUFFIXES:
        raise PlannerError("from", path, "is not a YAML, JSON or TOML file", f"Known endings: {', '.join(SUFFIXES)}")
    with refusing(OSError, "from", path, "cannot be read", "Give a training configuration"):
        raw = reading.read_bytes(file, reading.SETTINGS_BYTES)
    kind = file.suffix.lower().lstrip(".")
    try:
        data = _decode(kind, raw)
    except ValueError as error:
        name = {"yml": "YAML"}.get(kind, kind.upper())
        raise PlannerError("from", path, f"is not {name}: {error}", "Mend the file") from None
    if not isinstance(data, dict) or not data:
        raise PlannerError("from", path, "holds no table of keys", "Give a training configuration")
    return {str(key): value for key, value in data.items()}


def referenced(name: str, beside: str) -> Path:
    """A file that another names: next to it, or else in the current folder, where frameworks look."""
    for folder in (Path(beside).parent, Path()):
        if (folder / name).is_file():
            return folder / name
    raise PlannerError(beside, None, f"names {name}, which is not a file beside it", "Put it there, or mend the path")


def _decode(kind: str, raw: bytes) -> Any:
    if kind == "toml":
        return reading.read_toml(raw)
    if kind == "json":
        return reading.read_json(raw)
    try:
        return reading.read_yaml(raw)
    except ImportError:
        raise PlannerError(
            "from", None, "reading YAML needs PyYAML, which is not installed", "Install meshwright[yaml]"
        ) from None
