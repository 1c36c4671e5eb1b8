"""Every key of a file by itself: the option it became and its value, or the class it is in and the reason; and defaults
that count where a key is absent.

Not here: reading the file (the formats), or how this is shown (planner/views/keys.py).
"""

from __future__ import annotations

from typing import Any, Literal, get_args

import msgspec

from planner.ask.fromfile.deepspeed import OfHidden
from planner.ask.fromfile.sheet import Ignored, OptionLine, Understood, said

KeyKind = Literal["option", "default", "decides", "adds", "takes", "time", "harmless", "unknown"]
"""What a key is: one that sets an option, a default of an absent one, one of a class, or in none."""
ORDER: tuple[KeyKind, ...] = get_args(KeyKind)
OF_MEMORY: dict[str, KeyKind] = {"more": "adds", "less": "takes", "decides": "decides"}


class ExplainedKey(msgspec.Struct, frozen=True):
    """A key with its value in the file; `becomes` is the option's value, and empty where it sets none. A default has
    no key."""

    key: str
    value: Any
    kind: KeyKind
    option: str = ""
    becomes: Any = None
    why: str = ""
    fix: str = ""


def explained(found: Understood) -> tuple[ExplainedKey, ...]:
    """All keys of files as they were read, by what they are."""
    keys = [one for line in found.lines for one in _of_line(line, found.values)]
    keys += [
        ExplainedKey(one.key, one.value, _kind(one), why=one.why, fix=one.fix) for one in found.ignored
    ]  # fmt: skip
    return tuple(sorted(keys, key=lambda one: ORDER.index(one.kind)))


def _of_line(line: OptionLine, data: dict[str, Any]) -> list[ExplainedKey]:
    value = line.value.text if isinstance(line.value, OfHidden) else said(line.value)
    if isinstance(value, tuple):
        value = " or ".join(map(str, value))
    if not line.keys:
        return [ExplainedKey("", None, "default", line.option, value, line.note)]
    return [ExplainedKey(key, data.get(key), "option", line.option, value, line.note) for key in line.keys]


def _kind(one: Ignored) -> KeyKind:
    if one.effect == "unknown":
        return "unknown"
    if one.effect == "none":
        return "harmless"
    return OF_MEMORY.get(one.memory, "time")


def as_json(found: Understood, keys: tuple[ExplainedKey, ...]) -> bytes:
    """keys/1."""
    rows = [msgspec.structs.asdict(one) for one in keys]
    return msgspec.json.encode({"schema": "keys/1", "path": found.path, "format": found.format, "keys": rows})
