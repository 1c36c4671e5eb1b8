"""`@formula`: a function whose result has a unit and a source, and which can be watched at work.

Under `trace()` each call records its name, inputs, value, unit and source, nested as they were called: that tree is
`planner explain`. With `notes` a value also knows which formulas it came from, whatever is added to it later. Outside a
trace a call costs one comparison. Not here: any formula.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, Self, TypeVar

import msgspec

P = ParamSpec("P")
R = TypeVar("R")

_active: list[FormulaCall] = []
_known: dict[str, FormulaCall] = {}
_noting: list[bool] = []


class FormulaCall(msgspec.Struct):
    """One recorded call; `steps` are the formulas it called. Of a formula that was not called, what is known of it."""

    name: str
    unit: str
    source: str
    about: str
    inputs: dict[str, Any] = msgspec.field(default_factory=dict)
    value: Any = None
    steps: list[FormulaCall] = msgspec.field(default_factory=list)


class Noted(float):
    """A number and the formulas it came from, outermost first; sums, products and quotients of it know them too."""

    formulas: tuple[str, ...] = ()

    @classmethod
    def of(cls, value: float, *origins: object, by: str = "") -> Self:
        """`value`, made `by` a formula of the `origins` among which some may be noted."""
        made = cls(value)
        names = [by] * bool(by) + [name for one in origins if isinstance(one, Noted) for name in one.formulas]
        made.formulas = tuple(dict.fromkeys(names))
        return made


def _noted(operation: str) -> Callable[..., Any]:
    plain = getattr(float, operation)

    def operate(self: Noted, *others: Any) -> Any:
        value = plain(self, *others)
        return value if value is NotImplemented else Noted.of(value, self, *others)

    return operate


for _operation in ("add", "sub", "mul", "truediv", "floordiv", "mod"):
    for _name in (f"__{_operation}__", f"__r{_operation}__"):
        setattr(Noted, _name, _noted(_name))
for _name in ("__neg__", "__abs__"):
    setattr(Noted, _name, _noted(_name))


def formula(*, unit: str, source: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Declare a function a formula: `unit` of its value, `source` where it comes from."""

    def declare(function: Callable[P, R]) -> Callable[P, R]:
        signature: inspect.Signature | None = None
        about = (function.__doc__ or "").strip().splitlines()[0] if function.__doc__ else ""
        name = function.__name__

        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not _active:
                return function(*args, **kwargs)
            nonlocal signature
            signature = signature or inspect.signature(function)
            step = FormulaCall(name, unit, source, about, dict(signature.bind(*args, **kwargs).arguments))
            _active[-1].steps.append(step)
            _active.append(step)
            try:
                step.value = function(*args, **kwargs)
            finally:
                _active.pop()
            if _noting and isinstance(step.value, (int, float)) and not isinstance(step.value, bool):
                return Noted.of(step.value, *step.inputs.values(), step.value, by=name)  # type: ignore[return-value]
            return step.value  # type: ignore[no-any-return]

        _known[f"{function.__module__}.{name}"] = FormulaCall(name, unit, source, about)
        return call

    return declare


@contextmanager
def trace(name: str, *, notes: bool = False) -> Iterator[FormulaCall]:
    """Record every formula called inside, as the children of the step that is yielded. With `notes` the values of
    formulas are `Noted` there."""
    root = FormulaCall(name, "", "", "")
    _active.append(root)
    _noting.extend([True] * notes)
    try:
        yield root
    finally:
        _active.pop()
        del _noting[len(_noting) - notes :]


@contextmanager
def unrecorded() -> Iterator[None]:
    """Keep formulas called inside out of a trace: those that are asked for a rate and not for a figure."""
    outer, _active[:] = _active[:], []
    try:
        yield
    finally:
        _active[:] = outer


def watched() -> bool:
    """Whether a trace is being recorded."""
    return bool(_active)


def known_formulas() -> dict[str, FormulaCall]:
    """All formulas of the modules imported so far, by module and name."""
    return dict(sorted(_known.items()))
