"""The few operations that mean the same for one number and for a NumPy column.

Formulas use these and the plain operators, so that one function serves one layout and a hundred thousand.
Columns are float64: int64 overflows on the bytes of a large step. Not here: anything that knows a layout.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    import numpy as np

    Number: TypeAlias = float | np.ndarray[Any, np.dtype[np.float64]]
else:
    Number: TypeAlias = Any

SCALARS = (float, int, bool)


def is_column(*values: Number) -> bool:
    """Whether any of the values is a column (an array), told without importing NumPy."""
    for value in values:  # noqa: SIM110 - any() is slower, and this runs some ten thousand times a question
        if type(value) not in SCALARS and hasattr(value, "__array_priority__"):
            return True
    return False


def where(condition: Any, yes: Number, no: Number) -> Number:
    """`yes` where the condition holds, else `no`."""
    if is_column(condition, yes, no):
        import numpy as np  # columns only

        return np.where(condition, yes, no)
    return yes if condition else no


def in_shape_of(pattern: Number, value: Number = 0.0) -> Number:
    """`value`, or nothing, in the shape of another figure: a number beside a number, a column beside a column."""
    return value + 0.0 * pattern


def maximum(first: Number, *rest: Number) -> Number:
    """The largest value, element by element."""
    if len(rest) == 1 and type(first) in SCALARS and type(rest[0]) in SCALARS:  # by far the most, and twice as fast
        return max(first, rest[0])
    if is_column(first, *rest):
        import numpy as np  # columns only

        for value in rest:
            first = np.maximum(first, value)
        return first
    return max(first, *rest) if rest else first


def minimum(first: Number, second: Number) -> Number:
    """The smaller value, element by element."""
    if is_column(first, second):
        import numpy as np  # columns only

        return np.minimum(first, second)
    return min(first, second)


def ceil_div(numerator: Number, denominator: Number) -> Number:
    """Division rounded up, exact while the numerator is below 2^52."""
    if type(numerator) in SCALARS and type(denominator) in SCALARS:
        return -(-numerator // denominator)
    if is_column(numerator, denominator):
        import numpy as np  # columns only; floor division there costs ten times as much

        return np.ceil(numerator / denominator)
    return -(-numerator // denominator)


def floor_div(numerator: Number, denominator: Number) -> Number:
    """Division of whole numbers rounded down, exact while the numerator is below 2^52."""
    if is_column(numerator, denominator):
        import numpy as np  # columns only; floor division there costs ten times as much

        return np.floor(numerator / denominator)
    return numerator // denominator


def remainder(numerator: Number, denominator: Number) -> Number:
    """What is left of a division of whole numbers, exact while the numerator is below 2^52."""
    if is_column(numerator, denominator):
        return numerator - floor_div(numerator, denominator) * denominator
    return numerator % denominator


def by_value(function: Callable[[float], float], value: Number) -> Number:
    """`function` of a number, or of every distinct number of a column (for figures that need a walk each)."""
    if isinstance(value, (int, float)):
        return function(value)
    import numpy as np  # columns only

    distinct, place = np.unique(value, return_inverse=True)
    return np.array([function(float(one)) for one in distinct])[place]


# -- Edges -------------------------------------------------------------------------------------------------------------


def boundary(count: int, holds: Callable[[int], bool]) -> int:
    """The first of `count` places where `holds` ends, `count` where it never does: doubling, then bisecting.

    The place before it holds and it does not, whatever `holds` is; it is the only such place when `holds` is monotone.
    """
    low, stride = -1, 1
    while (high := min(low + stride, count)) < count and holds(high):
        low, stride = high, stride * 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return high
