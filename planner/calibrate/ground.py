"""What whole-step fits stand on: link curves from measured collectives, and what probes say of machines.

Not here: either fit (links.py, machine.py), or fits to training steps (fit.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from planner import presets
from planner.calibrate import links, machine
from planner.calibration import Calibration, LinkEntry
from planner.truth.probe import read_probe
from planner.truth.rows import Row

PROBED = "probe:"
"""Opens the name of a calibration that a probe gave: it has no file."""


def link_fits(rows: Sequence[Row]) -> tuple[tuple[LinkEntry, ...], dict[str, int], int]:
    """(curves of every link that rows of collectives measured, rows that cannot be used by reason, rows used)."""
    measured = [row for row in rows if row.method == "collective"]
    samples = links.samples_of(measured)
    unused = len(measured) - len(samples)
    reasons = {"a collective whose network, size or operation is not known": unused} if unused else {}
    if not samples:
        return (), reasons, 0
    source = f"fitted on measured collectives: {'; '.join(sorted({row.source.repo_or_paper for row in measured}))}"
    return links.entries(samples, source), reasons, len(samples)


def with_probes(base: Calibration, probes: Sequence[Path]) -> Calibration:
    """The calibration with what probes measured on top, one after the other."""
    for path in probes:
        probe = read_probe(path)
        best = machine.reached(probe)
        known = machine.known_gpu(probe)
        if known is not None:
            spec = presets.gpu(known)
            memory = spec.memory_bytes_per_s or best.memory_bytes_per_s
            best = best._replace(flops_per_s=best.flops_per_s | spec.flops_per_s, memory_bytes_per_s=memory)
        made = machine.calibration_of(probe, known or probe.name, best)
        base = msgspec.structs.replace(made, name=f"{PROBED}{probe.name}", based_on=base.name, base=base)
    return base
