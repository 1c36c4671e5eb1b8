"""A format as a table: for each field of a plan the keys that say it, in which words. A file is written from it, what
the format cannot say is found by it, and the pages of docs/formats/ print it.

Words and keys that the readers know too are theirs, turned around (`inverted`, `keys_of`). Not here: any format's table
(a module each), or how a file looks (text.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

from planner.ask.fromfile import hub
from planner.ask.fromfile.sheet import Means
from planner.ask.tofile.fields import Values

Entries = Mapping[str, Any]
"""Keys of a file, dotted, and their values."""
Write = Callable[[Any, Values], "Entries | None"]
"""From a field's value, and all fields, to the keys that say it; None where there are none for that value."""
FileKind = Literal["yaml", "json", "command"]


class FieldKeys(NamedTuple):
    """How one field is said. `words` are the values that have one; empty where any value can be said."""

    keys: tuple[str, ...]
    write: Write
    words: tuple[Any, ...] = ()


FieldTable = Mapping[str, FieldKeys]


class FileOfFormat(NamedTuple):
    """One file of a format: its usual name and kind, its rows, and keys that are the same for every plan, with why.
    `head` are the words before a command line's options."""

    file: str
    kind: FileKind
    rows: FieldTable
    fixed: Mapping[str, tuple[Any, str]] = {}
    head: Callable[[Values], tuple[str, ...]] = lambda values: ()


def plain(key: str) -> FieldKeys:
    """A key that has the value as it is."""
    return FieldKeys((key,), lambda value, values: {key: value})


def named(key: str) -> FieldKeys:
    """The model: an id of the hub where its preset cites one, else its name."""
    return FieldKeys((key,), lambda value, values: {key: hub.id_of(value) or value})


def flag(key: str, off: bool | None = False) -> FieldKeys:
    """A key that is true where the field is; elsewhere it is `off`, or absent where that is None."""
    return FieldKeys((key,), lambda value, values: {key: True} if value else {} if off is None else {key: off})


def above(key: str, rest: Any) -> FieldKeys:
    """A key that is there where the value is another than at rest."""
    return FieldKeys((key,), lambda value, values: {} if value == rest else {key: value})


def words(key: str, said: Mapping[Any, Any]) -> FieldKeys:
    """A key with a word for each value; a word of None leaves the key out."""
    return forms({value: {} if word is None else {key: word} for value, word in said.items()})


def forms(said: Mapping[Any, Entries]) -> FieldKeys:
    """Several keys for each value."""
    keys = dict.fromkeys(key for entries in said.values() for key in entries)
    return FieldKeys(tuple(keys), lambda value, values: said.get(value), tuple(said))


def follows(key: str, *said: Any) -> FieldKeys:
    """A field of which another field's key says these values."""
    return FieldKeys((key,), lambda value, values: {} if value in said else None, said)


def names(key: str, empty: bool = True) -> FieldKeys:
    """A list of names; left out where there are none and `empty` is false."""
    return FieldKeys((key,), lambda value, values: {key: list(value)} if value or empty else {})


def where(holds: Callable[[Values], bool], row: FieldKeys) -> FieldKeys:
    """A row that says its field in some plans only."""
    return FieldKeys(row.keys, lambda value, values: row.write(value, values) if holds(values) else None, row.words)


def inverted(said: Mapping[str, Any], **chosen: str) -> dict[Any, str]:
    """The reader's words turned around: for each value its first word, or the one that is chosen."""
    found: dict[Any, str] = {}
    for word, value in said.items():
        found.setdefault(value, word)
    return found | {said[word]: word for word in chosen.values()}


def keys_of(table: Mapping[str, Means], *left_out: str) -> dict[str, FieldKeys]:
    """The reader's keys that are one option each, turned around; the first key of an option says it."""
    found: dict[str, FieldKeys] = {}
    for key, one in table.items():
        if one.option not in (*found, *left_out):
            found[one.option] = plain(key)
    return found


def without(rows: FieldTable, left_out: Iterable[str]) -> FieldTable:
    """The rows of other fields."""
    gone = set(left_out)
    return {field: row for field, row in rows.items() if field not in gone}


def entries(rows: FieldTable, values: Values, fields: Iterable[str]) -> dict[str, Any]:
    """The keys of some fields of a plan, those that its engine reads."""
    found: dict[str, Any] = {}
    for field in fields:
        if field in values:
            found |= rows[field].write(values[field], values) or {}
    return found
