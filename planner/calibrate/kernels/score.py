"""How far predictions of kernels are from measurements: by GPU and kind, median and 90th percentile.

Not here: the predictions (predict.py), or how they are shown (views/kernels.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from planner.calibrate.kernels.predict import RowPrediction
from planner.calibrate.kernels.tables import KernelRow
from planner.calibrate.statistics import errors_of


class KernelErrors(msgspec.Struct, frozen=True, kw_only=True):
    """Of one GPU and kind: rows, those predicted and measured, the median and 90th percentile of
    |predicted/measured - 1|, the median of predicted/measured, and on which GPU the numbers were measured."""

    gpu: str
    kind: str
    rows: int
    compared: int
    median: float | None
    p90: float | None
    factor: float | None
    measured_on: str | None


def summary(rows: Sequence[KernelRow], answers: Sequence[RowPrediction]) -> list[KernelErrors]:
    """One line for each GPU and kind, in the order in which they come."""
    by: dict[tuple[str, str], list[tuple[KernelRow, RowPrediction]]] = {}
    for row, answer in zip(rows, answers, strict=True):
        by.setdefault((row.gpu, f"{row.kind} {row.variant}".strip()), []).append((row, answer))
    found = []
    for (gpu, kind), both in by.items():
        factors = [
            answer.predicted_s / row.measured_s
            for row, answer in both
            if answer.predicted_s is not None and row.measured_s is not None
        ]
        of = errors_of([factor - 1 for factor in factors]) if factors else None
        measured_on = next((answer.measured_on for _, answer in both if answer.measured_on), None)
        found.append(
            KernelErrors(
                gpu=gpu, kind=kind, rows=len(both), compared=len(factors), median=of.median if of else None,
                p90=of.p90 if of else None, factor=1 + of.bias if of else None, measured_on=measured_on,
            )
        )  # fmt: skip
    return found
