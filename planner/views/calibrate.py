"""`planner calibrate` as text: errors before, fitted and left out, what was kept.

Not here: any figure (planner/calibrate).
"""

from __future__ import annotations

from planner.basics.display import Element, Table, as_text
from planner.calibrate.report import Calibrated, ErrorLine, OfSource
from planner.calibrate.statistics import RelativeErrors
from planner.spec.calibration import Calibration

SOURCE_HEAD = ("", "source", "n", "model left out", "source left out", "GPU left out")
HEAD = ("", "runtime", "device", "n", "before", "fitted", "model left out", "source left out", "GPU left out")


def calibrate_text(found: Calibrated, width: int | None = None) -> str:
    """Errors by group, then what kept its default and what was not used."""
    made = found.calibration
    used = f"{found.samples} measurements of training steps, {found.collectives} of collectives"
    used += f", {found.probes} probes" if found.probes else ""
    parts: list[Element] = [f"calibration {made.name}, based on {made.based_on}: {entry_count(made)} entries of {used}"]
    if found.lines:
        about = (
            "|predicted / measured - 1|, median / ninth decile. Left out: predicted without its model, source or GPU."
        )
        parts += ["", about, "", Table(HEAD, tuple(row_text(one) for one in found.lines), 3)]
    if found.kept:
        parts += ["", "Kept as they were:", *(f"  {line}" for line in found.kept)]
    if found.unused:
        parts += ["", "Not used:"]
        parts += [f"  {count:5d}  {reason}" for count, reason in _by_count(found.unused)]
    return as_text(parts, width)


def entry_count(made: Calibration) -> int:
    """Entries in all groups but the bands, which are a judgement."""
    return sum(len(group) for group in (made.allocator, made.compute, made.overlap, made.links))


def row_text(one: ErrorLine) -> tuple[str, ...]:
    """A group's errors as the cells under HEAD."""
    errors = (one.before, one.fitted, one.left_model, one.left_source, one.left_gpu)
    return (one.what, one.runtime, one.gpu, str(one.before.n), *(_errors(each) for each in errors))


def source_text(one: OfSource) -> tuple[str, ...]:
    """A source's errors as the cells under SOURCE_HEAD."""
    errors = (one.left_model, one.left_source, one.left_gpu)
    return (one.what, one.source, str(one.left_model.n), *(_errors(each) for each in errors))


def _errors(one: RelativeErrors) -> str:
    return f"{one.median:.1%} / {one.p90:.0%}"


def _by_count(unused: dict[str, int]) -> list[tuple[int, str]]:
    return sorted(((count, reason) for reason, count in unused.items()), reverse=True)
