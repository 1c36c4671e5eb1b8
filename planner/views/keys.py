"""Every key of a file as text: what it became, by what it is. Not here: what keys mean (planner/ask/fromfile)."""

from __future__ import annotations

from typing import Any

from planner.ask.fromfile.explained import ExplainedKey, KeyKind
from planner.ask.fromfile.sheet import HARMLESS, Understood
from planner.basics.display import Element, as_text

HEADS: dict[KeyKind, str] = {
    "option": "Keys that set an option",
    "default": "Defaults of keys that are absent",
    "decides": "Keys that decide, and are not planned",
    "adds": "Keys that add memory",
    "takes": "Keys that take memory away",
    "time": "Keys that change time alone",
    "harmless": "Keys that change neither memory nor time here",
    "unknown": "Keys that are not known here",
}


def keys_text(found: Understood, keys: tuple[ExplainedKey, ...], width: int | None) -> str:
    """A paragraph a class, a line a key."""
    parts: list[Element] = [f"{found.path}: {found.format} configuration"]
    for kind, head in HEADS.items():
        own = [one for one in keys if one.kind == kind]
        if own:
            parts += ["", f"{head}:", *(f"- {_line(one)}" for one in own)]
    return as_text(parts, width)


def _line(one: ExplainedKey) -> str:
    said = f"{one.key}: {_shown(one.value)}" if one.key and one.value is not None else one.key
    if one.option:
        arrow = f"{said} → " if said else ""
        return f"{arrow}{one.option} {_shown(one.becomes)}" + (f" ({one.why})" if one.why else "")
    why = "" if one.why == HARMLESS else f" ({'; '.join(filter(None, (one.why, one.fix)))})"
    return f"{said}{why}"


def _shown(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}..."


LONGEST = 60
"""Characters of a value."""
