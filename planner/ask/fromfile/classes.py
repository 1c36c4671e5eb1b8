"""What a key that sets no option does to a figure: the tables of keys/, one a format, and how a key is looked up there.

A table sorts patterns of keys: `harmless`, `time` (memory stays as it is), `adds` and `takes` memory, and `decides`,
without which there is no answer. Not here: keys that set options (a module a format), or any file of a person's.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal, NamedTuple

KeyClass = Literal["harmless", "time", "adds", "takes", "decides"]
SORTED: tuple[KeyClass, ...] = ("decides", "adds", "takes", "time")
"""Those that carry a reason."""


class Meaning(NamedTuple):
    """One class, with the reason. `rest` are values at which the key asks for nothing; `by` are the options that answer
    in its place, and `fix` is the nearest way out of what decides.
    """

    kind: KeyClass
    why: str
    fix: str = ""
    by: tuple[str, ...] = ()
    rest: tuple[Any, ...] = ()


Classes = tuple[tuple[str, Meaning], ...]
"""(pattern, what it means), the narrowest first."""

NONE: Classes = ()


@lru_cache(maxsize=16)
def classes(name: str) -> Classes:
    """The table of a format, those that it includes under their section."""
    table = tomllib.loads(files(__package__).joinpath(f"keys/{name}.toml").read_text("utf-8"))
    found = [pair for kind in SORTED for pair in _of_kind(kind, table.get(kind, {}))]
    found += [(pattern, Meaning("harmless", "")) for pattern in table["harmless"]]
    for other, prefix in table.get("include", {}).items():
        found += [(f"{prefix}{pattern}", meaning) for pattern, meaning in classes(other)]
    return tuple(sorted(found, key=lambda pair: -len(pair[0].replace("*", ""))))


def _of_kind(kind: KeyClass, table: Mapping[str, Any]) -> list[tuple[str, Meaning]]:
    said = {pattern: {"why": one} if isinstance(one, str) else one for pattern, one in table.items()}
    return [
        (
            pattern,
            Meaning(
                kind,
                one["why"],
                one.get("fix", ""),
                tuple(one.get("by", ())),
                tuple(one.get("rest", ())),
            ),
        )
        for pattern, one in said.items()
    ]


def meaning(found: Classes, key: str) -> Meaning | None:
    """What a key means; None where it is in no class."""
    return next((one for pattern, one in found if fnmatchcase(key, pattern)), None)
