"""Who compares an engine's name: engines and backends themselves, and the few places below, each with its reason.

An engine is added by one record (planner/spec/engines.py) and what reads it, so every other place asks the record.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from planner.spec.engines import ENGINES

PROJECT = Path(__file__).resolve().parents[1]
OWN = ("planner/engines", "planner/spec/engines.py", "executor/backends", "executor/worker/engines", "cpu.py")
"""Folders and files that are an engine's own."""
LISTED = {
    "described_rules.py": (
        4,
        "engines under which Accelerate's autocast is at work, and those that run towers, which no record says",
    ),
    "ends.py": (2, "a kernel of the loss, which happens to be called as the engine it comes from"),
    "kernels.py": (1, "a namespace of torch's operations, which is called as the package"),
    "mlp.py": (1, "an order of Megatron-Core's modules for experts, which is called as the engine"),
    "old_rows.py": (2, "words of measured rows that were written before rows carried their plan"),
}
"""File -> (comparisons, why it does not ask the record)."""


def named(node: ast.AST | None) -> bool:
    """Whether an expression is an engine's name, or a tuple, list, set or index that has one."""
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str) and node.value in ENGINES
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(map(named, node.elts))
    return isinstance(node, ast.Starred) and named(node.value)


def compares(node: ast.AST) -> bool:
    """Whether a node decides by an engine's name: a comparison, a case, the start of a name, a table of two or more."""
    if isinstance(node, ast.Compare):
        return any(map(named, (node.left, *node.comparators)))
    if isinstance(node, ast.MatchValue):
        return named(node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in STARTS:
        return any(map(named, node.args))
    return isinstance(node, ast.Dict) and sum(map(named, node.keys)) > 1


STARTS = ("startswith", "endswith", "removeprefix")


def comparisons(text: str) -> int:
    return sum(map(compares, ast.walk(ast.parse(text))))


def sources() -> Iterator[Path]:
    for package in ("planner", "executor", "tui"):
        yield from (PROJECT / package).rglob("*.py")


def is_own(path: Path) -> bool:
    place = path.relative_to(PROJECT).as_posix()
    return any(place.startswith(own) or place.endswith(f"/{own}") for own in OWN)


def test_at_most_ten_places_outside_the_engines_compare_an_engines_name_and_each_is_listed():
    found = Counter({path.name: comparisons(path.read_text()) for path in sources() if not is_own(path)})

    assert dict(+found) == {name: count for name, (count, _) in LISTED.items()}
    assert found.total() <= 10


def test_a_comparison_a_case_a_table_and_a_prefix_are_counted_and_a_value_is_not():
    assert comparisons('a = engine == "ddp"\nb = engine not in ("fsdp2", "x")\nc = "nanotron" != name') == 3
    assert comparisons('match engine:\n    case "megatron":\n        pass\n    case "x":\n        pass') == 1
    assert comparisons('A = {"ddp": 1, "single": 2}\nB = {"ddp": 1, "x": 2}\nC = name.startswith("deepspeed")') == 2
    assert comparisons('engine = "ddp"\nnames = ("ddp", "fsdp2")\ncall(engine="single")') == 0
