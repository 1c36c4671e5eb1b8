"""The tables of measured kernels as groups of columns with their seconds.

Not here: fits (fit.py), or errors (judge.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from planner.calibrate.kernels.predict import Column, RowGroup, grouped
from planner.calibrate.kernels.tables import read

PROJECT = Path(__file__).resolve().parents[2]
TABLES = PROJECT / "tests" / "truth" / "kernels"
FITTED = ("matmul", "attention", "experts", "collectives")


class Measured(msgspec.Struct, frozen=True):
    """A group with its measured seconds, and the table it is from."""

    group: RowGroup
    seconds: Column
    table: str

    @property
    def name(self) -> str:
        """Kind and variant in a few words."""
        return f"{self.group.kind} {self.group.variant}".removesuffix(" forward")

    def some(self, chosen: Column) -> Measured:
        """The rows that are chosen (a mask)."""
        return Measured(self.group.some(chosen), self.seconds[chosen], self.table)


def measured(*tables: str, only: tuple[str, ...] = ("",)) -> Iterator[Measured]:
    """The groups of tables, by their rows that have a measurement."""
    for name in tables:
        rows = [row for row in read(TABLES / f"{name}.csv") if row.measured_s is not None and row.gpu.startswith(only)]
        for group in grouped(rows):
            yield Measured(group, np.array([rows[place].measured_s for place in group.places]), name)
