"""Large counts, durations and lists of sizes as people type them: 2T, 90min, 8..1024.

Not here: plain whole and real numbers (question.py), or how figures are printed (units.py).
"""

from __future__ import annotations

import re
from decimal import Decimal

from planner.errors import PlannerError
from planner.question import real_or_none, whole

COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
"""Decimal, as data sets and parameters are counted: B is 1e9, T is 1e12."""

SECONDS = {"": 1.0, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LARGEST_COUNT = 10**18
LONGEST_S = 1e10
MOST_SIZES = 256
"""Sizes of one sweep: beyond this nobody reads the table, and each is a search of its own."""

NUMBER_AND_UNIT = re.compile(r"\s*([-+]?[0-9._]+(?:e[-+]?[0-9]+)?)\s*([a-z]*)\s*", re.IGNORECASE)


def large_count(field: str, value: str | None, high: int = LARGEST_COUNT) -> int | None:
    """A whole number such as 2T, 300B, 1.5M, 10k or 2e12; None stays None."""
    if value is None:
        return None
    rule = f"must be a whole number from 1 to {high:.0e}, such as 2T, 300B, 1M or 2e12"
    number, unit = _split(value)
    factor = COUNT_UNITS.get(unit)
    try:
        exact = Decimal(number) * factor if factor is not None else None
    except ArithmeticError:  # decimal's own: no number, or an exponent beyond its own range
        exact = None
    if exact is None or not exact.is_finite():
        raise PlannerError(field, value, rule, "Units are k, M, B and T")
    if not 1 <= exact <= high:
        raise PlannerError(field, value, rule, f"Try {1 if exact < 1 else high}")
    if exact != int(exact):
        raise PlannerError(field, value, rule, f"Try {round(exact)}")
    return int(exact)


def duration_s(field: str, value: str | None, *, above: bool = False) -> float | None:
    """Seconds of a duration such as 90, 90s, 30min, 6h or 2d (`above`: zero excluded); None stays None."""
    if value is None:
        return None
    number, unit = _split(value)
    rule = f"must be a duration {'above 0' if above else 'of 0 or more'}, such as 90s, 30min, 6h or 2d"
    count, factor = real_or_none(number.replace("_", "")), SECONDS.get(unit)
    if count is None or factor is None:
        raise PlannerError(field, value, rule, "Units are s, min, h and d")
    if count < 0 or (above and count == 0) or count * factor > LONGEST_S:
        raise PlannerError(field, value, rule, "Try 10min")
    return count * factor


def gpu_counts(field: str, value: str, largest: int = 10**6) -> tuple[int, ...]:
    """Ascending sizes: a list 8,16,24; 8..1024, which doubles and ends at 1024; or 8..64:8, in steps of 8."""
    sizes: set[int] = set()
    for part in value.split(","):
        span, _, step = part.partition(":")
        low_text, dots, high_text = span.partition("..")
        low = _size(field, value, low_text, largest)
        if not dots:
            if step:
                raise PlannerError(field, value, "has a step without a range", "Try 8..64:8")
            sizes.add(low)
            continue
        high = _size(field, value, high_text, largest)
        if high < low:
            raise PlannerError(field, value, "a range runs upwards", f"Try {high}..{low}")
        if step:
            stride = _size(field, value, step, largest)
            if (high - low) // stride >= MOST_SIZES:
                raise _too_many(field, value)
            sizes.update(range(low, high + 1, stride))
        else:
            while low < high:
                sizes.add(low)
                low *= 2
            sizes.add(high)
    if len(sizes) > MOST_SIZES:
        raise _too_many(field, value)
    return tuple(sorted(sizes))


def _size(field: str, value: str, text: str, largest: int) -> int:
    try:
        return whole(field, text, 1, largest) or 1
    except PlannerError as error:
        rule = f"{text!r} {error.rule}"
        raise PlannerError(field, value, rule, "Give a list such as 8,16,32 or a range such as 8..1024") from None


def _too_many(field: str, value: str) -> PlannerError:
    return PlannerError(field, value, f"is more than {MOST_SIZES} sizes", "Use a larger step, or a range that doubles")


def _split(value: str) -> tuple[str, str]:
    """(number, lower-case unit); both empty when it does not look like that."""
    found = NUMBER_AND_UNIT.fullmatch(str(value))
    return (found[1], found[2].lower()) if found else ("", "?")
