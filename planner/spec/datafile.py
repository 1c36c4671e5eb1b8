"""What a data file or folder is, by its name and first bytes: one of the forms that can be trained on, or a refusal.

No package is needed for that, so it is said when a plan is made. Not here: reading it (executor/preflight/files.py), or
what a row must be (executor/preflight/examples.py).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from planner.basics import reading
from planner.basics.errors import PlannerError, refusing

Form = Literal["text", "tokens", "json", "parquet", "texts", "dataset"]
"""A .txt, a .bin of ids, rows of JSON (an array or a line each), parquet, a folder of .txt, a folder of `datasets`."""

SUFFIXES: dict[str, Form] = {
    ".txt": "text", ".bin": "tokens", ".jsonl": "json", ".json": "json", ".parquet": "parquet",
}  # fmt: skip
BY_DATASETS = ("parquet", "dataset")
"""Forms that the package `datasets` reads."""
STREAMS = ("text", "tokens")

_LOADED = "python -c \"from datasets import load_dataset; load_dataset('{}', data_files='FILE')['train'].to_json('FILE.jsonl')\""  # noqa: E501
CONVERTED = {
    ".csv": _LOADED.format("csv"),
    ".tsv": _LOADED.format("csv").replace("'FILE')", "'FILE', sep='\\t')"),
    ".arrow": _LOADED.format("arrow"),
    ".gz": "gunzip FILE",
    ".zst": "unzstd FILE",
    ".xz": "unxz FILE",
    ".zip": "unzip FILE",
}
"""What makes a readable file of others that people have."""
PACKED = {b"\x1f\x8b": ".gz", b"PK\x03\x04": ".zip", b"\x28\xb5\x2f\xfd": ".zst", b"\xfd7zXZ": ".xz"}
"""How packed files begin, whatever their name."""
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
LOOKED_AT = 2**16
CHATS = re.compile(rb"\bmessages\b|\bconversations\b")


def form_of(path: Path, field: str) -> Form:
    """The form of a file or folder that is there. PlannerError for any other, with what converts it."""
    with refusing(OSError, field, path, "cannot be read", "Check its permissions"):
        if path.is_dir():
            return _of_folder(path, field)
        if not path.is_file():
            raise PlannerError(field, path, "is neither a file nor a folder", "Give a path that every node can read")
        head = _head(path)
    suffix = next((found for magic, found in PACKED.items() if head.startswith(magic)), path.suffix)
    form = SUFFIXES.get(suffix)
    begins = head.removeprefix(BYTE_ORDER_MARK).lstrip()[:1]
    if form is None or (form != "tokens" and (form == "parquet") != head.startswith(b"PAR1") and head):
        return _refuse(path, field, suffix if form is None else "")
    if form == "json" and begins and begins not in b"[{":
        rule = "is not JSON: it begins with neither { nor ["
        raise PlannerError(field, path, rule, "Write a list of objects, or one object a line")
    return form


def check_name(path: Path, field: str) -> None:
    """Refuse the name of a file that is not here, if no file of that name could be read."""
    if path.suffix in CONVERTED:
        _refuse(path, field, path.suffix)


def holds_chats(path: Path, form: Form) -> bool:
    """Whether its first and last bytes, or a data set's own description, name columns of messages."""
    if form == "dataset":
        info = path / "dataset_info.json"
        return info.is_file() and CHATS.search(_head(info)) is not None
    if form == "parquet":
        with reading.opened(path) as file:
            file.seek(max(0, path.stat().st_size - LOOKED_AT))
            return CHATS.search(file.read(LOOKED_AT)) is not None
    return form == "json" and re.search(rb'"(messages|conversations)"\s*:\s*\[', _head(path)) is not None


def _of_folder(path: Path, field: str) -> Form:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(one.name for one in path.iterdir() if (one / "state.json").is_file())
        rule = f"holds the splits {', '.join(splits)}" if splits else "holds no split"
        raise PlannerError(field, path, rule, f"Name one of them: {path / (splits[0] if splits else 'train')}")
    if (path / "state.json").is_file():
        return "dataset"
    if any(path.rglob("*.txt")):
        return "texts"
    files = sorted(one for one in path.iterdir() if one.suffix in SUFFIXES)
    rule = "is a folder with neither .txt files nor a data set of save_to_disk"
    raise PlannerError(field, path, rule, f"Name a file in it: {files[0]}" if files else "Give a file")


def _refuse(path: Path, field: str, suffix: str) -> Form:
    line = CONVERTED.get(suffix, "")
    if suffix:
        rule, fix = f"must end in {', '.join(SUFFIXES)}", f"Convert it: {line.replace('FILE', str(path))}"
    else:
        rule, fix = f"is not what its name says, {path.suffix}", "Give it the ending of what it holds"
    raise PlannerError(field, path, rule, fix if line or not suffix else "Rename it or convert it")


def _head(path: Path) -> bytes:
    with reading.opened(path) as file:
        return file.read(LOOKED_AT)
