"""Units, and quantities as people type and read them: 2T, 16k, 10%, 90min, 8..1024 in, 58.39 GiB and 3.9 s out.

Not here: what a field is for (options.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from decimal import Decimal
from typing import Annotated, Any

import msgspec

from planner.basics.errors import PlannerError

GB = 1e9
KIB, MIB, GIB = 2.0**10, 2.0**20, 2.0**30
TERA = 1e12
MICRO = 1e-6

BYTES = {"fp32": 4, "tf32": 4, "bf16": 2, "fp16": 2, "fp8": 1, "int64": 8, "int32": 4}
"""Bytes an element of each number format takes."""


NO_SIZE = 1e9 * GIB
"""Bytes that no memory has: a file may say so, and its hundred digits hide the rest of a table."""


def format_bytes(value: float | None) -> str:
    """Memory for people: binary units, "n/a" for unknown."""
    if value is None:
        return "n/a"
    for size, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(value) >= size:
            return f"{value / size:.2f} {unit}" if abs(value) < NO_SIZE else f"{value / size:.3g} {unit}"
    return f"{value:.0f} B"


def format_byte_range(low: float, high: float) -> str:
    """Two sizes in memory, in the unit of the larger."""
    size, unit = next(
        ((size, unit) for size, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")) if high >= size), (1, "B")
    )
    return f"{_three_figures(low / size)}-{_three_figures(high / size)} {unit}"


def _three_figures(value: float) -> str:
    """A number to three figures, or whole from a thousand on."""
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def format_volume(value: float | None) -> str:
    """Bytes on a link for people: decimal units, "n/a" for unknown."""
    if value is None:
        return "n/a"
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if abs(value) >= size:
            return f"{value / size:.2f} {unit}"
    return f"{value:.0f} B"


def format_duration(value: float | None) -> str:
    """A run's time in the largest unit that fits, days from two of them."""
    if value is None or value < 3600:
        return format_seconds(value)
    return f"{value / 3600:,.1f} h" if value < 2 * 86400 else f"{value / 86400:,.1f} days"


def format_seconds(value: float | None) -> str:
    """A duration for people, "n/a" for unknown."""
    if value is None:
        return "n/a"
    if value >= 3600:
        return f"{value / 3600:,.2f} h"
    if value >= 60:
        return f"{value / 60:.1f} min"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms"


# -- Units -------------------------------------------------------------------------------------------------------------

COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}
"""Decimal, as data sets and parameters are counted: B is 1e9, T is 1e12."""

LENGTH_UNITS = {"": 1, "k": 2**10, "m": 2**20}
"""Binary, as the lengths of contexts are named: a model of 128k tokens has 131,072 positions."""

MEMORY_UNITS = {"": GIB, "gib": GIB, "tib": 2**10 * GIB, "gb": GB, "tb": 1e3 * GB}
"""Binary unless decimal is written out, as people say how much memory a machine has."""

