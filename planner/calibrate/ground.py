"""What whole-step fits stand on: link curves from measured collectives, and what probes say of machines.

Not here: either fit (links.py, machine.py), or fits to training steps (fit.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from planner.calibrate import links, machine
from planner.calibrate.asked import RowQuestion
from planner.calibrate.probe import read_probe
from planner.spec.calibration import Calibration, LinkEntry

PROBED = "probe:"
"""Opens the name of a calibration that a probe gave: it has no file."""


def link_fits(rows: Sequence[RowQuestion]) -> tuple[tuple[LinkEntry, ...], dict[str, int], int]:
    """(curves of every link that rows of collectives measured, rows that cannot be used by reason, rows used)."""
    measured = [one for one in rows if one.row.collective is not None]
    samples = links.samples_of(measured)
    unused = len(measured) - len(samples)
    reasons = {"a collective whose network, size or operation is not known": unused} if unused else {}
    if not samples:
        return (), reasons, 0
    source = f"fitted on measured collectives: {'; '.join(sorted({one.row.source.repo_or_paper for one in measured}))}"
    return links.entries(samples, source), reasons, len(samples)


def with_probes(base: Calibration, probes: Sequence[Path]) -> Calibration:
    """The calibration with what probes measured on top, one after the other."""
    for path in probes:
        made = machine.calibration_of(read_probe(path))
        base = msgspec.structs.replace(made, name=f"{PROBED}{made.name}", based_on=base.name, base=base)
    return base


def without_probes(made: Calibration) -> Calibration:
    """With the entries of probes under it in the calibration itself: they have no file of their own to be based on."""
    while made.base is not None and made.base.name.startswith(PROBED):
        under = made.base
        merged = {group: getattr(under, group) + getattr(made, group) for group in ("compute", "overlap", "links")}
        made = msgspec.structs.replace(made, based_on=under.based_on, base=under.base, **merged)
    return made
