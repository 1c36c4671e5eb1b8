"""The rows of a check as a table of checks by nodes, and as JSON.

Nodes that found the same share a line. Not here: the rows (compare.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from executor.hosts.checks.check import CheckTable
from executor.preflight.findings import NodeFinding
from planner.basics.display import INDENT, broken
from planner.spec.plan import Plan

SCHEMA = "check/1"
MOST_LINES = 4
LEAST_ROOM = 30
"""Columns beside which a finding is broken; with fewer it has lines of its own."""
NOT_ASKED = "n/a"
MARKS = {"pass": "pass", "warn": "WARN", "fail": "FAIL", "skip": "skip"}


def as_json(found: CheckTable, names: Sequence[str], plan: Plan) -> bytes:
    """The check/1 contract: every row, and whether a run may start."""
    rows = [msgspec.to_builtins(one) | {"sentence": said(one)} for one in found.rows]
    whole = {
        "schema": SCHEMA,
        "plan": plan.content_hash,
        "nodes": list(names),
        "passed": not found.failed,
        "seconds": found.seconds,
        "rows": rows,
    }
    return msgspec.json.encode(whole)


def as_text(found: CheckTable, names: Sequence[str], width: int | None = None) -> str:
    """A line for each check and for each group of nodes that found the same, and last whether a run may start."""
    lines = []
    for check in dict.fromkeys(one.check for one in found.rows):
        groups: dict[tuple[str, str], list[NodeFinding]] = {}
        for one in (row for row in found.rows if row.check == check and row.measured != NOT_ASKED):
            groups.setdefault((one.status, said(one)), []).append(one)
        for (status, text), rows in _folded(groups).items():
            lines.append((check, _hosts(rows, len(names)), MARKS[status], text))
            check = ""
    first, second = (max((len(line[column]) for line in lines), default=0) for column in (0, 1))
    drawn = []
    for check, hosts, mark, text in lines:
        begin = f"{check:{first}}  {hosts:{second}}  {mark}  "
        room = None if width is None else width - len(begin)
        if width is not None and width - len(begin) < LEAST_ROOM < len(text):
            drawn += [begin.rstrip(), *(f"{INDENT}{line}" for line in broken(text, width - len(INDENT)).split("\n"))]
        else:
            drawn.append(begin + broken(text, room).replace("\n", f"\n{' ' * len(begin)}"))
    return "\n".join([*drawn, "", broken(summary(found, names), width)])


def summary(found: CheckTable, names: Sequence[str]) -> str:
    """Number of failed rows and their hosts, in a sentence."""
    took = f"in {sum(found.seconds.values()):.1f} s"
    warned = sum(one.status == "warn" for one in found.rows)
    also = f", {warned} warned" if warned else ""
    if not found.failed:
        return f"{len(names)} of {len(names)} nodes can run the plan{also} ({took})"
    hosts = dict.fromkeys(one.host for one in found.failed)
    return f"{len(found.failed)} checks failed on {', '.join(hosts)}{also} ({took})"


def said(one: NodeFinding) -> str:
    """A row's measured value, and where it is not a pass the rule and the way out."""
    if not one.rule:
        return one.measured or "yes"
    return one.refusal.sentence


def _folded(groups: dict[tuple[str, str], list[NodeFinding]]) -> dict[tuple[str, str], list[NodeFinding]]:
    """The groups, with one line for nodes that all pass with different figures."""
    passed = [key for key in groups if key[0] == "pass"]
    if len(passed) <= MOST_LINES:
        return groups
    text = f"{passed[0][1]} on {groups[passed[0]][0].host}; others in --json"
    whole = {("pass", text): [row for key in passed for row in groups[key]]}
    return whole | {key: rows for key, rows in groups.items() if key[0] != "pass"}


def _hosts(rows: list[NodeFinding], nodes: int) -> str:
    if len(rows) == nodes > 1:
        return f"all {nodes}"
    return (
        ", ".join(one.host for one in rows) if len(rows) <= MOST_LINES else f"{rows[0].host} and {len(rows) - 1} more"
    )
