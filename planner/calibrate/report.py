"""The whole of `planner calibrate`: measurements in, a calibration and its errors before, after and left out.

A fit that does not predict left-out measurements better than what was there before is dropped: the file holds only what
was proven. Not here: the fits, or how the answer is printed (views/calibrate.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from planner.basics.errors import PlannerError
from planner.basics.quoting import for_comment
from planner.calibrate import bands as banding
from planner.calibrate import fit, holdout, kept
from planner.calibrate.asked import Reader, RowQuestion, each
from planner.calibrate.compute import Timer
from planner.calibrate.fit import FitGroup
from planner.calibrate.ground import link_fits, with_probes, without_probes
from planner.calibrate.holdout import Residual
from planner.calibrate.rows import Unread
from planner.calibrate.samples import Sample, of_rows, of_run
from planner.calibrate.statistics import RelativeErrors, errors_of
from planner.spec.calibration import Calibration, LinkEntry, as_toml

SCHEMA = "calibrate/1"


class ErrorLine(msgspec.Struct, frozen=True, kw_only=True):
    """One group's errors in memory or time: with the calibration underneath, fitted, and left out.

    `left_model` leaves out one model at a time (a fifth of the rows, where a runtime was measured with one model only),
    `left_source` one source, `left_gpu` one device.
    """

    what: str
    runtime: str
    gpu: str
    before: RelativeErrors
    fitted: RelativeErrors
    left_model: RelativeErrors
    left_source: RelativeErrors
    left_gpu: RelativeErrors


class OfSource(msgspec.Struct, frozen=True, kw_only=True):
    """One source's errors in memory or time, its rows left out by model, together, and by device (`ErrorLine`)."""

    what: str
    source: str
    left_model: RelativeErrors
    left_source: RelativeErrors
    left_gpu: RelativeErrors


class LeftOut(msgspec.Struct, frozen=True):
    """What was fitted, its residuals with their model or source left out, and how some measurements are fitted alike:
    what judges bands and fits without a source."""

    samples: tuple[Sample, ...]
    by_model: tuple[Residual, ...]
    by_source: tuple[Residual, ...]
    fitted: holdout.Fitter


