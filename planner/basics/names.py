"""What a name and a path may be that somebody else wrote: a model, a GPU, a cluster, a node, a host, a preset, a file.

Checked where a plan, a preset, a host file or a folder is read, so that what is written later holds names alone. Not
here: how a text is quoted for the file that it goes into (quoting.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from planner.basics.errors import PlannerError, is_visible

LONGEST_NAME = 200
"""Characters. The longest repository name of the Hugging Face hub has 96, a host name 253 octets."""
LINE_BREAKS = "\u2028\u2029"
"""Unicode's own, at which Python and YAML split lines though they are not control characters."""


def name_rule(text: str) -> str | None:
    """What a name breaks, as the rule of a refusal; None of a good one."""
    if not text.strip():
        return "is an empty name"
    if len(text) > LONGEST_NAME:
        return f"has {len(text)} characters, and a name has at most {LONGEST_NAME}"
    if text.startswith("-"):
        return "begins with a dash, as an option of a command does"
    if not text.isprintable() and not all(map(is_visible, text)):
        return "has a line break, a control character or a mark that turns the direction of writing"
    return None


def path_rule(path: str) -> str | None:
    """What a path breaks; None of a good one. Any length: the system knows its own."""
    if any(char < " " or "\x7f" <= char < "\xa0" or char in LINE_BREAKS for char in path):
        return "has a line break or another control character"
    if any("\ud800" <= char < "\ue000" for char in path):
        return "is not UTF-8"
    return None


def check_name(text: str, field: str, fix: str = "Give it another name") -> str:
    """The name, or PlannerError."""
    if rule := name_rule(text):
        raise PlannerError(field, text, rule, fix)
    return text


def check_path(path: str, field: str, fix: str = "Rename it") -> str:
    """The path, or PlannerError."""
    if rule := path_rule(path):
        raise PlannerError(field, path, rule, fix)
    return path


def check_texts(
    value: Any, field: str, paths: Collection[str] = (), free: Collection[str] = (), fix: str = "Give it another name"
) -> None:
    """Refuse a decoded file (of JSON or TOML) in which any text, key or value, is not a name. Values of the keys in
    `paths` are paths, those of `free` are for readers and go nowhere; an empty text is the word for "none"."""
    if isinstance(value, Mapping):
        for key, one in value.items():
            check_name(str(key), field, fix)
            if key in paths and isinstance(one, str):
                check_path(one, _inside(field, key))
            elif key not in free:
                check_texts(one, _inside(field, key), paths, free, fix)
    elif isinstance(value, list | tuple):
        for one in value:
            check_texts(one, field, paths, free, fix)
    elif isinstance(value, str) and value:
        check_name(value, field, fix)


def _inside(field: str, key: str) -> str:
    return f"{field}.{key}" if ": " in field else f"{field}: {key}"
