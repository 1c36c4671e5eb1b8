"""Rows of data files as people have them: JSON in lines or one array, parquet, folders of them, of text or `datasets`.

JSON is decoded here and not by `datasets`, whose reader makes timestamps of answers that look like a date; parquet and
its own folders it reads offline, and nothing of them is run. Not here: which of the forms a file is
(planner/spec/datafile.py), or what a row must hold (examples.py).
"""

from __future__ import annotations

import glob
import importlib.util
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from planner.basics import reading
from planner.basics.errors import PlannerError, refusing
from planner.basics.reading import NOT_JSON
from planner.spec.datafile import BY_DATASETS, BYTE_ORDER_MARK, LOOKED_AT, files_in, form_of

DataRow = tuple[str, bytes | dict[str, Any]]
"""The place that names a row in a refusal; the row, or its line of JSON."""
PACKAGE = "datasets"


def rows_of(path: Path, field: str) -> Iterator[DataRow]:
    """Every row of a file in its order, those of a folder by the names of its files."""
    return _READERS[form_of(path, field)](path, field)


def object_of(row: DataRow, field: str) -> dict[str, Any]:
    """A row's values; keys without a value, which parquet has for every row, are left out."""
    place, found = row
    if isinstance(found, bytes):
        with refusing(NOT_JSON, field, place, "is not JSON", "Write one JSON object a line"):
            found = msgspec.json.decode(found)
    if not isinstance(found, dict):
        raise PlannerError(field, place, "is not a JSON object", "Write one JSON object a line")
    return {key: value for key, value in found.items() if value is not None}


def size_of(row: DataRow) -> int:
    """Bytes of a row as JSON: which are long, before anything is tokenised."""
    return len(row[1] if isinstance(row[1], bytes) else msgspec.json.encode(row[1], enc_hook=str))


def check_reader(path: Path, field: str) -> None:
    """Refuse (exit code 3) a form whose package is not installed."""
    if form_of(path, field) in BY_DATASETS and importlib.util.find_spec(PACKAGE) is None:
        rule = f"is read by the package {PACKAGE}, which is not installed"
        raise PlannerError(field, path, rule, f"pip install {PACKAGE}, or give a .jsonl file", exit_code=3)


def _json(path: Path, field: str) -> Iterator[DataRow]:
    with reading.opened(path) as file:
        begin = file.read(LOOKED_AT).removeprefix(BYTE_ORDER_MARK).lstrip()[:1]
    if begin != b"[":
        with refusing(OSError, field, path, "cannot be read", "Give a file of shorter lines"):
            for number, line in enumerate(reading.read_lines(path), 1):
                if line.strip():
                    yield f"{path.name} line {number}", line.removeprefix(BYTE_ORDER_MARK) if number == 1 else line
    else:
        with refusing((OSError, ValueError), field, path, "is not JSON", "Write a list of objects, or one a line"):
            raw = reading.read_bytes(path, reading.LOG_BYTES)
            found: Any = reading.read_json(raw.removeprefix(BYTE_ORDER_MARK))
        yield from ((f"{path.name} example {number}", one) for number, one in enumerate(found, 1))


def _folder(path: Path, field: str) -> Iterator[DataRow]:
    for file in files_in(path):
        yield from rows_of(file, field)


def _begins(path: Path) -> bytes:
    """The first byte that is not blank."""
    with reading.opened(path) as file:
        return file.read(LOOKED_AT).removeprefix(BYTE_ORDER_MARK).lstrip()[:1]


def _texts(path: Path, field: str) -> Iterator[DataRow]:
    for file in sorted(path.rglob("*.txt")):
        yield str(file.relative_to(path)), {"text": text_of(file, field)}


def text_of(path: Path, field: str) -> str:
    """A file's text. PlannerError where it is none."""
    try:
        with refusing(OSError, field, path, "cannot be read", "Check its permissions"), reading.opened(path) as file:
            return file.read().decode()
    except UnicodeDecodeError:
        raise PlannerError(field, path, "is not UTF-8 text", "Convert it, or give a .bin file of token ids") from None


def _parquet(path: Path, field: str) -> Iterator[DataRow]:
    name = glob.escape(str(path.absolute()))
    return _by_datasets(
        path, field, lambda package: package.load_dataset("parquet", data_files=name, split="train", streaming=True)
    )


def _dataset(path: Path, field: str) -> Iterator[DataRow]:
    return _by_datasets(path, field, lambda package: package.load_from_disk(str(path)).with_format(None))


def _by_datasets(path: Path, field: str, load: Callable[[Any], Any]) -> Iterator[DataRow]:
    check_reader(path, field)
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ[name] = "1"
    import datasets  # a second and a half, and only where a file needs it

    rows = enumerate(_read(path, field, lambda: load(datasets)), 1)
    yield from ((f"{path.name} row {number}", row) for number, row in rows)


def _read(path: Path, field: str, load: Callable[[], Any]) -> Iterator[dict[str, Any]]:
    try:
        yield from load()
    except Exception as error:  # the library raises many kinds for a broken file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise PlannerError(field, path, f"cannot be read ({reason})", "Write it again, or as .jsonl") from None


def _none(path: Path, field: str) -> Iterator[DataRow]:
    raise PlannerError(field, path, "is a stream, without rows", "Give a .jsonl file, a document a line")


_READERS: dict[str, Callable[[Path, str], Iterator[DataRow]]] = {
    "json": _json, "jsons": _folder, "texts": _texts, "parquet": _parquet, "parquets": _folder, "dataset": _dataset,
    "text": _none, "tokens": _none,
}  # fmt: skip