class Calibrated(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: the calibration, errors by group and by source, what could not be used, what kept its default and
    why."""

    calibration: Calibration
    lines: tuple[ErrorLine, ...]
    sources: tuple[OfSource, ...]
    samples: int
    collectives: int
    unused: dict[str, int]
    kept: tuple[str, ...]
    probes: int = 0
    left_out: LeftOut


def calibrate(paths: Sequence[str | Path], base: Calibration, name: str, read: Reader = each) -> Calibrated:
    """Fit everything that files of rows, run folders and probes tell, on top of `base`. PlannerError for what cannot be
    read, and where nothing can be used."""
    files, folders, probes = sorted_out(paths)
    rows = list(_whole(read(files)))
    ground = with_probes(base, probes)
    links, unused, collectives = link_fits(rows)
    gathered = of_rows(rows, ground)
    samples = [*gathered.samples, *(of_run(folder) for folder in folders)]
    for reason, count in gathered.unused.items():
        unused[reason] = unused.get(reason, 0) + count
    if not samples and not links and not probes:
        why = max(unused, key=lambda reason: unused[reason], default="there are none")
        fix = "docs/adding-a-measurement.md has the format of rows"
        raise PlannerError("measurements", len(rows), f"nothing can be used: {why}", fix)
    found = of_samples(samples, ground, name, links, unused=unused, collectives=collectives)
    return msgspec.structs.replace(found, calibration=without_probes(found.calibration), probes=len(probes))


def _whole(rows: Iterable[RowQuestion | Unread]) -> Iterator[RowQuestion]:
    """The rows; a fit rests on none of a file with a line that is not a row (PlannerError)."""
    for one in rows:
        if isinstance(one, Unread):
            raise one.refusal
        yield one


def of_samples(
    samples: Sequence[Sample],
    base: Calibration,
    name: str,
    links: Sequence[LinkEntry] = (),
    *,
    unused: dict[str, int] | None = None,
    collectives: int = 0,
) -> Calibrated:
    """The fit, its judgement, and the bands that follow from what was left out."""
    under = base
    if links:  # steps are fitted over the curves that collectives gave
        under = Calibration(name="links", based_on=base.name, base=base, links=tuple(links))
    timer = Timer(under)
    fits = fit.SampleFits(timer, base, links, fit.on_several_devices(samples))
    before = holdout.residuals(samples, base, Timer(base))
    dropped: dict[FitGroup, str] = {}
    by_model = by_source = by_gpu = before
    while True:  # what is dropped changes what left-out measurements fall back on
        gone = frozenset(dropped)

        def fitted(some: Sequence[Sample], gone: frozenset[FitGroup] = gone) -> Calibration:
            return fits.calibration(some, name, gone)

        by_model = holdout.left_out(samples, holdout.by_model(samples), fitted, timer)
        by_source = holdout.left_out(samples, holdout.by_source, fitted, timer)
        by_gpu = holdout.left_out(samples, holdout.by_gpu, fitted, timer)
        unproven = kept.unproven(samples, before, by_model, by_source, fitted(samples), gone)
        if not unproven and kept.EVERYWHERE not in gone:
            unproven = kept.shared_in_vain(samples, before, holdout.unseen(samples, fitted, timer))
        if not unproven:
            told = fits.carried_groups(gone)
            without_any = gone | {(what, runtime, gpu) for _, runtime, gpu in told for what in ("speed", "host")}
            alone = holdout.left_out(samples, holdout.by_gpu, partial(fitted, gone=without_any), timer)
            unproven = kept.carried_in_vain(samples, alone, by_gpu, told)
        if not unproven:
            break
        dropped |= unproven
    made = fits.calibration(samples, name, frozenset(dropped))
    made = msgspec.structs.replace(made, bands=tuple(banding.bands(by_model, by_source)))
    after = holdout.residuals(samples, made, timer)
    return Calibrated(
        calibration=made,
        lines=tuple(_lines(samples, before, after, by_model, by_source, by_gpu)),
        sources=tuple(_of_sources(samples, by_model, by_source, by_gpu)),
        samples=len(samples),
        collectives=collectives,
        unused=unused or {},
        kept=tuple(dropped.values()),
        left_out=LeftOut(tuple(samples), tuple(by_model), tuple(by_source), fitted),
    )


# -- errors --------------------------------------------------------------------------------------------------------


def _lines(samples: Sequence[Sample], *sets: Sequence[Residual]) -> Iterator[ErrorLine]:
    names = ("before", "fitted", "left_model", "left_source", "left_gpu")
    for what, (runtime, gpu), errors in _errors(samples, ("runtime", "gpu"), sets):
        yield ErrorLine(what=what, runtime=runtime, gpu=gpu, **dict(zip(names, errors, strict=True)))


def _of_sources(samples: Sequence[Sample], *sets: Sequence[Residual]) -> Iterator[OfSource]:
    for what, (source,), errors in _errors(samples, ("source",), sets):
        left_model, left_source, left_gpu = errors
        yield OfSource(what=what, source=source, left_model=left_model, left_source=left_source, left_gpu=left_gpu)


def _errors(
    samples: Sequence[Sample], keys: tuple[str, ...], sets: Sequence[Sequence[Residual]]
) -> Iterator[tuple[str, tuple[str, ...], list[RelativeErrors]]]:
    """What was measured, the values of keys, and the errors of such samples in each set of residuals."""
    for what in ("memory_error", "time_error"):
        for values, members in fit.grouped(samples, *keys):
            ids = {one.id for one in members}
            found = [kept.errors_in(residuals, ids, what) for residuals in sets]
            if all(found):
                yield what.removesuffix("_error"), values, list(map(errors_of, found))


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
    """The calibration's file: what `planner.spec.calibration` reads back."""
    units = "planner/spec/calibration.py says what each key means. Units: bytes, seconds, shares."
    head = for_comment(f"{made_by}\n{units}") + "\n\n"
    return head + as_toml(found.calibration)


def answer_dict(found: Calibrated) -> dict[str, Any]:
    """The answer of --json."""
    return {
        "schema": SCHEMA,
        "calibration": msgspec.to_builtins(msgspec.structs.replace(found.calibration, base=None)),
        "measurements": found.samples,
        "collectives": found.collectives,
        "probes": found.probes,
        "unused": found.unused,
        "kept_defaults": list(found.kept),
        "errors": msgspec.to_builtins(found.lines),
        "errors_by_source": msgspec.to_builtins(found.sources),
    }
