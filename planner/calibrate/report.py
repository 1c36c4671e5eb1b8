"""The whole of `planner calibrate`: measurements in, a calibration and its errors before, after and left out.

A fit that does not predict left-out measurements better than what was there before is dropped: the file holds only what
was proven. Not here: the fits, or how the answer is printed (views/calibrate.py).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from planner.basics.errors import PlannerError
from planner.calibrate import bands as banding
from planner.calibrate import fit, holdout
from planner.calibrate.allocator import LEAST, badness
from planner.calibrate.asked import Asked, Reader, each
from planner.calibrate.compute import Timer
from planner.calibrate.coverage import Coverage, coverage
from planner.calibrate.fit import Group
from planner.calibrate.ground import link_fits, with_probes, without_probes
from planner.calibrate.holdout import Residual
from planner.calibrate.rows import Unread
from planner.calibrate.samples import Sample, of_rows, of_run
from planner.calibrate.statistics import Errors, errors_of
from planner.spec.calibration import Calibration, LinkEntry, as_toml

SCHEMA = "calibrate/1"
CLEARLY = 0.05
"""Share by which the error on left-out measurements must fall: less may be luck."""
OF_ONE_MODEL = 16
"""Measurements needed where all are of one model, so that none of another model can contradict them."""
LONGER_TAIL = 1.25
"""How much larger the ninth decile of the error may get for a better median."""
WORDS = {"allocator": "memory_error", "speed": "time_error"}
"""What a group of coefficients is judged by."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One group's errors in memory or time: with the calibration underneath, fitted, and left out.

    `left_model` leaves out one model at a time (a fifth of the rows, where a runtime was measured with one model only),
    `left_source` one source, `left_gpu` one device.
    """

    what: str
    runtime: str
    gpu: str
    before: Errors
    fitted: Errors
    left_model: Errors
    left_source: Errors
    left_gpu: Errors


class Calibrated(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: the calibration, errors by group, what could not be used and what kept its default, and why.

    `without` is by source the calibration, bands included, that all other sources give, `without_model` the same by
    model, `coverage` how many left-out measurements such bands hold.
    """

    calibration: Calibration
    lines: tuple[Line, ...]
    samples: int
    collectives: int
    unused: dict[str, int]
    kept: tuple[str, ...]
    probes: int = 0
    without: dict[str, Calibration] = {}
    without_model: dict[str, Calibration] = {}
    coverage: tuple[Coverage, ...] = ()


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


def _whole(rows: Iterable[Asked | Unread]) -> Iterator[Asked]:
    """The rows; a fit rests on none of a file with a line that is no row (PlannerError)."""
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
    fits = fit.Fits(timer, base, links, fit.on_several_devices(samples))
    before = holdout.residuals(samples, base, Timer(base))
    dropped: dict[Group, str] = {}
    by_model = by_source = by_gpu = before
    while True:  # what is dropped changes what left-out measurements fall back on
        gone = frozenset(dropped)

        def fitted(some: Sequence[Sample], gone: frozenset[Group] = gone) -> Calibration:
            return fits.calibration(some, name, gone)

        by_model = holdout.left_out(samples, holdout.by_model(samples), fitted, timer)
        by_source = holdout.left_out(samples, holdout.by_source, fitted, timer)
        by_gpu = holdout.left_out(samples, holdout.by_gpu, fitted, timer)
        unproven = _unproven(samples, before, by_model, by_source, fitted(samples), gone)
        if not unproven:
            carried = frozenset(("speed", runtime, fit.ANYWHERE) for runtime in fits.carried)
            alone = holdout.left_out(samples, holdout.by_gpu, partial(fitted, gone=gone | carried), timer)
            unproven = _carried_in_vain(samples, alone, by_gpu, carried - gone)
        if not unproven:
            break
        dropped |= unproven
    made = fits.calibration(samples, name, frozenset(dropped))
    made = msgspec.structs.replace(made, bands=tuple(banding.bands(by_model, by_source)))
    after = holdout.residuals(samples, made, timer)
    without, without_model = (
        {left: _without(of, left, samples, by_model, by_source, fitted) for left in {of(one) for one in samples}}
        for of in (holdout.by_source, lambda one: one.model)
    )
    return Calibrated(
        calibration=made,
        lines=tuple(_lines(samples, before, after, by_model, by_source, by_gpu)),
        samples=len(samples),
        collectives=collectives,
        unused=unused or {},
        kept=tuple(dropped.values()),
        without=without,
        without_model=without_model,
        coverage=coverage(by_model, by_source, made, without),
    )


def _without(
    of: Callable[[Sample], str],
    left: str,
    samples: Sequence[Sample],
    by_model: Sequence[Residual],
    by_source: Sequence[Residual],
    fitted: holdout.Fitted,
) -> Calibration:
    """The calibration that all measurements give but those of one source or model, with bands of their residuals."""
    made = fitted([one for one in samples if of(one) != left])
    inside, outside = ([one for one in some if of(one.sample) != left] for some in (by_model, by_source))
    return msgspec.structs.replace(made, bands=tuple(banding.bands(inside, outside)))


# -- what is kept --------------------------------------------------------------------------------------------------


