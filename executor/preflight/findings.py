"""The finding of one check on one node: pass, warn, fail or skip, with the measured value, the rule and the way out.

Not here: any check (executor.preflight.preflight, limits.py, network.py), or comparing nodes (compare.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec

from executor.preflight.preflight import PREFLIGHT, Check, Doubt
from planner.basics.errors import PlannerError

Status = Literal["pass", "warn", "fail", "skip"]


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
        """The same as a refusal."""
        return PlannerError(self.field or self.check, self.measured or None, self.rule, self.fix, exit_code=PREFLIGHT)


class Row(Finding, frozen=True, kw_only=True):
    """A finding and the node it is of."""

    node: int
    host: str

    @property
    def error(self) -> PlannerError:
        """The same as a refusal that begins with the host."""
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
        rule = f"could not be asked ({type(error).__name__}: {error})"
        return Finding(check=one.name, status="fail", rule=rule, field=one.name)
    return Finding(check=one.name, status="pass", measured="" if measured is None else str(measured))
