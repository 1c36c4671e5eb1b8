"""A figure on both sides, predicted and measured; its error, and the tolerances that judge it.

Not here: which figures are compared (report.py, trace.py).
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from planner.basics.errors import PlannerError


class FigureLine(msgspec.Struct, frozen=True, kw_only=True):
    """One figure on both sides. None means that this side does not have it: missing, which is not zero."""

    name: str
    predicted: float | None
    measured: float | None
    error_percent: float | None = None
    """Follows from both. Above zero, the prediction was too high; None unless both sides have a figure to compare."""

    def __post_init__(self) -> None:
        error = 0.0 if self.predicted == 0 and self.measured == 0 else None
        if self.predicted is not None and self.measured:
            error = (self.predicted / self.measured - 1) * 100
        msgspec.structs.force_setattr(self, "error_percent", error)


class Tolerances(msgspec.Struct, frozen=True, kw_only=True):
    """Allowed distance between prediction and measurement, in percent. None: not judged."""

    memory: float = 5.0
    payload: float = 0.0
    time: float | None = None


def join(predicted: dict[str, float], measured: dict[str, float]) -> tuple[FigureLine, ...]:
    """Every name of either side once, in the order in which the prediction, then the measurement, brings them."""
    names = [*predicted, *(name for name in measured if name not in predicted)]
    return tuple(FigureLine(name=name, predicted=predicted.get(name), measured=measured.get(name)) for name in names)


def outside(judged: Iterable[tuple[str, FigureLine, float]]) -> tuple[str, ...]:
    """Sentences for those of (name, line, percent allowed) that are further off, or lack a side."""
    found = []
    for name, line, allowed in judged:
        # 1e-9: sums of the same bytes in another order may differ in the last bit of a float.
        if line.error_percent is None:
            side = "predicted" if line.predicted is None else "measured"
            found.append(f"{name}: none was {side}")
        elif abs(line.error_percent) > allowed + 1e-9:
            found.append(f"{name}: {line.error_percent:+.2f} % where {allowed:g} % is allowed")
    return tuple(found)


def parse_tolerances(given: Iterable[str]) -> Tolerances:
    """`memory=5 payload=0 time=30`; a bare number is the memory's."""
    found: dict[str, float] = {}
    for text in given:
        name, _, value = text.rpartition("=")
        name = name or "memory"
        if name not in Tolerances.__struct_fields__:
            raise PlannerError("--tolerance", text, "must be memory, payload or time", "Write it like memory=5")
        try:
            found[name] = float(value)
        except ValueError:
            raise PlannerError("--tolerance", text, "is not a percentage", "Write it like memory=5") from None
        if not 0 <= found[name] < float("inf"):
            raise PlannerError("--tolerance", text, "must be zero or more", "Write it like memory=5")
    return Tolerances(**found)


def as_json(
    schema: str, report: msgspec.Struct, outside: tuple[str, ...] | None = None, tolerances: Tolerances | None = None
) -> bytes:
    """A report as one JSON object; every line carries its error. With a verdict when one was asked for."""
    whole = {"schema": schema} | msgspec.to_builtins(report)
    if outside is not None:
        whole["check"] = {"ok": not outside, "outside": outside, "tolerances_percent": msgspec.to_builtins(tolerances)}
    return msgspec.json.encode(whole)