def _unproven(
    samples: Sequence[Sample],
    before: Sequence[Residual],
    by_model: Sequence[Residual],
    by_source: Sequence[Residual],
    made: Calibration,
    gone: frozenset[Group],
) -> dict[Group, str]:
    """Groups to drop, each with the reason: too few measurements, or left-out ones not predicted better than before.
    What runtimes share is judged first: the others fall back on it."""
    found: dict[Group, str] = {}
    shared: list[Group] = [("allocator", "shared"), *(("speed", "shared", gpu) for gpu in {one.gpu for one in samples})]
    for group in shared:
        members = [one for one in samples if group[2:] in ((), (one.gpu,))]
        if group in gone or not fit.has_group(made, (group[0], "shared", *(group[2:] or ("cuda",)))):
            continue
        if worse := _worse(group[0], members, before, by_source):
            found[group] = f"{_named(group)}: {worse} where their source was left out, keeps its default"
    if found:
        return found
    for group, members in fit.groups_of(samples).items():
        if group in gone:
            continue
        if not fit.has_group(made, group):
            found[group] = f"{_named(group)}: {len(members)} measurements of {LEAST} needed, keeps its default"
        elif len({one.model for one in members}) == 1 and len(members) < OF_ONE_MODEL:
            few = f"{len(members)} measurements, all of one model, of {OF_ONE_MODEL} needed"
            found[group] = f"{_named(group)}: {few}, keeps its default"
        elif worse := _worse(group[0], members, before, by_model):
            found[group] = f"{_named(group)}: {worse} where its model was left out, keeps its default"
        elif group[0] == "speed" and (worse := _harmed(members, before, by_source)):
            found[group] = f"{_named(group)}: {worse} where its source was left out, keeps its default"
    return found


def _carried_in_vain(
    samples: Sequence[Sample], alone: Sequence[Residual], carried: Sequence[Residual], groups: Collection[Group]
) -> dict[Group, str]:
    """Runtimes whose fits on other devices are no better for a device that was left out than what is there without
    them, on most of their devices or over all: each with the reason."""
    found: dict[Group, str] = {}
    for group in sorted(groups):
        ids = {one.id for one in samples if one.runtime == group[1] and one.step_s is not None}
        old, new = (_found(residuals, ids, "time_error") for residuals in (alone, carried))
        better = 0
        devices = sorted({one.gpu for one in samples if one.id in ids})
        for gpu in devices:
            here = {one.id for one in samples if one.id in ids and one.gpu == gpu}
            before, after = (_found(residuals, here, "time_error") for residuals in (alone, carried))
            better += badness(after) < badness(before)
        if 2 * better <= len(devices) or badness(new) >= badness(old) * (1 - CLEARLY):
            medians = [errors_of(some).median for some in (new, old)]
            found[group] = (
                f"speed of {group[1]} on devices that it was not fitted on: by those that it was {medians[0]:.1%} off "
                f"in the median against {medians[1]:.1%} without them where a device was left out, better on {better} "
                f"of {len(devices)}, keeps its default"
            )
    return found


def _worse(what: str, members: Sequence[Sample], before: Sequence[Residual], left: Sequence[Residual]) -> str | None:
    """Both errors in words, when the left-out one is not smaller."""
    ids = {one.id for one in members}
    old, new = (_found(residuals, ids, WORDS[what]) for residuals in (before, left))
    if not old or not new:
        return None
    before_it, after_it = errors_of(old), errors_of(new)
    if badness(new) >= badness(old) * (1 - CLEARLY):
        return f"{after_it.median:.1%} off in the median against {before_it.median:.1%} before"
    if after_it.p90 > before_it.p90 * LONGER_TAIL:
        return f"a tenth is {after_it.p90:.0%} off or more against {before_it.p90:.0%} before"
    return None


def _harmed(members: Sequence[Sample], before: Sequence[Residual], left: Sequence[Residual]) -> str | None:
    """Both errors in words, where several sources measured a speed and those left out are predicted worse with what the
    others told than with the guesses."""
    if len({one.source for one in members}) == 1:
        return None
    ids = {one.id for one in members}
    old, new = (_found(residuals, ids, "time_error") for residuals in (before, left))
    if not old or badness(new) <= badness(old):
        return None
    return f"{errors_of(new).median:.1%} off in the median against {errors_of(old).median:.1%} before"


def _found(residuals: Sequence[Residual], ids: set[str], what: str) -> list[float]:
    return [error for one in residuals if one.sample.id in ids and (error := getattr(one, what)) is not None]


def _named(group: Group) -> str:
    what, runtime, *gpu = group
    whose = "runtimes without measurements" if runtime == "shared" else runtime
    return f"{what} of {whose}" + (f" on {gpu[0]}" if gpu else "")


# -- errors --------------------------------------------------------------------------------------------------------


def _lines(samples: Sequence[Sample], *sets: Sequence[Residual]) -> list[Line]:
    lines = []
    for what in ("memory_error", "time_error"):
        for (runtime, gpu), members in fit.grouped(samples, "runtime", "gpu"):
            ids = {one.id for one in members}
            each = [_found(residuals, ids, what) for residuals in sets]
            if all(each):
                names = ("before", "fitted", "left_model", "left_source", "left_gpu")
                errors = dict(zip(names, map(errors_of, each), strict=True))
                lines.append(Line(what=what.removesuffix("_error"), runtime=runtime, gpu=gpu, **errors))
    return lines


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
    head = f"# {made_by}\n# planner/spec/calibration.py says what each key means. Units: bytes, seconds, shares.\n\n"
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
    }
