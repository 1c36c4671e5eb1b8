"""Groups of a calibration that are not kept: too few measurements, or left-out ones that are predicted no better.

Not here: the fits (fit.py), or the predictions of what was left out (holdout.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Sequence

from planner.calibrate import fit
from planner.calibrate.allocator import LEAST, badness
from planner.calibrate.fit import ANYWHERE, FitGroup, timed
from planner.calibrate.holdout import Residual
from planner.calibrate.samples import Sample
from planner.calibrate.statistics import errors_of
from planner.spec.calibration import Calibration

CLEARLY = 0.05
"""Share by which the error on left-out measurements must fall: less may be luck."""
ALIKE = 0.01
"""Share by which a device's error must move to be called better or worse."""
OF_ONE_MODEL = 16
"""Measurements needed where all are of one model, so that none of another model can contradict them."""
LONGER_TAIL = 1.25
"""How much larger the ninth decile of the error may get for a better median."""
EVERYWHERE: FitGroup = ("speed", "shared", ANYWHERE)
"""The speed of runtimes and devices that were not measured."""
WORDS = {"allocator": "memory_error", "speed": "time_error"}
"""What a group of coefficients is judged by."""


def unproven(
    samples: Sequence[Sample],
    before: Sequence[Residual],
    by_model: Sequence[Residual],
    by_source: Sequence[Residual],
    made: Calibration,
    gone: frozenset[FitGroup],
) -> dict[FitGroup, str]:
    """Groups to drop, each with the reason: too few measurements, or left-out ones not predicted better than before.
    What runtimes share is judged first: the others fall back on it."""
    found: dict[FitGroup, str] = {}
    shared: list[FitGroup] = [
        ("allocator", "shared"),
        *(("speed", "shared", gpu) for gpu in {one.gpu for one in samples}),
    ]
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


def carried_in_vain(
    samples: Sequence[Sample], alone: Sequence[Residual], carried: Sequence[Residual], groups: Collection[FitGroup]
) -> dict[FitGroup, str]:
    """What fits on other devices tell that is no better for a device that was left out than what is there without
    them, on most of the devices where they differ or over all: each with the reason."""
    found: dict[FitGroup, str] = {}
    for group in sorted(groups):
        what, runtime, _ = group
        ids = {one.id for one in samples if one.runtime == runtime and one.step_s is not None}
        old, new = (errors_in(residuals, ids, "time_error") for residuals in (alone, carried))
        better = worse = 0
        devices = sorted({one.gpu for one in samples if one.id in ids})
        for gpu in devices:
            here = {one.id for one in samples if one.id in ids and one.gpu == gpu}
            before, after = (badness(errors_in(residuals, here, "time_error")) for residuals in (alone, carried))
            better += after < before * (1 - ALIKE)
            worse += after > before * (1 + ALIKE)
        if better <= worse or badness(new) >= badness(old) * (1 - CLEARLY):
            medians = [errors_of(some).median for some in (new, old)]
            found[group] = (
                f"{what} of {runtime} on devices that it was not fitted on: by those that it was {medians[0]:.1%} off "
                f"in the median against {medians[1]:.1%} without them where a device was left out, better on {better} "
                f"and worse on {worse} of {len(devices)}, keeps its default"
            )
    return found


def shared_in_vain(
    samples: Sequence[Sample], before: Sequence[Residual], unseen: Sequence[Residual]
) -> dict[FitGroup, str]:
    """The speed that all runtimes share on any device, with the reason, when it predicts no better than the guesses:
    most pairs of a runtime and a device, each by fits on other runtimes and devices alone, or the mean over these.
    A pair with less than LEAST measurements tells nothing, as in a fit."""
    pairs = []
    for _, members in timed([one for one in samples if one.device_kind == ANYWHERE]):
        ids = {one.id for one in members}
        old, new = (errors_in(residuals, ids, "time_error") for residuals in (before, unseen))
        if len(old) >= LEAST and new != old:
            pairs.append((badness(old), badness(new)))
    if not pairs:
        return {}
    better = sum(new < old for old, new in pairs)
    old, new = (statistics.mean(each) for each in zip(*pairs, strict=True))
    if 2 * better > len(pairs) and new < old * (1 - CLEARLY):
        return {}
    reason = (
        f"speed of all runtimes on any device: {new:.1%} off against {old:.1%} before where device and runtime were "
        f"left out, better on {better} of {len(pairs)}, keeps its default"
    )
    return {EVERYWHERE: reason}


def _worse(what: str, members: Sequence[Sample], before: Sequence[Residual], left: Sequence[Residual]) -> str | None:
    """Both errors in words, when the left-out one is not smaller."""
    ids = {one.id for one in members}
    old, new = (errors_in(residuals, ids, WORDS[what]) for residuals in (before, left))
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
    old, new = (errors_in(residuals, ids, "time_error") for residuals in (before, left))
    if not old or badness(new) <= badness(old):
        return None
    return f"{errors_of(new).median:.1%} off in the median against {errors_of(old).median:.1%} before"


def errors_in(residuals: Sequence[Residual], ids: set[str], what: str) -> list[float]:
    """The errors of one kind (`memory_error`, `time_error`) of the samples with these ids, where there is one."""
    return [error for one in residuals if one.sample.id in ids and (error := getattr(one, what)) is not None]


def _named(group: FitGroup) -> str:
    what, runtime, *gpu = group
    whose = "runtimes without measurements" if runtime == "shared" else runtime
    return f"{what} of {whose}" + (f" on {gpu[0]}" if gpu else "")
