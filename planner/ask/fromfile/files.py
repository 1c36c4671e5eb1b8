"""A configuration file from disk as plain values: YAML, JSON or TOML by its suffix. Nothing in it is evaluated.

Not here: what its keys mean.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

from planner.basics import reading
from planner.basics.errors import PlannerError, refusing


class StandIns(NamedTuple):
    """Contents of files as they might be, by real path, and the names of others that were loaded beside them."""

    contents: Mapping[str, bytes]
    others: list[str]


SUFFIXES = (".yaml", ".yml", ".json", ".toml")
_STANDING_IN: ContextVar[StandIns | None] = ContextVar("standing_in", default=None)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The one table a file holds."""
    file = Path(path)
    if file.suffix.lower() not in SUFFIXES:
        raise PlannerError("from", path, "is not a YAML, JSON or TOML file", f"Known endings: {', '.join(SUFFIXES)}")
    stand_ins = _STANDING_IN.get()
    if stand_ins is not None and (raw := stand_ins.contents.get(os.path.realpath(path))) is not None:
        return decoded(path, raw)
    if stand_ins is not None:
        stand_ins.others.append(str(path))
    return decoded(path, raw_bytes(path))


def raw_bytes(path: str | os.PathLike[str]) -> bytes:
    """A configuration as it is on disk."""
    with refusing(OSError, "from", path, "cannot be read", "Give a training configuration"):
        return reading.read_bytes(Path(path), reading.SETTINGS_BYTES)


@contextmanager
def standing_in(contents: Mapping[str, bytes]) -> Iterator[StandIns]:
    """While it lasts files of these real paths have this content, for whoever loads them."""
    found = StandIns(contents, [])
    token = _STANDING_IN.set(found)
    try:
        yield found
    finally:
        _STANDING_IN.reset(token)


def decoded(path: str | os.PathLike[str], raw: bytes) -> dict[str, Any]:
    """The table that the bytes of a file with that name hold."""
    kind = Path(path).suffix.lower().lstrip(".")
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


def _once(pairs: Sequence[tuple[str, Any]]) -> None:
    """Raise ValueError where a table has a key twice, of which readers of JSON take the last."""
    found: set[str] = set()
    for key, _ in pairs:
        if key in found:
            raise reading.twice(key)
        found.add(key)


def _decode(kind: str, raw: bytes) -> Any:
    if kind == "toml":
        return reading.read_toml(raw)
    if kind == "json":
        import json

        data = reading.read_json(raw)
        json.loads(raw, object_pairs_hook=_once)
        return data
    try:
        return reading.read_yaml(raw)
    except ImportError:
        raise PlannerError(
            "from", None, "reading YAML needs PyYAML, which is not installed", "Install meshwright[yaml]"
        ) from None
