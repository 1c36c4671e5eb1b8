"""From the answers of all hosts to rows: each host's own findings, and in what the hosts differ.

Pure functions of the answers. Not here: asking (check.py), or drawing (table.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from executor.hosts.checks.host import CheckReply
from executor.preflight.findings import RULES, Finding, NodeFinding, differing, refused, rule_of
from planner.basics.errors import PlannerError, shortened
from planner.basics.quantities import format_seconds

OTHER_S, FAR_S = 1.0, 60.0
"""How far two clocks may be apart: beyond the first, the wrong rank may be named as the first to fail; beyond the
second, times of files and certificates are wrong too."""
SHOWN = 20
"""Characters of a version or digest."""


def rows_of_facts(answers: Mapping[int, CheckReply], here: Mapping[str, str]) -> list[NodeFinding]:
    """A row for each node and fact. `here` are facts of who asks, which all have to share."""
    facts = {node: one.facts for node, one in answers.items()}
    names = dict.fromkeys([*RULES, *(name for one in facts.values() for name in one)])
    rows = []
    for name in names:
        odd = differing(facts, name, here.get(name))
        for node, one in sorted(answers.items()):
            if name in one.facts:
                rows.append(_compared(name, node, answers, odd, here))
    return rows


def rows_of_findings(answers: Mapping[int, CheckReply]) -> list[NodeFinding]:
    """Every host's own findings."""
    return [row(found, node, one.host) for node, one in sorted(answers.items()) for found in one.findings]


def rows_of_refusals(errors: Mapping[int, PlannerError], names: Sequence[str], check: str) -> list[NodeFinding]:
    """A failed row for each host that gave no answer."""
    return [row(refused(check, error), node, names[node]) for node, error in sorted(errors.items())]


def rows_of_clocks(answers: Mapping[int, CheckReply]) -> list[NodeFinding]:
    """The offset of each node's clock from node 0's, where the node reached it."""
    rows = []
    for node, one in sorted(answers.items()):
        if one.ahead_s is None:
            continue
        apart = abs(one.ahead_s)
        way = "ahead of" if one.ahead_s > 0 else "behind"
        measured = f"{format_seconds(apart)} {way} node 0's"
        if apart < OTHER_S:
            rows.append(row(Finding(check="clock", status="pass", measured=measured), node, one.host))
            continue
        doubt = Finding(
            check="clock",
            status="warn" if apart < FAR_S else "fail",
            measured=measured,
            rule="the nodes' clocks decide which rank failed first, and the age of shared files",
            fix="Set it by a time server: chronyc makestep, or timedatectl set-ntp true",
        )
        rows.append(row(doubt, node, one.host))
    return rows


def rows_of_reduce(answers: Mapping[int, CheckReply], ranks: int, predicted: float | None) -> list[NodeFinding]:
    """The all-reduce as each host's ranks saw it; `predicted` are the seconds that the plan's links make of it."""
    rows, names = [], {node: one.host for node, one in answers.items()}
    everyone = [one for answer in answers.values() for one in answer.reduced]
    slowest = max((said["seconds"] for said in everyone if "seconds" in said), default=0.0)
    for node, one in sorted(answers.items()):
        failed = [said for said in one.reduced if "error" in said]
        if failed and "blocked" in failed[0]:
            rows.append(row(_blocked(failed[0]["blocked"], node, names), node, one.host))
        elif failed:
            rows.append(row(_failed(failed[0], ranks, names), node, one.host))
        elif one.reduced:
            rows.append(row(_passed(one.reduced[0]["bytes"], slowest, len(everyone), predicted), node, one.host))
    return rows


def row(found: Finding, node: int, host: str) -> NodeFinding:
    """A finding of a node."""
    fields = {name: getattr(found, name) for name in Finding.__struct_fields__}
    return NodeFinding(node=node, host=host, **fields)


def _compared(
    name: str, node: int, answers: Mapping[int, CheckReply], odd: Mapping[int, str], here: Mapping[str, str]
) -> NodeFinding:
    one = answers[node]
    value = _short(one.facts[name])
    if node not in odd:
        return row(Finding(check=name, status="pass", measured=value), node, one.host)
    status, fix = rule_of(name)
    if name in here:
        who = "this machine"
    else:
        who = next(other.host for place, other in sorted(answers.items()) if other.facts.get(name) == odd[node])
    rule = f"{who} has {_short(odd[node])}"
    return row(Finding(check=name, status=status, measured=value, rule=rule, fix=fix), node, one.host)


def _passed(size: int, seconds: float, ranks: int, predicted: float | None) -> Finding:
    """Bus bandwidth as nccl-tests counts it: 2 (n - 1) / n of the bytes over the slowest call."""
    share = 2 * (ranks - 1) / ranks if ranks > 1 else 1.0
    measured = f"{ranks} ranks, {share * size / seconds / 1e9:.3g} GB/s"
    if predicted is None or ranks < 2:
        return Finding(check="all-reduce", status="pass", measured=measured)
    planned = f"{share * size / predicted / 1e9:.3g} GB/s"
    if seconds > 2 * predicted:
        rule = f"the plan's links give {planned}, more than twice that"
        fix = "Look for a slower interface or a busy network; measure the links with executor probe"
        return Finding(check="all-reduce", status="warn", measured=measured, rule=rule, fix=fix)
    return Finding(check="all-reduce", status="pass", measured=f"{measured}, {planned} by the plan's links")


def _blocked(blocked: Mapping[str, Sequence[int]], node: int, names: Mapping[int, str]) -> Finding:
    """The nodes that one node does not reach on the ports that ranks open; skipped for a node that reaches all
    others."""
    others = [names.get(one, f"node {one}") for one in blocked.get(str(node), ())]
    if not others:
        return Finding(check="all-reduce", status="skip", measured="skipped: other nodes do not reach each other")
    rule = f"does not reach {', '.join(others)} on the ports that ranks use, any from 1024 up"
    fix = "Open every TCP port between the nodes, on the interface of the row above"
    return Finding(check="all-reduce", status="fail", field="all-reduce", rule=rule, fix=fix)


def _failed(said: Mapping[str, object], ranks: int, names: Mapping[int, str]) -> Finding:
    missing = said.get("missing")
    rule, fix = str(said["error"]), "Look at the rows above, or check again with --debug-network"
    if isinstance(missing, list):
        nodes = sorted({rank // ranks for rank in missing})
        rule = f"ranks {missing} ({', '.join(names.get(one, f'node {one}') for one in nodes)}) did not join"
    elif isinstance(found := said.get("cause"), (list, tuple)):
        rule, fix = f"{found[0]} ({said.get('line')})", str(found[1])
    elif said.get("unreached"):
        fix = "Open every TCP port between the nodes, on the interface of the row above; see --debug-network"
    return Finding(
        check="all-reduce",
        status="fail",
        field=f"all-reduce, rank {said['rank']}",
        rule=shortened(rule, 300),
        fix=fix,
    )


def _short(value: str) -> str:
    return value.removeprefix("sha256:")[:SHOWN] if ":" in value else value[: 2 * SHOWN]
