"""Files that a person or a stranger gives: opened without waiting for anybody, read to a bound, decoded to a depth.

What is wrong with a file is an OSError, what is wrong with its shape a ValueError, whose words end the caller's
refusal. Not here: what a file means, or writing one (output.py).
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from planner.basics.output import KINDS

MIB = 2**20
SETTINGS_BYTES = MIB
"""Largest file that a person writes by hand: presets, host files, configurations for --from. The longest is 60 KB."""
RECORD_BYTES = 32 * MIB
"""Largest file that a program writes as one value: plans, records of runs, indices (DeepSeek-V3's is 9 MB)."""
TABLE_BYTES = 256 * MIB
"""Largest table of lines, and largest tokenizer.json (Gemma 3's is 33 MB)."""
LOG_BYTES = 1024 * MIB
"""Largest metrics.jsonl: five million steps."""
LINE_BYTES = 16 * MIB
"""Longest line of a table, log or data file: a book of 2,000 pages is 5 MB."""
TOML_LINE = 16 * 1024
"""Longest line of TOML: the standard library's reader takes the square of a dotted key's parts."""
DEPTH = 64
"""Deepest nesting: files people have reach 12 (plans)."""
ALIASED = 100_000
"""Most values of a YAML file, each counted as often as an alias repeats it."""
MERGED = "<<"
"""YAML's key of a table that is merged in, which may come several times."""

FilePath = str | os.PathLike[str]


def opened(path: FilePath) -> BufferedReader:
    """A file, open for reading bytes; OSError for a folder, device, pipe or socket, none of which is waited for."""
    try:
        _check_kind(os.stat(path).st_mode, path)  # before it is opened, which some devices act upon
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    except ValueError:  # a NUL, or half of a surrogate pair
        raise OSError(errno.EINVAL, "is not a name of a file", ascii(os.fspath(path))) from None
    try:
        _check_kind(os.fstat(descriptor).st_mode, path)
    except OSError:
        os.close(descriptor)
        raise
    return os.fdopen(descriptor, "rb")


def read_bytes(path: FilePath, most: int = RECORD_BYTES) -> bytes:
    """All of a file of at most `most` bytes (OSError for a larger one, of which no more than that is read)."""
    with opened(path) as stream:
        # No more is asked for than there is: room for what is asked is taken at once.
        raw = stream.read(min(most, os.fstat(stream.fileno()).st_size) + 1)
        while len(raw) <= most and (more := stream.read(MIB)):
            raw += more
    if len(raw) > most:
        raise OSError(errno.EFBIG, f"is larger than {_size(most)}", os.fspath(path))
    return raw


def read_text(path: FilePath, most: int = SETTINGS_BYTES) -> str:
    """The same as UTF-8 (OSError for other bytes)."""
    try:
        return read_bytes(path, most).decode()
    except UnicodeDecodeError as error:
        raise OSError(errno.EILSEQ, f"is not UTF-8 text: byte {error.start}", os.fspath(path)) from None


def read_lines(path: FilePath, longest: int = LINE_BYTES) -> Iterator[bytes]:
    """The lines of a file of any size, line breaks included (OSError for one longer than `longest` bytes)."""
    with opened(path) as stream:
        number = 0
        while line := stream.readline(longest + 1):
            number += 1
            if len(line) > longest:
                raise OSError(errno.EFBIG, f"has a line longer than {_size(longest)}: {number}", os.fspath(path))
            yield line


def inside(name: object) -> bool:
    """Whether a name that a file gives stays in the file's own folder, links apart."""
    if not isinstance(name, str) or not name or not name.isprintable():
        return False
    path = PurePosixPath(name.replace("\\", "/"))
    return not path.is_absolute() and ".." not in path.parts


def read_toml(raw: bytes) -> dict[str, Any]:
    """TOML (ValueError for what is none, or nested deeper than DEPTH)."""
    import tomllib  # milliseconds, and many questions read none

    if any(len(line) > TOML_LINE for line in raw.split(b"\n")):
        raise ValueError(f"has a line longer than {_size(TOML_LINE)}")
    try:
        table = tomllib.loads(raw.decode())
        shallow(table)
        return table
    except RecursionError:
        raise _too_deep() from None


def read_json(raw: bytes) -> Any:
    """JSON with Python's NaN and Infinity, which Transformers writes (ValueError for what is none, or too deep)."""
    try:
        try:
            return shallow(msgspec.json.decode(raw))
        except msgspec.DecodeError as error:
            import json  # for numbers that only it reads, which few files have

            try:
                return shallow(json.loads(raw.decode()))
            except ValueError:
                raise error from None  # its own words: shorter, and the same for every file
    except RecursionError:
        raise _too_deep() from None


def read_yaml(raw: bytes) -> Any:
    """YAML (ValueError for what is none, is too deep, has a key twice, or repeats itself to more than ALIASED values by
    its aliases; ImportError without PyYAML)."""
    _check_yaml(raw)
    return msgspec.yaml.decode(raw)


def yaml_nodes(text: str) -> Any:
    """The nodes of a YAML text that has been read, each with the marks where it begins and ends (ValueError for signs
    that YAML has not and JSON has; ImportError without PyYAML)."""
    import yaml

    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def shallow(value: Any, depth: int = DEPTH) -> Any:
    """The value itself, where its lists and tables are nested at most so deep (ValueError)."""
    level = [value]
    for _ in range(depth + 1):
        inner = (one.values() if isinstance(one, dict) else one for one in level if isinstance(one, dict | list))
        level = [one for values in inner for one in values]
        if not level:
            return value
    raise _too_deep()


def _check_yaml(raw: bytes) -> None:
    """Walk the events of YAML before anything is made of them: libyaml's composer crashes where nesting is deep."""
    import yaml

    sizes: dict[str, tuple[int, int]] = {}  # by anchor: values in all, depth
    open_nodes: list[list[Any]] = [[None, 0, 0, None]]  # anchor, values, depth of what is inside, keys of a table
    try:
        for event in yaml.parse(raw, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
            if isinstance(event, yaml.CollectionStartEvent):
                open_nodes.append(
                    [event.anchor, 1, 0, _KeysInTurn() if isinstance(event, yaml.MappingStartEvent) else None]
                )
                sizes.pop(event.anchor, None)
                if len(open_nodes) > DEPTH:
                    raise _too_deep()
                continue
            anchor = None
            if isinstance(event, yaml.CollectionEndEvent):
                anchor, values, deep, _ = open_nodes.pop()
                deep += 1
            elif isinstance(event, yaml.ScalarEvent):
                anchor, values, deep = event.anchor, 1, 0
            elif isinstance(event, yaml.AliasEvent):
                if event.anchor not in sizes:
                    raise ValueError(f"has an alias of itself, or of nothing: {event.anchor[:40]}")
                values, deep = sizes[event.anchor]
            else:
                continue
            if anchor is not None:
                sizes[anchor] = values, deep
            outer = open_nodes[-1]
            if outer[3] is not None:
                outer[3].add(event.value if isinstance(event, yaml.ScalarEvent) else None)
            outer[1], outer[2] = outer[1] + values, max(outer[2], deep)
            if outer[1] > ALIASED:
                raise ValueError(f"repeats itself by its aliases to more than {ALIASED} values")
            if len(open_nodes) + deep > DEPTH:
                raise _too_deep()
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


class _KeysInTurn:
    """The keys of a table, whose keys and values come by turns."""

    def __init__(self) -> None:
        self.found: set[str] = set()
        self.next_is_key = True

    def add(self, text: str | None) -> None:
        """The next of both (None: a list, a table or an alias); ValueError for a key that is there."""
        if self.next_is_key and text is not None:
            if text in self.found and text != MERGED:
                raise twice(text)
            self.found.add(text)
        self.next_is_key = not self.next_is_key


def twice(key: str) -> ValueError:
    """What is wrong with a table that has a key twice."""
    return ValueError(f"has the key {key[:40]!r} twice")


def _check_kind(mode: int, path: FilePath) -> None:
    for is_kind, kind in KINDS:
        if is_kind(mode):
            raise OSError(errno.EINVAL, f"is a {kind}, not a file", os.fspath(path))


def _too_deep() -> ValueError:
    return ValueError(f"is nested more than {DEPTH} deep")


def _size(count: int) -> str:
    return f"{count // MIB} MiB" if count >= MIB else f"{count // 1024} KiB"


# -- Contents ----------------------------------------------------------------------------------------------------------

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
    with opened(path) as stream:
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
    found = read_json(read_bytes(index))
    table = found.get("weight_map") if isinstance(found, dict) else None
    if not isinstance(table, dict) or not table:
        raise ValueError("has no weight_map")
    if outside := [name for name in table.values() if not inside(name)]:
        raise ValueError(f"names {ascii(outside[0])[:80]}, which is not a file of its folder")
    return table