SECONDS = {"": 1.0, "s": 1.0, "min": 60.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
LARGEST_COUNT = 10**18
LONGEST_S = 1e10
MOST_SIZES = 256
"""Sizes of one sweep: a longer table is hard to read, and each is a search of its own."""

NUMBER_AND_UNIT = re.compile(r"\s*([-+]?[0-9._]+(?:e[-+]?[0-9]+)?)\s*([a-z%]*)\s*", re.IGNORECASE)


def whole(field: str, value: Any, low: int = 1, high: int = 10**6) -> int | None:
    """A whole number in a range, such as 8, 1k or 1.5M; None stays None."""
    examples = [text for text, number in (("8", 8), ("1k", 1000)) if low <= number <= high]
    example = " or ".join(examples) or str(low)
    return _whole(field, value, low, high, f"must be a whole number from {low} to {high}", COUNT_UNITS, example)


def names(field: str, value: Any, low: float = 0, high: float = 0) -> tuple[str, ...] | None:
    """Names separated by commas; which are known, a rule says."""
    if value is None:
        return None
    found = tuple(one.strip() for one in str(value).split(","))
    if not all(found):
        raise PlannerError(field, value, "has an empty name", "Separate names by single commas")
    return found


def wholes(field: str, value: Any, low: int = 1, high: int = 10**6) -> tuple[int, ...] | None:
    """Whole numbers separated by commas, such as 8,8,9,7; None stays None."""
    return None if value is None else tuple(whole(field, part, low, high) or 0 for part in str(value).split(","))


def length(field: str, value: Any, low: int = 1, high: int = 2**30) -> int | None:
    """Tokens of a sequence, such as 4096 or 16k, which is 16,384; None stays None."""
    rule = f"must be a whole number from {low} to {high}"
    return _whole(field, value, low, high, rule, LENGTH_UNITS, "4096 or 16k" if high >= 2**14 else str(low))


def large_count(field: str, value: str | None, high: int = LARGEST_COUNT) -> int | None:
    """A whole number such as 2T, 300B, 1.5M, 10k or 2e12; None stays None."""
    rule = f"must be a whole number from 1 to {high:.0e}, such as 2T, 300B, 1M or 2e12"
    return _whole(field, value, 1, high, rule, COUNT_UNITS, "1M, 300B or 2T")


def _whole(
    field: str, value: Any, low: int, high: int, rule: str, units: Mapping[str, int], example: str
) -> int | None:
    if value is None:
        return None
    exact = _exact(str(value), units)
    if exact is None:
        raise PlannerError(field, value, rule, f"Try a number such as {example}")
    if not low <= exact <= high:
        raise PlannerError(field, value, rule, f"Try {low if exact < low else high}")
    if exact != int(exact):
        raise PlannerError(field, value, rule, f"Try {min(max(round(exact), low), high)}")
    return int(exact)


def _exact(text: str, units: Mapping[str, int]) -> Decimal | None:
    """A number times its unit; None when it is neither a number nor has one of the units."""
    number, unit = _split(text)
    if unit not in units:
        return None
    try:
        exact = Decimal(number) * units[unit]
    except ArithmeticError:  # decimal's own: no number, or an exponent beyond its own range
        return None
    return exact if exact.is_finite() else None


def real(field: str, value: Any, low: float, high: float, *, above: bool = False) -> float | None:
    """A finite number in a range (`above`: low itself excluded); None stays None."""
    if value is None:
        return None
    rule = f"must be a number {'above' if above else 'from'} {low:g} {'and up ' if above else ''}to {high:g}"
    return _in_range(field, value, real_or_none(_plain(value)), (low, high), rule, above=above)


def share(field: str, value: Any, low: float, high: float) -> float | None:
    """A part of a whole in a range, as 0.1 or as 10%; None stays None."""
    if value is None:
        return None
    text = _plain(value)
    number = real_or_none(text.removesuffix("%"))
    if number is not None and text.endswith("%"):
        number /= 100
    elif number is not None and max(high, 1) < number <= 100 * high:
        rule = f"must be from {low:g} to {high:g}, or from {low:.0%} to {high:.0%}"
        raise PlannerError(field, value, rule, f"Try {number:g}%")
    return _in_range(field, value, number, (low, high), f"must be from {low:g} to {high:g}, or a percentage")


def _in_range(
    field: str, value: Any, number: float | None, ends: tuple[float, float], rule: str, *, above: bool = False
) -> float:
    low, high = ends
    if number is None:
        meant = [float(text) for text in re.findall(r"\d+(?:\.\d+)?", str(value))]
        near = (one for one in meant if low <= one <= high and not (above and one == low))
        raise PlannerError(field, value, rule, f"Try {next(near, high if above else low):g}")
    if number < low or number > high or (above and number == low):
        raise PlannerError(field, value, rule, f"Try {high if number > high or above else low:g}")
    return number


def memory_bytes(field: str, value: Any, low: float = 0.0, high: float = 2.0**60) -> float | None:
    """Bytes above `low` of an amount of memory such as 256 or 256GiB (both GiB), 512GB or 1TB; None stays None."""
    if value is None:
        return None
    rule = f"must be an amount of memory above {low:g}, such as 256 (GiB), 256GiB or 512GB"
    number, unit = _split(str(value))
    count, factor = real_or_none(_plain(number)), MEMORY_UNITS.get(unit)
    if count is None or factor is None or not low < count * factor <= high:
        raise PlannerError(field, value, rule, "Try 256GiB")
    return count * factor


def real_or_none(text: str) -> float | None:
    """A finite number, or None."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def _plain(value: Any) -> str:
    return str(value).strip().replace("_", "")


def duration_s(field: str, value: str | None, *, above: bool = False) -> float | None:
    """Seconds of a duration such as 90, 90s, 30min, 6h or 2d (`above`: zero excluded); None stays None."""
    if value is None:
        return None
    number, unit = _split(str(value))
    rule = f"must be a duration {'above 0' if above else 'of 0 or more'}, such as 90s, 30min, 6h or 2d"
    count, factor = real_or_none(_plain(number)), SECONDS.get(unit)
    if count is None or factor is None:
        near = next((one for one in ("s", "min", "h", "d") if unit[:1] == one[:1]), "h")
        amount = number if count is not None and 0 < count <= LONGEST_S / SECONDS["d"] else "1"
        raise PlannerError(field, value, rule, f"Try {amount}{near}")
    if count < 0 or (above and count == 0) or count * factor > LONGEST_S:
        raise PlannerError(field, value, rule, "Try 10min")
    return count * factor


def gpu_counts(field: str, value: str) -> tuple[int, ...]:
    """Ascending sizes: a list 8,16,24; 8..1024, which doubles and ends at 1024; or 8..64:8, in steps of 8."""
    sizes: set[int] = set()
    for part in value.split(","):
        span, _, step = part.partition(":")
        low_text, dots, high_text = span.partition("..")
        low = _size(field, value, low_text)
        if not dots:
            if step:
                raise PlannerError(field, value, "has a step without a range", "Try 8..64:8")
            sizes.add(low)
            continue
        high = _size(field, value, high_text)
        if high < low:
            raise PlannerError(field, value, "a range runs upwards", f"Try {high}..{low}")
        if step:
            stride = _size(field, value, step)
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


def _size(field: str, value: str, text: str) -> int:
    try:
        return whole(field, text) or 1
    except PlannerError as error:
        rule = f"{text!r} {error.rule}"
        raise PlannerError(field, value, rule, "Give a list such as 8,16,32 or a range such as 8..1024") from None


def _too_many(field: str, value: str) -> PlannerError:
    return PlannerError(field, value, f"is more than {MOST_SIZES} sizes", "Use a larger step, or a range that doubles")


def _split(value: str) -> tuple[str, str]:
    """(number, lower-case unit); both empty when it does not look like that."""
    found = NUMBER_AND_UNIT.fullmatch(value)
    return (found[1], found[2].lower()) if found else ("", "?")


# -- Bounded numbers ---------------------------------------------------------------------------------------------------

Positive = Annotated[float, msgspec.Meta(gt=0)]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]
