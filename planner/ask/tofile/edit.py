"""Keys of a YAML, JSON or TOML file set or taken out in its own text: every other byte stays.

A position comes from the parser (PyYAML's marks, which read JSON too) or, in TOML, from the line of the key; the text
is decoded again afterwards and has to hold what was asked for and nothing else. Not here: which keys (theirs.py), or
reading a file for what it means (planner/ask/fromfile).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from planner.ask.fromfile.files import decoded
from planner.basics.errors import PlannerError, refusing
from planner.basics.quoting import yaml_value
from planner.basics.reading import yaml_nodes

GONE = object()
"""In the place of a value: the key is taken out."""
TOML_VALUE = r'("(?:[^"\\]|\\.)*"|\'[^\']*\'|[^\s#"\']+)'
BLOCK_STYLES = ("|", ">")


def set_keys(text: str, suffix: str, changes: Mapping[str, Any], path: str) -> str:
    """The text of a file with that ending, with dotted keys set to values (PlannerError where that cannot be done
    without touching anything else)."""
    wanted = decoded(path, text.encode())
    setter = _set_in_toml if suffix == ".toml" else _set_in_flow_or_block
    for key, value in changes.items():
        names = key.split(".")
        text = setter(text, names, value, path)
        _apply(wanted, names, value)
    with suppress(PlannerError):
        if decoded(path, text.encode()) == wanted:
            return text
    raise _unsafe(path, list(changes), "cannot be set without touching other keys")


def _apply(table: dict[str, Any], names: Sequence[str], value: Any) -> None:
    *sections, name = names
    for section in sections:
        inner = table.get(section)
        table[section] = copy.deepcopy(inner) if isinstance(inner, dict) else {}
        table = table[section]
    if value is GONE:
        table.pop(name, None)
    else:
        table[name] = value


def _unsafe(path: str, keys: Sequence[str], rule: str) -> PlannerError:
    return PlannerError(f"{path}: {', '.join(keys)}", None, rule, "Change it by hand")


# -- YAML and JSON -----------------------------------------------------------------------------------------------------


def _composed(text: str, path: str) -> Any:
    # A tab stands between JSON's signs only, where YAML has no room for it: a space has the same width.
    with refusing((ValueError, ImportError), path, None, "cannot be edited", "Change it by hand"):
        return yaml_nodes(text.replace("\t", " ") if path.endswith(".json") else text)


def _set_in_flow_or_block(text: str, names: list[str], value: Any, path: str) -> str:
    node = _composed(text, path)
    for depth, name in enumerate(names):
        if node.id != "mapping":
            raise _unsafe(path, names[:depth], "is no section of keys")
        found = [pair for pair in node.value if pair[0].value == name]
        if not found:
            return text if value is GONE else _insert(text, node, names[depth:], value)
        key, inner = found[0]
        last = depth == len(names) - 1
        if last and value is GONE:
            return _without(text, node, key, inner, path, names)
        if not last and value is GONE and inner.id != "mapping":
            return text
        if last or inner.tag.endswith(":null"):
            return _replace(text, node, inner, _nested(names[depth + 1 :], value), path, names)
        node = inner
    return text


def _nested(names: Sequence[str], value: Any) -> Any:
    for name in reversed(names):
        value = {name: value}
    return value


def _flow(value: Any) -> str:
    """A value as YAML, JSON and, but for tables, TOML read it."""
    return msgspec.json.format(msgspec.json.encode(value), indent=0).decode()


def _replace(text: str, holder: Any, node: Any, value: Any, path: str, names: list[str]) -> str:
    start, end = node.start_mark.index, node.end_mark.index
    if isinstance(value, list) and node.id == "sequence":
        return _extended(text, node, value, path, names)
    if isinstance(node.value, list) or node.style in BLOCK_STYLES:
        raise _unsafe(path, names, "has a value of several parts")
    written = _flow(value) if holder.flow_style or isinstance(value, dict) else yaml_value(value)
    return f"{text[:start]}{' ' if start == end else ''}{written}{text[end:]}"


def _extended(text: str, node: Any, value: list[Any], path: str, names: list[str]) -> str:
    """A list with more items at its end."""
    held = len(node.value)
    if not held or [one.value for one in node.value] != [str(one) for one in value[:held]]:
        raise _unsafe(path, names, "is a list of other names")
    end = _end(node.value[-1])
    if node.flow_style:
        return text[:end] + "".join(f", {_flow(one)}" for one in value[held:]) + text[end:]
    indent = " " * text[text.rfind("\n", 0, node.value[-1].start_mark.index) + 1 :].index("-")
    return _after_line(text, end, [f"{indent}- {yaml_value(one)}" for one in value[held:]])


def _insert(text: str, node: Any, names: list[str], value: Any) -> str:
    """A new key at the end of its section."""
    if not node.value or node.flow_style:
        return _insert_in_flow(text, node, f"{_flow(names[0])}: {_flow(_nested(names[1:], value))}")
    indent = " " * node.value[0][0].start_mark.column
    lines = [f"{indent}{'  ' * depth}{yaml_value(name)}:" for depth, name in enumerate(names)]
    lines[-1] += f" {yaml_value(value)}"
    return _after_line(text, _end(node.value[-1][1]), lines)


def _insert_in_flow(text: str, node: Any, pair: str) -> str:
    if not node.value:
        start = node.start_mark.index + 1
        return f"{text[:start]}{pair}{text[start:]}"
    key, last = node.value[-1]
    start, end = key.start_mark.index, _end(last)
    margin = text[text.rfind("\n", 0, start) + 1 : start]
    apart = f"{_break_of(text)}{margin}" if not margin.strip() and "\n" in text[:start] else " "
    return f"{text[:end]},{apart}{pair}{text[end:]}"


def _without(text: str, holder: Any, key: Any, value: Any, path: str, names: list[str]) -> str:
    start, end = key.start_mark.index, _end(value)
    place = next(at for at, pair in enumerate(holder.value) if pair[0] is key)
    if holder.flow_style:
        if place:
            return text[: _end(holder.value[place - 1][1])] + text[end:]
        after = holder.value[1][0].start_mark.index if len(holder.value) > 1 else end
        return text[:start] + text[after:]
    line = text.rfind("\n", 0, start) + 1
    if text[line:start].strip() or len(holder.value) == 1:
        raise _unsafe(path, names, "cannot be taken out alone")
    return text[:line] + text[_line_end(text, end) :]


def _end(node: Any) -> int:
    """Behind the last sign of a value: block collections' own marks lie behind the comments below them."""
    if isinstance(node.value, list) and node.value and not node.flow_style:
        last = node.value[-1]
        return _end(last[1] if isinstance(last, tuple) else last)
    return int(node.end_mark.index)


