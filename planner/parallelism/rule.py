"""What a rule is, and asking a list of them. Not here: any rule (rules.py and its neighbours)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from planner.basics.errors import PlannerError
from planner.spec.options import OPTIONS

if TYPE_CHECKING:
    from planner.parallelism.case import Case


class Rule(msgspec.Struct, frozen=True):
    """`holds(case)` is a truth value, or a column of them when the case's layout has columns."""

    name: str
    field: str
    holds: Callable[[Case], Any]
    sentence: Callable[[Case], str]
    fix: Callable[[Case], str]


def broken(case: Case, rules: Iterable[Rule]) -> Rule | None:
    """The first rule that a layout breaks; None where all hold."""
    return next((rule for rule in rules if not rule.holds(case)), None)


def check(case: Case, rules: Iterable[Rule]) -> None:
    """Refuse a layout by the first rule that it breaks (PlannerError)."""
    rule = broken(case, rules)
    if rule is not None:
        raise PlannerError(rule.field, value_of(case, rule.field), rule.sentence(case), rule.fix(case))


def value_of(case: Case, field: str) -> Any:
    """What was asked for: a number or switch of the layout, or a choice of the job or of one of its parts."""
    job, option = case.job, OPTIONS.get(field)
    if field in ("lora_targets", "modules_to_save"):  # lists, which are typed with commas
        return None if job.adapters is None else ",".join(getattr(job.adapters, field.removeprefix("lora_")))
    parts = {"optimizer": job.optimizer, "lora": job.adapters, "quantization": job.base_quantization}
    if option is not None and option.part in parts:
        return getattr(parts[option.part], option.field or option.name, None)
    found = getattr(case.layout, field, getattr(job, field, None))
    return as_option(found) if isinstance(found, tuple) else found


def as_option(value: Any) -> str:
    """A field's value as it is given on the command line."""
    if isinstance(value, tuple):
        return ",".join(map(str, value)) or "none"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value).lower()


def one_of(values: Sequence[object]) -> str:
    """Legal values as people read them."""
    *most, last = map(str, values)
    return f"{', '.join(most)} or {last}" if most else last
