"""Cells and their results as a table of predicted beside measured, and as the measure/1 object.

Not here: running anything (measure.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from executor.measure.lines import FigureLine
from executor.measure.machine import Machine
from executor.measure.matrix import MatrixCell
from executor.measure.measure import Result
from planner.basics.display import Table, as_text
from planner.basics.quantities import GIB, format_bytes, format_seconds

SCHEMA = "measure/1"
HEAD = ("cell", "memory", "measured", "error", "step", "measured", "error", "outcome")
FIGURES = ("peak_memory_gib", "reserved_gib", "device_gib", "step_time_s")
"""What is compared, by its name in a row."""
UNKNOWN = "n/a"


def predicted(cell: MatrixCell) -> dict[str, Any] | None:
    """The planner's prediction for a cell; None where it refuses the cell. A fake world has no step time."""
    one = cell.estimate
    if one is None:
        return None
    capacity = one.case.cluster.gpu.memory_bytes
    step_s = None if cell.fake_world or one.time.step_s is None else float(one.time.step_s)
    return {
        "peak_memory_gib": one.memory.peak.total / GIB,
        "peak_phase": one.memory.peak.phase,
        "reserved_gib": one.memory.reserved_bytes / GIB,
        "device_gib": one.memory.device_bytes / GIB,
        "capacity_gib": None if capacity is None else capacity / GIB,
        "step_time_s": step_s,
        "fits": capacity is None or one.memory.device_bytes <= capacity,
    }


def as_dict(result: Result) -> dict[str, Any]:
    """One cell with its prediction, its row and the errors in percent (above zero: the prediction was too high)."""
    row = result.row
    return {
        "id": result.cell.id,
        "options": result.cell.options,
        "fake_world": result.cell.fake_world,
        "memory_limit_gib": None if result.cell.memory_limit is None else result.cell.memory_limit / GIB,
        "predicted": predicted(result.cell),
        "measured": None if row is None else msgspec.to_builtins(row.measured),
        "error_percent": {name: line.error_percent for name, line in _figures(result).items()},
        "status": None if row is None else row.status,
        "refusal": result.refusal,
        "measured_before": result.known,
    }


def as_json(results: Sequence[Result], machine: Machine, output: Path | None) -> bytes:
    """measure/1: this machine, and every cell."""
    return msgspec.json.encode(
        {
            "schema": SCHEMA,
            "machine": msgspec.structs.asdict(machine),
            "output": None if output is None else str(output),
            "cells": [as_dict(result) for result in results],
        }
    )


def listing(cells: Sequence[MatrixCell], width: int | None = None) -> str:
    """The cells and their predictions, nothing run."""
    rows = []
    for cell in cells:
        guess = predicted(cell)
        if guess is None:
            rows.append((cell.id, UNKNOWN, "", UNKNOWN, cell.refusal or ""))
            continue
        fits = cell.refusal or ("fits" if guess["fits"] else "out of memory expected")
        memory, step = _memory(guess["peak_memory_gib"]), format_seconds(guess["step_time_s"])
        rows.append((cell.id, memory, guess["peak_phase"], step, fits))
    return as_text([Table(("cell", "memory", "fullest in", "step", "predicted"), tuple(rows))], width)


def results_text(results: Sequence[Result], width: int | None = None) -> str:
    """Predicted beside measured, one line a cell."""
    return as_text([Table(HEAD, tuple(_line(result) for result in results))], width)


def progress(result: Result) -> str:
    """One finished cell in a line."""
    _, memory, measured, error, step, step_measured, _, outcome = _line(result)
    return f"    memory {memory} predicted, {measured} measured ({error}); step {step}, {step_measured}; {outcome}"


def _figures(result: Result) -> dict[str, FigureLine]:
    """A cell's figures on both sides, by name."""
    guess = predicted(result.cell) or {}
    measured = {} if result.row is None else msgspec.structs.asdict(result.row.measured)
    return {name: FigureLine(name=name, predicted=guess.get(name), measured=measured.get(name)) for name in FIGURES}


def _line(result: Result) -> tuple[str, ...]:
    figures = _figures(result)
    memory, step = figures["peak_memory_gib"], figures["step_time_s"]
    return (
        result.cell.id,
        _memory(memory.predicted),
        _memory(memory.measured),
        _percent(memory.error_percent),
        format_seconds(step.predicted),
        format_seconds(step.measured),
        _percent(step.error_percent),
        _outcome(result),
    )


def _outcome(result: Result) -> str:
    """The end of a cell's run, in the terms of its row."""
    before = " (measured before)" if result.known else ""
    if (row := result.row) is None:
        return f"not run: {result.refusal}" + before
    return (row.status or ("out of memory" if row.measured.oom else "completed")) + before


def _percent(error: float | None) -> str:
    return UNKNOWN if error is None else f"{error:+.1f} %"


def _memory(gib: float | None) -> str:
    return format_bytes(None if gib is None else gib * GIB)
