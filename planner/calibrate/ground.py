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
from planner.truth.collective import OPS
from planner.truth.machines import known_cluster
from planner.truth.notes import CannotPredict
from planner.truth.probe import read_probe
from planner.truth.rows import Row
from planner.units import GB

PROBED = "probe:"
"""Opens the name of a calibration that a probe gave: it has no file."""


def link_fits(rows: Sequence[Row]) -> tuple[tuple[LinkEntry, ...], dict[str, int], int]:
    """(curves of every link that rows of collectives measured, rows that cannot be used by reason, rows used)."""
    samples: list[links.Sample] = []
    unused: dict[str, int] = {}
    sources: list[str] = []
    for row in rows:
        if row.method != "collective":
            continue
        try:
            samples.append(link_sample(row))
            sources.append(row.source.repo_or_paper)
        except CannotPredict as error:
            unused[str(error)] = unused.get(str(error), 0) + 1
    if not samples:
        return (), unused, 0
    source = f"fitted on measured collectives: {'; '.join(sorted(set(sources)))}"
    return links.entries(samples, source), unused, len(samples)


def link_sample(row: Row) -> links.Sample:
    """A bandwidth row as seconds of one call (CannotPredict with the reason)."""
    call, ranks, measured = row.collective, row.hardware.gpus, row.measured.busbw_gbps
    if call is None or call.op not in OPS:
        raise CannotPredict(f"collective {call.op if call else None} is not predicted")
    if call.bytes is None or measured is None:
        raise CannotPredict("message size not stated")
    cluster = known_cluster(row)
    if ranks is None or ranks < 2:
        raise CannotPredict("a group of one rank sends nothing")
    seconds = OPS[call.op] * (ranks - 1) / ranks * call.bytes / (measured * GB)
    return links.Sample(op=call.op, ranks=ranks, payload_bytes=call.bytes, seconds=seconds, cluster=cluster)


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
