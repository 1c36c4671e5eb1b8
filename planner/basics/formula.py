"""`@formula`: a function whose result has a unit and a source, and which can be watched at work.

Under `trace()` each call records its name, inputs, value, unit and source, nested as they were called: that tree is
`planner explain`. Outside a trace a call costs one comparison. Not here: any formula.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import msgspec

P = ParamSpec("P")
R = TypeVar("R")

_active: list[Step] = []
_known: dict[str, Step] = {}


class Step(msgspec.Struct):
    """One recorded call; `steps` are the formulas it called. Of a formula that was not called, what is known of it."""

    name: str
    unit: str
    source: str
    about: str
    inputs: dict[str, Any] = msgspec.field(default_factory=dict)
    value: Any = None
    steps: list[Step] = msgspec.field(default_factory=list)


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
            step = Step(name, unit, source, about, dict(signature.bind(*args, **kwargs).arguments))
            _active[-1].steps.append(step)
            _active.append(step)
            try:
                step.value = function(*args, **kwargs)
            finally:
                _active.pop()
            return step.value  # type: ignore[no-any-return]

        _known[f"{function.__module__}.{name}"] = Step(name, unit, source, about)
        return call

    return declare


@contextmanager
def trace(name: str) -> Iterator[Step]:
    """Record every formula called inside, as the children of the step that is yielded."""
    root = Step(name, "", "", "")
    _active.append(root)
    try:
        yield root
    finally:
        _active.pop()


def watched() -> bool:
    """Whether a trace is being recorded."""
    return bool(_active)


def known_formulas() -> dict[str, Step]:
    """All formulas of the modules imported so far, by module and name."""
    return dict(sorted(_known.items()))
