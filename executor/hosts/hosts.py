"""The host file: one line a host, in the order of the nodes, and how Python is found on each.

    *           python=/opt/venv/bin/python      # for all lines that follow
    n[01-04]    slots=8
    me@big      slots=4 port=2222 prelude="module load cuda"

Every name is checked here, so that none is an option of ssh or a word of a shell. Not here: reaching a host (ssh.py).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from executor.folder import rundir
from planner.basics.errors import PlannerError, did_you_mean
from planner.basics.reading import read_text

FIELD = "--hosts"
DEFAULTS = "*"
NAME = re.compile(r"[A-Za-z0-9_](?:[A-Za-z0-9_.:%-]*[A-Za-z0-9_])?")
USER = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
RANGES = re.compile(r"(?P<head>[^\[\]]*)\[(?P<list>[0-9,-]+)\](?P<rest>.*)")
MOST_HOSTS, MOST_RANGES, LONGEST_LINE = 4096, 8, 4096
DIGITS = re.compile("[0-9]{1,9}")
WORDS = ("slots", "user", "port", "python", "prelude", "container")
EXAMPLE = "Try a line such as: node1 slots=8 python=/opt/venv/bin/python"


@dataclass(frozen=True)
class HostEntry:
    """One host. `name` is what ssh is given, `slots` how many ranks it takes at most (None: not said).

    `python` is an interpreter there (None: this one's path where the host has it, else python3). `prelude` is a line
    of shell that the host's bash runs first, `container` the command that Python is started through. `line` is where
    the host file says so.
    """

    name: str
    slots: int | None = None
    user: str | None = None
    port: int | None = None
    python: str | None = None
    prelude: str | None = None
    container: str | None = None
    line: int = 0


def read_hosts(path: Path) -> tuple[HostEntry, ...]:
    """The hosts of a file, as nodes from 0 on. Refuses, with the line's number, what is not a host."""
    try:
        text = read_text(path)
    except OSError as error:
        raise PlannerError(
            FIELD,
            path,
            f"cannot be read ({error.strerror})",
            "Give a file with one host a line, or auto, loopback or namespaces",
        ) from None
    found: list[HostEntry] = []
    defaults = HostEntry("")
    seen: dict[tuple[str, str | None, int | None], int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        names, settings = _words(path, number, line)
        if names == DEFAULTS:
            defaults = _set(replace(defaults, line=number), settings, path)
        elif names:
            for machine in _machines(path, number, names, settings, defaults):
                key = (machine.name, machine.user, machine.port)
                if key in seen:
                    rule = f"is listed before, in line {seen[key]}"
                    raise _refused(path, number, machine.name, rule, "Give a host once, with slots=K for K ranks")
                if len(found) == MOST_HOSTS:
                    raise _refused(path, number, names, f"names more than {MOST_HOSTS} hosts", "Try n[01-04]")
                seen[key] = number
                found.append(machine)
    if not found:
        raise PlannerError(FIELD, path, "names no host", EXAMPLE)
    return tuple(found)


def _words(path: Path, number: int, line: str) -> tuple[str, list[str]]:
    """The first word of a line and the others; of an empty line nothing."""
    if len(line) > LONGEST_LINE:  # shlex takes the square of a word's length
        rule = f"has {len(line)} characters, more than {LONGEST_LINE}"
        raise _refused(path, number, None, rule, "Put a long prelude in a file, and source it")
    try:
        words = shlex.split(line, comments=True)
    except ValueError as error:
        raise _refused(path, number, line.strip(), f"cannot be read ({error})", "Close every quote") from None
    if any(not char.isprintable() for word in words for char in word):
        raise _refused(path, number, line.strip(), "has an unprintable character", "Remove it")
    return (words[0], words[1:]) if words else ("", [])


def _machines(path: Path, number: int, names: str, settings: list[str], defaults: HostEntry) -> Iterator[HostEntry]:
    """The hosts of one line."""
    user, at, rest = names.rpartition("@")
    settings = [*settings, f"user={user}"] if at else settings
    for name in _ranged(path, number, rest):
        if not NAME.fullmatch(name):
            rule = "is not a host name: letters, digits, dots, colons and inner dashes"
            raise _refused(path, number, name, rule, EXAMPLE)
        yield _set(replace(defaults, name=name, line=number), settings, path)


def _ranged(path: Path, number: int, text: str) -> Iterator[str]:
    """n[01-03,7] as n01, n02, n03 and n7: digits are kept as wide as they are written."""
    found = RANGES.fullmatch(text)
    if found is None:
        yield text
        return
    if text.count("[") > MOST_RANGES:
        raise _refused(path, number, text, f"has more than {MOST_RANGES} ranges", "Try n[01-04]")
    for part in found["list"].split(","):
        first, dash, last = part.partition("-")
        last = last if dash else first
        if not (DIGITS.fullmatch(first) and DIGITS.fullmatch(last)) or int(first) > int(last):
            raise _refused(path, number, text, f"has the malformed range {part!r}", "Try n[01-04]")
        for one in range(int(first), int(last) + 1):
            yield from _ranged(path, number, f"{found['head']}{one:0{len(first)}}{found['rest']}")


def _set(machine: HostEntry, settings: list[str], path: Path) -> HostEntry:
    """A host with the settings of its line."""
    for setting in settings:
        word, equals, value = setting.partition("=")
        if word not in WORDS or not equals:
            fix = did_you_mean(word, WORDS)
            raise _refused(path, machine.line, setting, "is not a setting of a host", fix)
        machine = replace(machine, **{word: _value(path, machine.line, word, value)})  # type: ignore[arg-type]
    return machine


def _value(path: Path, number: int, word: str, value: str) -> str | int:
    if word in ("slots", "port"):
        most = 2**16 - 1
        if not re.fullmatch(r"[0-9]{1,5}", value) or not 1 <= int(value) <= most:
            raise _refused(path, number, f"{word}={value}", f"is not a number from 1 to {most}", f"Try {word}=8")
        return int(value)
    if word == "user" and not USER.fullmatch(value):
        raise _refused(path, number, f"user={value}", "is not a user name", "Try user=me")
    if word == "container":
        try:
            shlex.split(value)
        except ValueError as error:
            raise _refused(path, number, f"{word}={value}", f"cannot be read ({error})", "Close every quote") from None
    if not value.strip() or (word == "python" and value.startswith("-")):
        raise _refused(path, number, f"{word}={value}", "is empty, or an option", f"Leave {word} out")
    return value


def _refused(path: Path, number: int, value: object, rule: str, fix: str) -> PlannerError:
    return PlannerError(f"{FIELD}: {path.name} line {number}", value, rule, fix)


class _Kept(msgspec.Struct, frozen=True, kw_only=True):
    """hosts.json."""

    schema: str = "hosts/1"
    hosts: tuple[HostEntry, ...]


def keep_hosts(run: Path, machines: tuple[HostEntry, ...]) -> None:
    """Write the hosts of a run into its folder, for its owner alone to read."""
    rundir.write_json(run / rundir.HOSTS, _Kept(hosts=machines), private=True)


def kept_hosts(run: Path) -> tuple[HostEntry, ...]:
    """The hosts that a run was started on, by node; refuses what no host file could have said."""
    path = run / rundir.HOSTS
    machines = rundir.read_json(path, _Kept).hosts
    for number, one in enumerate(machines, 1):
        said = [f"{word}={value}" for word in WORDS if (value := getattr(one, word)) is not None]
        if any(not char.isprintable() for text in said for char in text):
            raise _refused(path, number, one.name, "has an unprintable character", "Name them: --hosts FILE")
        if replace(next(_machines(path, number, one.name, said, HostEntry(""))), line=one.line) != one:
            raise _refused(path, number, one.name, "is not one host name", "Name them: --hosts FILE")
    if len(machines) > MOST_HOSTS:
        raise _refused(
            path, MOST_HOSTS, len(machines), f"names more than {MOST_HOSTS} hosts", "Name them: --hosts FILE"
        )
    return machines


def named(machines: tuple[HostEntry, ...]) -> str:
    """Description of these hosts for the user who confirms them, with the commands that run on them first."""
    more = [f"{word} {value!r}" for word in ("prelude", "container", "python")
            for value in dict.fromkeys(getattr(one, word) for one in machines) if value]  # fmt: skip
    users = (f"{one.user}@" if one.user else "" for one in machines)
    names = [f"{user}{one.name}" for user, one in zip(users, machines, strict=True)]
    return ", ".join(names) + (f" ({'; '.join(more)})" if more else "")
