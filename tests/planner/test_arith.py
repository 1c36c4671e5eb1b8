"""What means the same for a number and for a column, on small figures by hand.

Not here: the formulas that use it (test_columns.py).
"""

from __future__ import annotations

import numpy as np
import pytest

from planner.basics.arith import by_value, ceil_div, in_shape_of, is_column, maximum, minimum, where

COLUMN = np.array([0.0, 2.0, 5.0])


def test_a_value_takes_the_shape_of_another_figure_and_nothing_of_its_size() -> None:
    assert in_shape_of(7.0) == 0.0 and not is_column(in_shape_of(7.0))
    assert in_shape_of(7.0, 3.0) == 3.0
    assert in_shape_of(COLUMN).tolist() == [0.0, 0.0, 0.0]
    assert in_shape_of(COLUMN, 3.0).tolist() == [3.0, 3.0, 3.0]
    assert in_shape_of(2.0, COLUMN).tolist() == COLUMN.tolist()


def test_a_column_is_an_array_wherever_it_stands() -> None:
    assert not is_column() and not is_column(1, 2.0, True)
    assert is_column(COLUMN) and is_column(1.0, COLUMN) and is_column(COLUMN, 1.0)


def test_where_chooses_row_by_row() -> None:
    assert (where(True, 1, 2), where(False, 1, 2)) == (1, 2)
    assert where(COLUMN > 1, COLUMN, -1.0).tolist() == [-1.0, 2.0, 5.0]
    assert where(True, COLUMN, 9.0).tolist() == COLUMN.tolist()
    assert where(False, 9.0, COLUMN).tolist() == COLUMN.tolist()


def test_the_largest_and_the_smaller_row_by_row() -> None:
    assert (maximum(2), maximum(2, 7, 3), minimum(2, 7), minimum(7, 2)) == (2, 7, 2, 2)
    assert maximum(1.0, COLUMN, 3.0).tolist() == [3.0, 3.0, 5.0]
    assert minimum(COLUMN, 3.0).tolist() == minimum(3.0, COLUMN).tolist() == [0.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("numerator", "denominator", "quotient"), [(0, 3, 0), (1, 3, 1), (3, 3, 1), (4, 3, 2), (6, 3, 2)]
)
def test_division_is_rounded_up(numerator: int, denominator: int, quotient: int) -> None:
    assert ceil_div(numerator, denominator) == quotient
    assert ceil_div(np.array([float(numerator)]), denominator).tolist() == [quotient]


def test_a_walk_is_made_for_every_distinct_number_once() -> None:
    walked = []

    def square(number: float) -> float:
        walked.append(number)
        return number * number

    assert by_value(square, 3.0) == 9.0
    assert by_value(square, np.array([4.0, 2.0, 4.0])).tolist() == [16.0, 4.0, 16.0]
    assert sorted(walked) == [2.0, 3.0, 4.0]
