"""The finding of one check on one node: pass, warn, fail or skip, with the measured value, the rule and the way out.

And in what the nodes of a run have to be equal, whether hosts are asked or nodes join by themselves.

Not here: any check (executor.preflight.preflight, limits.py, network.py), gathering facts (host.py, joining.py), or
rows of them (compare.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from executor.preflight.preflight import PREFLIGHT, Check, Doubt
from planner.basics.errors import PlannerError

Status = Literal["pass", "warn", "fail", "skip"]
INPUT = "recipe."
"""Before the name of an input of the plan."""
SAME_PACKAGE = "Install the same on every node"
RULES: dict[str, tuple[Status, str]] = {
    "code": ("fail", "Install the same meshwright on every node"),
    "plan": ("fail", "Install the same meshwright on every node"),
    "python": ("warn", SAME_PACKAGE),
    "GPU": ("fail", "Use nodes with equal GPUs: a plan divides the work equally"),
    "driver": ("warn", "Install the same driver on every node"),
}
"""What it is where nodes differ in a fact, and the way out; a package by default."""


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """`field` and `measured` are what was looked at, as `rule` and `fix` speak of them; `rule` is empty where the check
    passed."""

    check: str
    status: Status
    measured: str = ""
    rule: str = ""
    fix: str = ""
    field: str = ""

    @property
    def refusal(self) -> PlannerError:
        """The finding as an error."""
        return PlannerError(self.field or self.check, self.measured or None, self.rule, self.fix, exit_code=PREFLIGHT)


class NodeFinding(Finding, frozen=True, kw_only=True):
    """A finding and the node it is of."""

    node: int
    host: str

    @property
    def error(self) -> PlannerError:
        """The finding as an error that begins with the host."""
        field = f"{self.host}: {self.field or self.check}"
        return PlannerError(field, self.measured or None, self.rule, self.fix, exit_code=PREFLIGHT)


def asked(checks: Iterable[Check]) -> list[Finding]:
    """Every check, whatever the others find."""
    return [_asked(one) for one in checks]


def refused(check: str, error: PlannerError) -> Finding:
    """The finding that a refusal is."""
    status: Status = "warn" if isinstance(error, Doubt) else "fail"
    measured = "" if error.value is None else str(error.value)
    return Finding(check=check, status=status, measured=measured, rule=error.rule, fix=error.fix, field=error.field)


def _asked(one: Check) -> Finding:
    try:
        measured = one.run()
    except PlannerError as error:
        return refused(one.name, error)
    except Exception as error:  # one check that breaks hides no other
        rule = f"could not be checked ({type(error).__name__}: {error})"
        return Finding(check=one.name, status="fail", rule=rule, field=one.name)
    return Finding(check=one.name, status="pass", measured="" if measured is None else str(measured))


def differing(facts: Mapping[int, Mapping[str, str]], name: str, reference: str | None = None) -> dict[int, str]:
    """The nodes whose fact is not the reference, with the reference: by default what most have, the first among
    equals. A node that does not have the fact is not compared."""
    known = {node: one[name] for node, one in sorted(facts.items()) if name in one}
    if not known:
        return {}
    usual = reference or Counter(known.values()).most_common(1)[0][0]
    return {node: usual for node, value in known.items() if value != usual}


def rule_of(name: str) -> tuple[Status, str]:
    """Severity and fix where nodes differ in a fact."""
    return RULES.get(name, ("fail", "Give every node the same file" if name.startswith(INPUT) else SAME_PACKAGE))
