"""A finished run of a matrix cell as a measured row: the plan that was run, and what came of it.

Not here: running it (measure.py), or reading rows back as questions (planner.calibrate).
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import msgspec

from executor.folder.rundir import RankError
from executor.measure.machine import Machine
from executor.measure.matrix import MatrixCell
from planner.basics.quantities import GIB
from planner.calibrate import rows
from planner.figures.steptime import throughput
from planner.parallelism.case import Case
from planner.spec.record import RankMeasurements, RunRecord

FAKE_NOTE = "one rank of the layout in torch's fake process group: real tensors, nothing is sent, memory only"
META_NOTE = "sharded before it had data, since the host has no room for the whole model: loading was not measured"
NOT_PHASES = ("steps", "reserved", "device")
"""Of the allocator's figures, those that are no phase's."""


def made_row(
    cell: MatrixCell,
    record: RunRecord,
    errors: dict[int, RankError],
    machine: Machine,
    *,
    built_on_meta: bool = False,
    load: float | None = None,
) -> rows.Row:
    """The row of a cell: its measurements, or how it ended. A fake world has no meaningful times: they are left out.

    A model built without data was never loaded, so that phase is left out. `load` is the machine's load average just
    before: others' work makes a step longer.
    """
    out_of_memory = any(error.out_of_memory for error in errors.values()) or record.cause == "out-of-memory killer"
    ended_well = record.exit_code == 0
    notes = [FAKE_NOTE] if cell.fake_world else []
    if built_on_meta:
        notes.append(META_NOTE)
    if cell.memory_limit is not None:
        notes.append(f"a rank may take {cell.memory_limit / GIB:g} GiB of its device")
    if not ended_well:
        notes.append(record.message)
    # A rank that is killed for memory cannot say so: where no counter tells (record.cause), it is not known.
    known = ended_well or out_of_memory or record.cause == "killed" or "SIGKILL" not in record.message
    oom = out_of_memory if known else None
    status = "completed" if ended_well else "out of memory" if out_of_memory else f"crashed: {record.message}"
    facts = machine.facts | {"load_before": None if load is None else round(load, 2)}
    memory = _memory(record.measured, machine.kind, loaded=not built_on_meta) if ended_well else {}
    return rows.Row(
        id=cell.id,
        source=rows.Source(
            repo_or_paper=rows.OWN_SOURCE,
            path_or_table=f"executor measure{' --fake-world' if cell.fake_world else ''}",
            commit_or_date=datetime.now(UTC).date().isoformat(),
        ),
        plan=cell.plan,
        measured=rows.Measured(oom=oom, **memory, **_speed(cell, record, machine)),
        status=status,
        versions=record.versions,
        gpu_facts={key: value for key, value in facts.items() if value is not None},
        notes="; ".join(notes) or None,
    )


def _memory(measured: tuple[RankMeasurements, ...], kind: str, *, loaded: bool) -> dict[str, Any]:
    """Of the fullest rank: its peak, the peaks of its phases, and what lived at the fullest moment by term."""
    if not measured:
        return {}
    if kind == "cpu":
        fullest = max(measured, key=lambda one: max((phase.total for phase in one.memory), default=0.0))
        peaks = {phase.phase: phase.total for phase in fullest.memory}
        device: dict[str, float] = {}
    else:
        fullest = max(measured, key=lambda one: max(_allocated(one).values(), default=0.0))
        peaks, device = _allocated(fullest), fullest.allocator_peak_bytes
    if not loaded:
        peaks.pop("load", None)
    if not peaks:
        return {}
    reserved, used = device.get("reserved"), device.get("device")
    seen = [phase for phase in fullest.memory if phase.phase in peaks]
    terms = max(seen, key=lambda phase: phase.total).terms if seen else {}
    return {
        "peak_memory_gib": _gib(max(peaks.values())),
        "memory_kind": "allocated",
        "reserved_gib": _gib(reserved),
        "device_gib": _gib(used),
        "context_gib": _gib(max(0.0, used - reserved)) if used is not None and reserved is not None else None,
        "phases_gib": {phase: _gib(peak) for phase, peak in peaks.items()},
        "terms_gib": {term: _gib(size) for term, size in terms.items() if size},
    }


def _allocated(one: RankMeasurements) -> dict[str, float]:
    """Allocated peaks by phase, whole steps among them: the allocator's own word, without what followed storages."""
    kept = {name: peak for name, peak in one.allocator_peak_bytes.items() if name not in NOT_PHASES}
    steps = one.allocator_peak_bytes.get("steps")
    return kept if steps is None else kept | {"steps": steps}


def _speed(cell: MatrixCell, record: RunRecord, machine: Machine) -> dict[str, Any]:
    """The median step and what follows from it. MFU only against a datasheet's rate: a CPU preset's is a guess."""
    if cell.fake_world or record.exit_code or record.step_s is None or cell.estimate is None:
        return {}
    case: Case = cell.estimate.case
    found = throughput(case, msgspec.structs.replace(cell.estimate.time, step_s=record.step_s))
    rated = machine.kind != "cpu"
    slowest = (max(times) for times in zip(*(one.step_s for one in record.measured), strict=False))
    return {
        "step_time_s": record.step_s,
        "step_times_s": tuple(round(value, 6) for value in slowest),
        "tokens_per_s_per_gpu": _number(found.tokens_per_s_per_gpu),
        "tflops_per_gpu": _number(found.tflops_per_gpu),
        "mfu": _number(found.mfu) if rated else None,
        "hfu": _number(found.hfu) if rated else None,
    }


def _gib(value: float | None) -> float | None:
    return None if value is None else round(value / GIB, 9)


def _number(value: Any) -> float | None:
    return None if value is None else float(f"{value:.6g}")
