"""Find the TOML file of a preset by name, id or alias, and read it.

Folders are searched in order: those given, those of MESHWRIGHT_PRESETS, the packaged one, those of packages that bring
engines; the first that has the name wins. Not here: what the files hold (presets.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

import planner
from planner.basics import reading
from planner.basics.errors import PlannerError, did_you_mean, refusing
from planner.basics.names import check_name, check_texts, name_rule
from planner.spec.engines import NOT_SHIPPED, PACKAGED, find_packaged, unknown_engine

KINDS = ("models", "gpus", "nodes", "clusters", "runtimes", "kernels", "calibrations")
ENVIRONMENT = "MESHWRIGHT_PRESETS"
FOR_READERS = ("source", "sources")
"""Keys whose values are sentences; every other text of a preset is a name."""

T = TypeVar("T")
Folders = Sequence[str | os.PathLike[str]]


def names(kind: str, *, folders: Folders = ()) -> list[str]:
    """Every id of one kind, sorted; aliases are not ids."""
    found = {path.stem for folder in search_path(folders) for path in (folder / known_kind(kind)).glob("*.toml")}
    return sorted(check_name(stem, kind, "Rename the file") for stem in found - {"aliases"})


def known_kind(kind: str) -> str:
    """The kind of presets, if there is such a one."""
    if kind not in KINDS:
        raise PlannerError("kind", kind, "is not a kind of preset", did_you_mean(kind, KINDS))
    return kind


@cache
def packaged() -> Path:
    """presets/ inside the package when installed from a wheel, beside it in a source checkout."""
    package = Path(planner.__file__).parent
    inside = package / "presets"
    return inside if inside.is_dir() else package.parent / "presets"


def search_path(folders: Folders) -> list[Path]:
    """Folders in the order in which a name is looked for."""
    given = [("presets", Path(folder)) for folder in folders]
    listed = os.environ.get(ENVIRONMENT, "")
    given += [(ENVIRONMENT, Path(folder)) for folder in listed.split(os.pathsep) if folder]
    for field, folder in given:
        if not folder.is_dir():
            raise PlannerError(field, folder, "is not a folder", "Name a folder laid out like presets/")
    return [*(folder for _, folder in given), packaged(), *(Path(one.presets) for one in PACKAGED.values())]


def by_path(kind: str, name: str, folders: Folders) -> tuple[str, Folders]:
    """A name that a person gave as the path of a preset's file, as the name and the folders that find that file."""
    if not name.endswith(".toml"):
        return name, folders
    path = Path(name)
    one = kind.removesuffix("s")
    if not path.is_file():
        raise PlannerError(one, name, "is not a file", f"Name a preset, or a file {kind}/NAME.toml")
    if path.absolute().parent.name != kind:
        rule = f"must stand in a folder {kind}/ beside the presets it names"
        raise PlannerError(one, name, rule, f"Move it to {kind}/{path.name}")
    return check_name(path.stem, one, "Rename the file"), (path.absolute().parents[1], *folders)


def find_file(kind: str, name: str, folders: Folders) -> Path | None:
    """The file of an id, or else of an alias."""
    wanted = name.lower()
    return _file_of(kind, wanted, folders) or _file_of(kind, merged_aliases(kind, folders).get(wanted, ""), folders)


def _file_of(kind: str, wanted: str, folders: Folders) -> Path | None:
    # A name is never a path: "../secrets" is unknown, not a file elsewhere.
    if not wanted or wanted == "aliases" or name_rule(wanted) or set(wanted) & {"/", "\\"}:
        return None
    paths = (folder / kind / f"{wanted}.toml" for folder in search_path(folders))
    return next((path for path in paths if path.is_file()), None)


def found_file(kind: str, name: str, folders: Folders) -> Path:
    """The file of an id or alias, or a refusal that names the nearest."""
    path = find_file(kind, name, folders)
    if path is None and kind in ("runtimes", "kernels"):
        find_packaged()
        path = find_file(kind, name, folders)
    if path is not None:
        return path
    if kind == "runtimes" and name in NOT_SHIPPED:
        raise unknown_engine("runtime", name)
    known = {*names(kind, folders=folders), *merged_aliases(kind, folders)}
    advice = did_you_mean(name, known) if known else f"No {kind} are installed"
    one = kind if kind == "kernels" else kind.removesuffix("s")
    raise PlannerError(one, name, f"is not among the {kind} known here", advice)


def merged_aliases(kind: str, folders: Folders) -> dict[str, str]:
    """Alias -> id over all folders, the first folder winning."""
    merged: dict[str, str] = {}
    for folder in reversed(search_path(folders)):
        if (path := folder / kind / "aliases.toml").is_file():
            merged.update(checked(read_toml(path), dict[str, str], path))
    return merged


def read_toml(path: Path) -> dict[str, Any]:
    """A TOML file whose numbers are all finite."""
    with refusing(OSError, "preset", path, "cannot be read", "Name a TOML file"):
        text = reading.read_bytes(path, reading.SETTINGS_BYTES)
    with refusing(ValueError, str(path), None, "is not TOML", "Copy a neighbouring file and edit it"):
        raw = reading.read_toml(text)
    for key, value in _no_numbers(raw):
        raise PlannerError(f"{path}: {key.removeprefix('.')}", value, "is not a sensible number")
    check_texts(raw, str(path), free=FOR_READERS)
    return raw


def _no_numbers(table: dict[str, Any] | list[Any]) -> Iterator[tuple[str, float]]:
    """(key, value) of what is infinite, as good as infinite, or no number."""
    for name, value in table.items() if isinstance(table, dict) else enumerate(table):
        if isinstance(value, dict | list):
            inner = _no_numbers(value)
        elif isinstance(value, int | float) and not abs(value) < 1e30:  # false for nan as well
            inner = iter([("", value)])
        else:
            continue
        for key, number in inner:
            yield (f".{name}{key}" if isinstance(table, dict) else f"[{name}]{key}"), number


def checked(raw: Any, type_: type[T], path: Path, table: str = "") -> T:
    """`raw` as `type_`, or a refusal that names file, key and rule."""
    try:
        return msgspec.convert(raw, type_)
    except msgspec.ValidationError as error:
        rule, _, place = str(error).partition(" - at `$")
        key = ".".join(part for part in (table, place.strip(".`")) if part)
        advice = "presets/README.md says what each key means"
        if unknown := rule.partition("unknown field `")[2].rstrip("`"):
            if not key:
                advice = did_you_mean(unknown, getattr(type_, "__struct_fields__", ()))
            key, rule = f"{key}.{unknown}".strip("."), "is not a key of this kind of preset"
        value = raw
        for part in key.split("."):
            value = value.get(part) if isinstance(value, dict) else None
        raise PlannerError(f"{path}: {key}" if key else str(path), value, rule, advice) from None
