"""What presets there are, and one of them with the source of each fact, as `planner presets` shows them.

Not here: finding and reading presets (presets.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from planner.basics.display import Table, as_text
from planner.basics.errors import LONGEST_LINE, PlannerError, shortened
from planner.spec import presets
from planner.spec.options import OPTIONS
from planner.spec.presets import Folders
from planner.views.render import size_text

SCHEMA = "presets/1"
COLUMNS = 110
EXAMPLES = 5
"""Names of a kind that the summary shows, from all of its alphabet."""


def look_up(kind: str | None, name: str | None, folders: Folders) -> dict[str, Any]:
    """Names by kind; or, for one preset, its facts as written and their sources. A name that no preset has stands for
    those that have it in theirs."""
    if kind is None:
        return {"schema": SCHEMA, "names": {one: presets.names(one, folders=folders) for one in presets.KINDS}}
    if kind not in presets.KINDS and name is None and _having("models", kind, folders):
        raise PlannerError("kind", kind, "is not a kind of preset", f"Try planner presets models {kind}")
    if name is None:
        return {"schema": SCHEMA, "names": {kind: presets.names(kind, folders=folders)}}
    if name not in presets.aliases(kind, folders=folders) and (found := _having(kind, name, folders)):
        return {"schema": SCHEMA, "names": {kind: found}}
    facts, sources = presets.as_written(kind, name, folders=folders), presets.provenance(kind, name, folders=folders)
    return {"schema": SCHEMA, "kind": kind, "name": name, "facts": facts, "sources": sources}


def _having(kind: str, part: str, folders: Folders) -> list[str]:
    """The presets with that in their names; none where it is the name of one."""
    names = presets.names(kind, folders=folders)
    return [] if part in names else [name for name in names if part.lower() in name.lower()]


def models_text(names: Sequence[str], folders: Folders, width: int | None = None) -> str:
    """Models as a table: how large they are, and their other names."""
    also: dict[str, list[str]] = {}
    for alias, name in presets.aliases("models", folders=folders).items():
        also.setdefault(name, []).append(alias)
    rows = []
    for name in names:
        model = presets.model(name, folders=folders)
        figures = (size_text(model), str(model.layers), f"{model.max_seq_len:,}")
        rows.append((name, ", ".join(also.get(name, [])), *figures))
    return as_text([Table(("model", "also", "parameters", "layers", "context"), tuple(rows), left=2)], width)


def kinds_text(names: Mapping[str, Sequence[str]], width: int) -> str:
    """Every kind with the option that takes it, how many presets it has and some of them, on one screen."""
    taken = {kind: option.flag for option in OPTIONS.values() for kind in option.presets}
    rows = []
    for kind, known in names.items():
        shown = known[:: max(1, -(-len(known) // EXAMPLES))]
        more = ", ..." if len(shown) < len(known) else ""
        rows.append((kind, taken.get(kind, ""), f"{len(known):,}".rjust(len("known")), ", ".join(shown) + more))
    return as_text(
        [
            Table(("kind", "option", "known", "such as"), tuple(rows), left=4),
            "",
            "planner presets KIND lists them (planner presets gpus); planner presets KIND NAME has the facts of one, "
            "with their sources.",
        ],
        width,
    )


def runtimes_text(names: Sequence[str], folders: Folders, width: int | None = None) -> str:
    """Runtimes as a table, each with its versions: what `--runtime` takes, and the software that was read."""
    rows = tuple(
        (one.name, f"@{one.label}" if one.is_default and one.label else "", one.engine, one.kernels, one.version)
        for name in names
        for one in presets.versions(name, folders=folders)
    )
    return as_text([Table(("runtime", "also", "engine", "kernels", "describes"), rows, left=5)], width)


def text(found: dict[str, Any], width: int | None = None) -> str:
    """One kind a line, or one fact a line."""
    if "names" in found:
        lines = [f"{kind}: {' '.join(names) or 'none'}" for kind, names in found["names"].items()]
    else:
        sources = (f"  {key}: {source}" for key, source in found["sources"].items())
        lines = [*_lines(found["facts"]), "", "sources:", *sources]
    return "\n".join(_wrapped(line, COLUMNS if width is None else min(width, COLUMNS)) for line in lines)


def _wrapped(line: str, columns: int) -> str:
    """A line of many words as several; no name or address is cut that a person could read."""
    from textwrap import fill  # takes milliseconds, and only text needs it

    line = re.sub(rf"\S{{{LONGEST_LINE // 2},}}", lambda word: shortened(word[0], LONGEST_LINE // 2), line)
    return fill(line, columns, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _lines(facts: dict[str, Any], prefix: str = "") -> list[str]:
    lines: list[str] = []
    for key, value in facts.items():
        if isinstance(value, dict):
            lines += _lines(value, f"{prefix}{key}.")
        elif isinstance(value, list) and all(isinstance(one, dict) for one in value):
            for place, one in enumerate(value):
                lines += _lines(one, f"{prefix}{key}[{place}].")
        else:
            told = "n/a" if value is None else shortened(str(value), LONGEST_LINE // 2)
            lines.append(f"{prefix}{key} = {told}")
    return lines
