"""docs/accuracy/fitted.md: what `make calibration` fitted to the published rows, against rows that were left out.

Not here: any figure (planner/calibrate).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from planner.calibrate.report import Calibrated
from planner.views.calibrate import HEAD, SOURCE_HEAD, entry_count, row_text, source_text
from tests.truth.published.coverage import Coverage
from tests.truth.published.probability import Probabilities, Threshold

PAGE = """## Fitted against left out

`{command}` makes the calibration `{name}` (presets/calibrations) and this table.
It has {entries} fitted entries, of {samples} measurements of training steps and {collectives} of collectives.
A fit stays only if, where its model was left out, it predicts better than the guesses that were there before.
Errors are median / ninth decile of |predicted / measured - 1| over n measurements.
Where a runtime was measured with one model only, a fifth of its rows was left out at a time.
Where a GPU was left out, one fit of its runtime to all other GPUs tells of it if that is better on more of them than
worse, else what other runtimes share, with that fit's time of an operation on the host if that is better in turn, else
the guesses.
"""


FITS = """## Whether it fits

Probabilities of every run with a known end, each predicted by a calibration and bands that never saw its source, and by
such that never saw its model; scores and tenths are of the device holding what is needed when memory is short.
A run that worked fitted; one that ran out of memory did not, nor one that would have for sure by the runs beside it.

{sections}"""


JUDGED = """### {left} left out

Of {n:,} runs {fitted:,} fitted. Brier score {brier:.4f}; the best answer that is the same for all has {constant:.4f}.

| probability | runs | mean | fitted |
|---|---:|---:|---:|
{deciles}

What is wrong (fitted, called not to / did not fit, called to) when a layout is called fitting from a probability on:
that of the device holding what is needed when memory is short, and that of its holding all that the allocator would
take.

| from | what is needed | all of it |
|---|---:|---:|
{thresholds}

{rule}
"""


RULE = """`fits` calls what the device holds all of with at least {at:.0%}: {fits}.
The lowest threshold by which the other runs' failures are all called so, chosen without what was left out: {chosen}."""


HELD = """## What the bands hold

A band promises 90 % of measured runs.
Each is judged by a band that was made without its model, and by one that was made without its source.
The last column is the mean over runtimes: nanotron has most of the measurements, and the band of software without any
counts each runtime once.

| | software | runtimes | n | model left out | source left out | each runtime once |
|---|---|---:|---:|---:|---:|---:|
{rows}
"""


def held_section(found: Sequence[Coverage]) -> str:
    """Shares of left-out measurements that lie in their band, by kind of software."""
    rows = [
        f"| {one.what} | {one.software} | {one.runtimes} | {one.n:,} "
        f"| {one.left_model:.0%} | {one.left_source:.0%} | {one.each_runtime:.0%} |"
        for one in found
    ]
    return HELD.format(rows="\n".join(rows))


def fits_section(judged: Mapping[str, Probabilities]) -> str:
    """Brier score, reliability by tenth and both errors of every threshold, by what was left out."""
    return FITS.format(sections="\n".join(_judged(left, found) for left, found in judged.items()))


def _judged(left: str, found: Probabilities) -> str:
    tenths = [
        f"| {one.low:.0%} to {one.low + 0.1:.0%} | {one.n:,} | {one.predicted:.1%} | {one.fitted:.1%} |"
        for one in found.deciles
    ]
    rows = [
        f"| {needed.probability:.0%} | {_both(needed)} | {_both(room)} |"
        for needed, room in zip(found.thresholds, found.rooms, strict=True)
    ]
    rule = RULE.format(at=found.fits.probability, fits=_both(found.fits), chosen=_both(found.chosen))
    numbers = {"n": found.n, "fitted": found.fitted, "brier": found.brier, "constant": found.constant}
    return JUDGED.format(left=left, **numbers, deciles="\n".join(tenths), thresholds="\n".join(rows), rule=rule)


def _both(found: Threshold) -> str:
    return f"{_share(found.fitted_called_not)} / {_share(found.not_fitted_called)}"


def _share(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.1%}"


def page(found: Calibrated, held: Sequence[Coverage], fits: Mapping[str, Probabilities], command: str) -> str:
    """The whole page; `command` is what wrote it."""
    made = found.calibration
    lines = [
        PAGE.format(
            command=command,
            name=made.name,
            entries=entry_count(made),
            samples=found.samples,
            collectives=found.collectives,
        ),
        f"| {' | '.join(HEAD)} |",
        "|---|---|---|" + "---:|" * 6,
        *(f"| {' | '.join(row_text(one))} |" for one in found.lines),
        "",
    ]
    if found.kept:
        lines += ["Kept as they were:\n", *(f"- {line}." for line in found.kept), ""]
    lines += [
        "## By source\n",
        "Each source's rows together, whatever software and devices they are of.\n",
        f"| {' | '.join(SOURCE_HEAD)} |",
        "|---|---|" + "---:|" * 4,
        *(f"| {' | '.join(source_text(one))} |" for one in found.sources),
        "",
    ]
    lines += [held_section(held), fits_section(fits)]
    return "\n".join(lines)
