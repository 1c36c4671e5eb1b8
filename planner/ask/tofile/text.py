"""How the files of a plan look: YAML with a comment behind each key, JSON with its notes in one key, a command line
under its notes.

Every text in them is quoted for its reader (planner/basics/quoting.py). Not here: which keys there are (a module a
format).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from planner.basics.quoting import for_comment, for_shell, yaml_value

NOTES = "_notes"
"""JSON has no comments: they stand in this key, which no reader takes for one of its own."""
WIDEST = 48
"""Columns after which a comment stands above its key."""


class Line(NamedTuple):
    """A key of a file, dotted, with its value and why it has it."""

    key: str
    value: Any
    why: str = ""


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """The tables that dotted keys are."""
    found: dict[str, Any] = {}
    for key, value in flat.items():
        *sections, name = key.split(".")
        table = found
        for section in sections:
            table = table.setdefault(section, {})
        table[name] = value
    return found


def _table(lines: Sequence[Line]) -> dict[str, Any]:
    return nested({line.key: line.value for line in lines})


def yaml_of(lines: Sequence[Line], notes: Sequence[str]) -> str:
    """YAML, the notes above it; sections in the order in which they first occur."""
    why = {line.key: line.why for line in lines}
    text = [for_comment(note) for note in notes]
    return "\n".join([*text, *_section(_table(lines), "", why, 0)]) + "\n"


def _section(table: Mapping[str, Any], prefix: str, why: Mapping[str, str], depth: int) -> list[str]:
    found = []
    for key, value in table.items():
        start = "  " * depth + f"{yaml_value(key)}:"
        if isinstance(value, dict):
            found += [start, *_section(value, f"{prefix}{key}.", why, depth + 1)]
            continue
        line, reason = f"{start} {yaml_value(value)}", why.get(prefix + key, "")
        if not reason:
            found.append(line)
        elif len(line) <= WIDEST:
            found.append(f"{line.ljust(WIDEST)}  {for_comment(reason)}")
        else:
            found += ["  " * depth + for_comment(reason), line]
    return found


def json_of(lines: Sequence[Line], notes: Sequence[str]) -> str:
    """JSON, the notes and reasons in its first key."""
    told = [*notes, *(f"{line.key}: {line.why}" for line in lines if line.why)]
    table = {NOTES: told} | _table(lines)
    return msgspec.json.format(msgspec.json.encode(table), indent=2).decode() + "\n"


def command_of(head: Sequence[str], lines: Sequence[Line], notes: Sequence[str]) -> str:
    """A command line, an option a line, under the notes and the reasons."""
    lines = sorted(lines, key=lambda line: ":" in line.key)  # a policy is a word that ends the options before it
    written = [(option_words(line), line.why) for line in lines if option_words(line)]
    told = [*notes, "", *(f"{' '.join(words)}: {why}" for words, why in written if why)]
    command = " \\\n    ".join([for_shell(head), *(for_shell(words) for words, _ in written)])
    return "\n".join([*(for_comment(one) for one in told), command]) + "\n"


def option_words(line: Line) -> tuple[str, ...]:
    """The words of one option: a flag is its name where it is true, and nothing where it is false."""
    if line.value is True:
        return (line.key if ":" in line.key else f"--{line.key}",)
    if line.value is False:
        return ()
    values = line.value if isinstance(line.value, list) else [line.value]
    return (f"--{line.key}", *(f"{one:g}" if isinstance(one, float) else str(one) for one in values))
