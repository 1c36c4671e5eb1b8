"""The whole of `planner calibrate`: measurements in, a calibration and its errors before, after and left out.

Not here: the fits, or how the answer is printed (views/calibrate.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from planner.calibrate import bands as banding
from planner.calibrate import fit, holdout
from planner.calibrate.compute import Timer
from planner.calibrate.holdout import Residual
from planner.calibrate.samples import Sample, distinct, of_rows, of_run
from planner.calibration import Calibration, as_toml
from planner.errors import PlannerError
from planner.truth.rows import Row, read_rows

SCHEMA = "calibrate/1"


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    """Of `n` measurements: median and ninth decile of |predicted/measured - 1|, and the median of it signed."""

    n: int
    median: float
    p90: float
    bias: float


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One group's errors in memory or time: with the calibration underneath, fitted, and left out by model and source.

    `left_model` None: it is the only model, so nothing was left to fit its runtime on.
    """

    what: str
    runtime: str
    gpu: str
    before: Errors
    fitted: Errors
    left_model: Errors | None
    left_source: Errors | None


class Calibrated(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: the calibration, errors by group, what could not be used and what kept its default."""

    calibration: Calibration
    lines: tuple[Line, ...]
    samples: int
    unused: dict[str, int]
    kept: tuple[str, ...]


def calibrate(paths: Sequence[str | Path], base: Calibration, name: str) -> Calibrated:
    """Fit everything that files of rows, run folders and probes tell, on top of `base`. PlannerError for what cannot be
    read, and where nothing can be used."""
    rows, folders, probes = sorted_out(paths)
    gathered = of_rows(read_rows(rows), base) if rows else None
    samples = [*(gathered.samples if gathered else ()), *(of_run(folder) for folder in folders)]
    unused = dict(gathered.unused) if gathered else {}
    if not samples and not probes:
        why = max(unused, key=lambda reason: unused[reason], default="there are no rows")
        raise PlannerError("rows", len(rows), f"nothing in them can be used: {why}", "tests/truth/README.md has the format")
    return of_samples(samples, base, name, unused)


def of_samples(samples: Sequence[Sample], base: Calibration, name: str, unused: dict[str, int] | None = None) -> Calibrated:
    """The fit, its judgement, and the bands that follow from what was left out."""
    timer = Timer(base)
    fits = fit.Fits(timer)

    def fitted(some: Sequence[Sample]) -> Calibration:
        return fits.calibration(some, name)

    made = fitted(samples)
    by_model = holdout.left_out(samples, "model", fitted, timer)
    by_source = holdout.left_out(samples, "source", fitted, timer)
    made = fit.replaced(made, bands=tuple(banding.bands(judged(by_model, samples))))
    before, after = (holdout.residuals(samples, known, timer) for known in (base, made))
    lines = _lines(before, after, by_model, by_source)
    return Calibrated(
        calibration=made,
        lines=tuple(lines),
        samples=len(samples),
        unused=unused or {},
        kept=tuple(fit.kept_defaults(samples, made)),
    )


def judged(left_out: Sequence[Residual], samples: Sequence[Sample]) -> list[Residual]:
    """Residuals of models whose runtime had other models to be fitted on: the others judge the defaults, not a fit."""
    models = {
        runtime: distinct(members, "model") for (runtime,), members in fit.grouped(samples, "runtime")
    }
    return [one for one in left_out if len(models[one.sample.runtime]) > 1]


def _lines(*sets: Sequence[Residual]) -> list[Line]:
    before, after, by_model, by_source = (
        {(one.sample.id): one for one in residuals} for residuals in sets
    )
    lines = []
    samples = [one.sample for one in sets[0]]
    for what in ("memory_error", "time_error"):
        for (runtime, gpu), members in fit.grouped(samples, "runtime", "gpu"):
            ids = [one.id for one in members]
            first = _errors(before, ids, what)
            last = _errors(after, ids, what)
            if first is None or last is None:
                continue
            several = len(distinct([one for one in samples if one.runtime == runtime], "model")) > 1
            lines.append(
                Line(
                    what=what.removesuffix("_error"),
                    runtime=runtime,
                    gpu=gpu,
                    before=first,
                    fitted=last,
                    left_model=_errors(by_model, ids, what) if several else None,
                    left_source=_errors(by_source, ids, what),
                )
            )
    return lines


def _errors(residuals: dict[str, Residual], ids: Sequence[str], what: str) -> Errors | None:
    found = [error for one in ids if (error := getattr(residuals[one], what)) is not None]
    return errors_of(found) if found else None


def errors_of(found: Sequence[float]) -> Errors:
    """Statistics of errors predicted/measured - 1."""
    sizes = sorted(abs(error) for error in found)
    return Errors(
        n=len(sizes),
        median=statistics.median(sizes),
        p90=sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        bias=statistics.median(found),
    )


# -- files in, files out -------------------------------------------------------------------------------------------


def sorted_out(paths: Sequence[str | Path]) -> tuple[list[Path], list[Path], list[Path]]:
    """(row files, run folders, probes) by what each path is."""
    rows: list[Path] = []
    folders: list[Path] = []
    probes: list[Path] = []
    for path in map(Path, paths):
        if path.is_dir():
            folders.append(path)
        elif path.suffix == ".json":
            probes.append(path)
        elif path.suffix == ".jsonl":
            rows.append(path)
        else:
            rule = "is neither rows (.jsonl), a run's folder nor a probe (.json)"
            raise PlannerError("measurements", path, rule, "Give rows, folders that executor run made, or probes")
    return rows, folders, probes


def file_text(found: Calibrated, made_by: str) -> str:
    """The calibration's file: what `planner.calibration` reads back."""
    head = f"# {made_by}\n# planner/calibration.py says what each key means. Units: bytes, seconds, shares.\n\n"
    return head + as_toml(found.calibration)


def answer_dict(found: Calibrated) -> dict[str, Any]:
    """The answer of --json."""
    return {
        "schema": SCHEMA,
        "calibration": msgspec.to_builtins(found.calibration),
        "samples": found.samples,
        "unused": found.unused,
        "kept_defaults": list(found.kept),
        "errors": msgspec.to_builtins(found.lines),
    }


def used_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows of training steps: those of collectives fit link curves."""
    return [row for row in rows if row.method != "collective"]
