"""What is in a file or folder, as one digest: cheap enough to be compared on every node before a run starts.

An input of at most 256 MiB is read whole; of a larger one, each file's size and 32 blocks of 32 KiB spread evenly over
it. That tells one data file or checkpoint from another, not a flipped bit (docs/decisions/0020-digests-of-inputs.md).
Names and times play no part beyond a folder's own file names. Not here: which inputs a plan has (inputs.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import msgspec

from planner.basics import reading

WHOLE_BYTES = 256 * 2**20
"""Largest input that is read whole: a tenth of a second to a second."""
BLOCKS, BLOCK_BYTES = 32, 32 * 2**10
WHOLE, SAMPLED = "sha256", "sampled-sha256"

NOT_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""What decoding raises for bytes that are not JSON, or JSON of another shape: msgspec lets the last two through."""

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENS_FILES = ("tokenizer*", "*.model", "*.tiktoken", "vocab*", "merges.txt")
"""One of which every tokenizer's folder has."""
TOKENIZER_FILES = (
    *TOKENS_FILES, "added_tokens.json", "special_tokens_map.json", "chat_template*", "additional_chat_templates/*",
    "config.json",
)  # fmt: skip
"""What Transformers reads of a tokenizer's folder, which often holds a whole model as well."""


class Content(msgspec.Struct, frozen=True):
    """A digest with its kind before the colon, and the bytes in all."""

    digest: str
    bytes: int


def content_of(path: Path, kind: str) -> Content | None:
    """The content of an input of that kind (data, validation_data, tokenizer, checkpoint); None where there is none.

    Raises OSError for what is there and cannot be read.
    """
    if path.is_dir():
        patterns = TOKENIZER_FILES if kind == "tokenizer" else ("**/*",)
        names = _checkpoint_files(path) if kind == "checkpoint" else _matching(path, patterns)
        return _of_files(path, names) if names else None
    return _of_files(path.parent, [path.name], named=False) if path.is_file() else None


def holds_tokenizer(folder: Path) -> bool:
    """Whether a folder has a tokenizer's files."""
    return bool(_matching(folder, TOKENS_FILES))


def _of_files(folder: Path, names: Iterable[str], *, named: bool = True) -> Content:
    import hashlib  # OpenSSL takes milliseconds to load, and most questions make no plan

    sizes = {name: (folder / name).stat().st_size for name in sorted(names)}
    whole = sum(sizes.values()) <= WHOLE_BYTES
    sums = hashlib.sha256()
    for name, size in sizes.items():
        one = hashlib.sha256()
        for part in _parts(folder / name, size, whole=whole):
            one.update(part)
        sums.update(f"{name if named else ''}\0{size}\0{one.hexdigest()}\n".encode())
    return Content(f"{WHOLE if whole else SAMPLED}:{sums.hexdigest()}", sum(sizes.values()))


def _parts(path: Path, size: int, *, whole: bool) -> Iterable[bytes]:
    with reading.opened(path) as stream:
        if whole or size <= BLOCKS * BLOCK_BYTES:
            while part := stream.read(2**20):
                yield part
            return
        for block in range(BLOCKS):
            stream.seek((size - BLOCK_BYTES) * block // (BLOCKS - 1))
            yield stream.read(BLOCK_BYTES)


def _matching(folder: Path, patterns: Iterable[str]) -> list[str]:
    found = {path.relative_to(folder).as_posix() for each in patterns for path in folder.glob(each) if path.is_file()}
    return sorted(found)


def _checkpoint_files(folder: Path) -> list[str]:
    """The configuration and the weights that would be loaded: other files beside them do not count."""
    found = _matching(folder, ("config.json", SINGLE))
    if SINGLE in found or not (folder / INDEX).is_file():
        return found
    try:
        names = set(weight_map(folder / INDEX).values())
    except ValueError:
        names = set()  # what is wrong with it is said where it is checked
    return sorted({*found, INDEX, *(name for name in names if (folder / name).is_file())})


def weight_map(index: Path) -> dict[str, str]:
    """The file of each weight, by the index of a folder (OSError; ValueError for none, and for a name that leaves the
    folder)."""
    found = reading.read_json(reading.read_bytes(index))
    table = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(table, dict) or not table:
        raise ValueError("has no weight_map")
    if outside := [name for name in table.values() if not reading.inside(name)]:
        raise ValueError(f"names {ascii(outside[0])[:80]}, which is not a file of its folder")
    return table
