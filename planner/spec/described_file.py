"""A described model as a file: programs that differ in sizes alone are written once, with a row of sizes for each.

Not here: what a description says (described.py), or who makes and keeps files (importing.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from planner.spec.described import Described, Program


class Alike(msgspec.Struct, frozen=True, kw_only=True):
    """Programs of the same operations: in `program` each size is the number of a row of `sizes`, which has one for each
    of `variants`."""

    variants: tuple[str, ...]
    sizes: tuple[tuple[Any, ...], ...]
    program: dict[str, Any]


def packed(described: Described) -> dict[str, Any]:
    """A description with programs that are alike written once."""
    whole: dict[str, Any] = msgspec.to_builtins(described)
    for unit in whole["units"].values():
        alike: dict[bytes, list[tuple[str, dict[str, Any], list[Any]]]] = {}
        for variant, program in unit["programs"].items():
            sizes: list[Any] = []
            bare = with_sizes(program, _collecting(sizes))
            alike.setdefault(msgspec.json.encode(bare), []).append((variant, program, sizes))
        unit["programs"] = [_alike(group) for group in alike.values()]
    return whole


def _collecting(sizes: list[Any]) -> Callable[[Any], Any]:
    def collect(size: Any) -> int:
        sizes.append(size)
        return 0

    return collect


def _alike(group: list[tuple[str, dict[str, Any], list[Any]]]) -> dict[str, Any]:
    rows = [tuple(map(_frozen, row)) for row in zip(*(sizes for _, _, sizes in group), strict=True)]
    numbers = {row: place for place, row in enumerate(dict.fromkeys(rows))}
    order = iter(rows)
    program = with_sizes(group[0][1], lambda _: numbers[next(order)])
    variants = [variant for variant, _, _ in group]
    return {"variants": variants, "sizes": list(numbers), "program": program}


def unpacked(whole: dict[str, Any]) -> Described:
    """The description of a packed one (msgspec.ValidationError where it is none)."""
    units = msgspec.convert(whole.get("units"), dict[str, dict[str, Any]])
    found = {}
    for name, unit in units.items():
        programs: dict[str, Program] = {}
        for group in msgspec.convert(unit.get("programs"), tuple[Alike, ...]):
            for place, variant in enumerate(group.variants):
                column = [row[place] if place < len(row) else None for row in group.sizes]
                programs[variant] = msgspec.convert(with_sizes(group.program, _looked_up(column)), Program)
        found[name] = {**unit, "programs": programs}
    return msgspec.convert({**whole, "units": found}, Described)


def _looked_up(column: list[Any]) -> Callable[[Any], Any]:
    def look(number: Any) -> Any:
        known = type(number) is int and 0 <= number < len(column)
        return column[number] if known else None  # no size, which Program refuses

    return look


def _frozen(size: Any) -> Any:
    return tuple(size) if isinstance(size, list) else size


def with_sizes(program: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    """A program, as decoded, with every size changed, in the order of its operations."""
    steps = [_step(step, change) for step in program["steps"]]
    sums = {name: change(program[name]) for name in ("moved", "moved_back") if name in program}
    return program | {"steps": steps} | sums


def _step(step: dict[str, Any], change: Callable[[Any], Any]) -> dict[str, Any]:
    found = dict(step)
    if "new" in step:
        found["new"] = [change(size) for size in step["new"]]
    if "gives" in step:
        found["gives"] = [[place, None if part is None else change(part)] for place, part in step["gives"]]
    for which in ("node", "frozen"):
        if which in step and "back" in step[which]:
            back = [[item[0], change(item[1])] if item[0] == "new" else item for item in step[which]["back"]]
            found[which] = step[which] | {"back": back}
    return found