def _break_of(text: str) -> str:
    return "\r\n" if "\r\n" in text else "\n"


def _line_end(text: str, place: int) -> int:
    """Behind the line break of a line; a block of text ends with its own."""
    if place and text[place - 1] == "\n":
        return place
    found = text.find("\n", place)
    return len(text) if found < 0 else found + 1


def _after_line(text: str, place: int, lines: Sequence[str]) -> str:
    cut, breaks = _line_end(text, place), _break_of(text)
    if text[:cut].endswith("\n"):
        return text[:cut] + "".join(f"{line}{breaks}" for line in lines) + text[cut:]
    return text[:cut] + "".join(f"{breaks}{line}" for line in lines)


# -- TOML --------------------------------------------------------------------------------------------------------------


def _set_in_toml(text: str, names: list[str], value: Any, path: str) -> str:
    *section, name = names
    start = _header_end(text, section)
    written = "" if value is GONE else _flow(value)
    if start is None:
        if value is GONE:
            return text
        breaks = _break_of(text)
        apart = breaks if text.endswith("\n") else breaks * 2
        return f"{text}{apart}[{'.'.join(section)}]{breaks}{name} = {written}{breaks}"
    stop = next((one.start() for one in re.compile(r"^[ \t]*\[", re.M).finditer(text, start)), len(text))
    key = re.compile(rf"^([ \t]*{re.escape(name)}[ \t]*=[ \t]*){TOML_VALUE}([ \t]*(?:#[^\n]*)?\r?\n?)", re.M)
    found = key.search(text, start, stop)
    if found is not None:
        kept = "" if value is GONE else f"{found[1]}{written}{found[3]}"
        return text[: found.start()] + kept + text[found.end() :]
    if value is GONE:
        return text
    if re.compile(rf"^[ \t]*{re.escape(name)}[ \t]*=", re.M).search(text, start, stop):
        raise _unsafe(path, names, "has a value of several parts")
    return _after_line(text, len(text[:stop].rstrip()), [f"{name} = {written}"])


def _header_end(text: str, section: Sequence[str]) -> int | None:
    if not section:
        return 0
    found = re.search(rf"^[ \t]*\[{re.escape('.'.join(section))}\][ \t]*(?:#[^\n]*)?\r?$\n?", text, re.M)
    return None if found is None else found.end()
