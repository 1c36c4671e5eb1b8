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

Form = Literal["text", "tokens", "json", "parquet", "texts", "jsons", "parquets", "dataset"]
"""A .txt, a .bin of ids, rows of JSON (an array or a line each), parquet, a folder of files of one of these, a folder
of `datasets`."""

SUFFIXES: dict[str, Form] = {
    ".txt": "text", ".bin": "tokens", ".jsonl": "json", ".json": "json", ".parquet": "parquet",
}  # fmt: skip
FOLDERS: dict[Form, Form] = {"json": "jsons", "parquet": "parquets"}
"""Forms of files whose folder is a form too, beside that of .txt files."""
BY_DATASETS = ("parquet", "parquets", "dataset")
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
SPLITS = {"train", "training", "test", "testing", "valid", "validation", "val", "dev", "eval"}
"""Words in the names of files that are parts of one data set, of which a run trains on one."""
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


def files_in(folder: Path) -> list[Path]:
    """The data files that lie in a folder of them, in the order of their rows: by name."""
    return sorted(one for one in folder.iterdir() if SUFFIXES.get(one.suffix) in FOLDERS and not one.is_dir())


def holds_chats(path: Path, form: Form) -> bool:
    """Whether its first and last bytes, or a data set's own description, name columns of messages."""
    if form == "dataset":
        info = path / "dataset_info.json"
        return info.is_file() and CHATS.search(_head(info)) is not None
    if form == "parquet":
        with reading.opened(path) as file:
            file.seek(max(0, path.stat().st_size - LOOKED_AT))
            return CHATS.search(file.read(LOOKED_AT)) is not None
    if form in FOLDERS.values():
        return any(holds_chats(one, SUFFIXES[one.suffix]) for one in files_in(path))
    return form == "json" and re.search(rb'"(messages|conversations)"\s*:\s*\[', _head(path)) is not None


def _of_folder(path: Path, field: str) -> Form:
    if (path / "dataset_dict.json").is_file():
        splits = sorted(one.name for one in path.iterdir() if (one / "state.json").is_file())
        rule = f"holds the splits {', '.join(splits)}" if splits else "holds no split"
        raise PlannerError(field, path, rule, f"Name one of them: {path / (splits[0] if splits else 'train')}")
    if (path / "state.json").is_file():
        return "dataset"
    files = files_in(path)
    if any(path.rglob("*.txt")):
        if rows := next((one for one in files if one.suffix != ".json"), None):
            rule = f"holds .txt files and {rows.name}, of which only one kind would be read"
            raise PlannerError(field, path, rule, "Give each kind a folder of its own")
        return "texts"
    if not files:
        rule = "is a folder without .txt, .json, .jsonl or .parquet files, and no data set of save_to_disk"
        raise PlannerError(field, path, rule, "Give a file, or the folder that holds the files")
    return _of_files(path, files, field)


def _of_files(path: Path, files: list[Path], field: str) -> Form:
    first, *others = files
    form = form_of(first, field)
    if other := next((one for one in others if form_of(one, field) != form), None):
        rule = f"holds {first.name} and {other.name}, of which only one kind would be read"
        raise PlannerError(field, path, rule, "Give each kind a folder of its own")
    words = {one: SPLITS.intersection(re.split(r"[^a-z]+", one.stem.lower())) for one in files}
    if len(splits := sorted(set().union(*words.values()))) > 1:
        trained = next((one for one in files if words[one] & {"train", "training"}), first)
        raise PlannerError(field, path, f"holds the splits {', '.join(splits)}", f"Name one of them: {trained}")
    return FOLDERS[form]


def _refuse(path: Path, field: str, suffix: str) -> Form:
    line = CONVERTED.get(suffix, "")
    if suffix:
        rule, fix = f"must end in {', '.join(SUFFIXES)}", f"Convert it: {line.replace('FILE', str(path))}"
    else:
        rule, fix = f"does not hold {path.suffix}", "Rename it after its format"
    raise PlannerError(field, path, rule, fix if line or not suffix else "Rename it or convert it")


def _head(path: Path) -> bytes:
    with reading.opened(path) as file:
        return file.read(LOOKED_AT)
