"""docs/formats/: for each format of other tools the keys that are read and the fields that are written, and one table
of what each format can say.

Everything is of the tables that readers and writers use (planner/ask/fromfile, planner/ask/tofile). Not here: how a
file is read or written.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from planner.ask import fromfile, tofile
from planner.ask.fromfile.classes import classes
from planner.ask.fromfile.sheet import Means
from planner.ask.tofile.fields import FIELDS, told
from planner.ask.tofile.table import FieldKeys

FOLDER = "formats"
INDEX = "what-formats-say.md"
HEADS = {
    "decides": "Keys that decide",
    "adds": "Keys that add memory",
    "takes": "Keys that take memory away",
    "time": "Keys that change time alone",
}
WRITTEN = "This page is written by `make docs` from the tables that the planner reads and writes by.\n"


def texts(docs: Path) -> dict[Path, str]:
    """Every page by its path."""
    found = {docs / FOLDER / INDEX: _index()}
    for word in _words():
        found[docs / FOLDER / f"{word}.md"] = _page(word)
    return found


def _readers() -> dict[str, ModuleType]:
    return {one.KEYS: one for one in fromfile.FORMATS}


def _words() -> list[str]:
    return sorted({*_readers(), *tofile.FORMATS})


def _name(word: str) -> str:
    return str((tofile.FORMATS.get(word) or _readers()[word]).NAME)


def _index() -> str:
    kinds = tofile.FORMATS
    head = ["| field | " + " | ".join(f"[{kind.NAME}]({word}.md)" for word, kind in kinds.items()) + " |"]
    head.append("|---" * (len(kinds) + 1) + "|")
    rows = []
    for field in FIELDS:
        cells = [_cell(tofile.rows_of(kind).get(field, ())) for kind in kinds.values()]
        if any(cells):
            rows.append(f"| `{field}` | {' | '.join(cells)} |")
    about = (
        "Fields of a plan by the names of the planner's options, and whether `planner config --to` has a key for them: "
        "*yes*, or the values that have a word. A recipe is written with its launcher's files, whose keys count."
    )
    return "\n".join(["# What each format can say", "", WRITTEN, about, "", *head, *rows, ""])


def _cell(rows: tuple[FieldKeys, ...]) -> str:
    if not rows:
        return ""
    if any(not row.words for row in rows):
        return "yes"
    return ", ".join(dict.fromkeys(told(value) for row in rows for value in row.words if value is not None))


def _page(word: str) -> str:
    parts = [f"# {_name(word)}", "", WRITTEN]
    reader = _readers().get(word)
    if reader is not None:
        parts += ["`planner estimate --from` reads it; `--explain-keys` prints the same of one file.", ""]
    if word in tofile.FORMATS:
        parts += [f"`planner config PLAN --to {word}` writes it.", "", *_written(tofile.FORMATS[word])]
    if reader is not None:
        parts += _read(reader)
    return "\n".join(parts)


def _written(kind: ModuleType) -> list[str]:
    head = ["## Fields that are written", "", "| field | keys | values |", "|---|---|---|"]
    rows = []
    for field, says in tofile.rows_of(kind).items():
        keys = dict.fromkeys(f"`{key}`" for row in says for key in row.keys)
        rows.append(f"| `{field}` | {', '.join(keys)} | {'any' if _cell(says) == 'yes' else _cell(says)} |")
    engines = f"Plans of the engines {', '.join(f'`{name}`' for name in kind.ENGINES)}."
    return [engines, "", *head, *rows, ""]


def _read(reader: ModuleType) -> list[str]:
    plain: Mapping[str, Means] = getattr(reader, "PLAIN", {})
    found: list[str] = []
    if plain:
        found += ["## Keys that are one option", "", "| key | option | where it is absent |", "|---|---|---|"]
        found += [f"| `{key}` | `{one.option}` | {_absent(one.absent)} |" for key, one in plain.items()]
        found.append("")
    known = classes(reader.KEYS)
    for kind, title in HEADS.items():
        own = sorted((pattern, one) for pattern, one in known if one.kind == kind)
        if own:
            found += [f"## {title}", "", "| key | why |", "|---|---|"]
            found += [f"| `{key}` | {'. '.join(filter(None, (one.why, one.fix)))} |" for key, one in own]
            found.append("")
    harmless = sorted(f"`{pattern}`" for pattern, one in known if one.kind == "harmless")
    return [*found, "## Keys that change neither memory nor time", "", ", ".join(harmless) + ".", ""]


def _absent(value: Any) -> str:
    return "" if value is None else f"`{told(value)}`"
