"""Units: the factors, and how figures are printed. Everything inside is bytes, seconds, FLOP.

Conversions happen at the edges only. Not here: any formula.
"""

from __future__ import annotations

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
    return f"{low / size:.3g}-{high / size:.3g} {unit}"


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
    if value >= 60:
        return f"{value / 60:.1f} min"
    if value >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms"
