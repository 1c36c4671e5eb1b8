"""What a fit needs of one measurement: its case, the live bytes predicted for it, what was measured.

Made from rows and from run folders. Not here: any fit, or the question a row asks (planner/calibrate/asked.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from planner.basics.errors import PlannerError, refusing
from planner.basics.quantities import GIB
from planner.basics.reading import NOT_JSON, read_bytes
from planner.calibrate.asked import RowQuestion, RunConditions
from planner.calibrate.predict import Replayed, replay
from planner.figures.allocator import block_bytes, bytes_beside, lasting_bytes, more_communicators, pending_bytes
from planner.figures.memory import memory_breakdown
from planner.parallelism.case import Case
from planner.spec.calibration import OWN_RUNS, Calibration
from planner.spec.plan import read_plan
from planner.spec.record import RUN_SCHEMA, RunRecord


class Sample(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """One measurement. `source` is the repository, paper or run it comes from, `model` its model's name.

    `memory_bytes` is of `memory_kind` (allocated, reserved or device); `live_bytes` is the predicted peak of live
    tensors on the fullest stage, or the measured one where a row has both, of which `lasting_bytes` stay between steps;
    `apart_bytes` as engines.base, with what was pending when memory was read; `communicators` are NCCL's beside the
    first. `context_bytes` is device memory beside what the allocator reserved. `step_s` are seconds of an optimizer
    step, `conditions` are those of the run. None is not measured.
    """

    id: str
    source: str
    model: str
    case: Case
    live_bytes: float
    lasting_bytes: float = 0.0
    apart_bytes: float = 0.0
    communicators: float = 0.0
    memory_kind: str | None = None
    memory_bytes: float | None = None
    context_bytes: float | None = None
    step_s: float | None = None
    conditions: RunConditions = RunConditions()

    @property
    def runtime(self) -> str:
        """Whose code ran, of whatever version: coefficients are a runtime's."""
        return self.case.runtime.base

    @property
    def gpu(self) -> str:
        """The device."""
        return self.case.cluster.gpu.name

    @property
    def device_kind(self) -> str:
        """cuda, hip or cpu."""
        return self.case.cluster.gpu.kind


class Gathered(msgspec.Struct, frozen=True):
    """Samples, and how many measurements could not be used, by reason."""

    samples: tuple[Sample, ...]
    unused: dict[str, int]


def of_rows(rows: Sequence[RowQuestion], calibration: Calibration) -> Gathered:
    """Every row that measured memory or speed and can be predicted; rows of collectives are not among them."""
    samples: list[Sample] = []
    unused: dict[str, int] = {}
    for one in replay([one for one in rows if one.row.collective is None], calibration):
        made = _of_row(one)
        samples += made
        if not made:
            reason = one.skipped or ("it failed: no figure" if one.row.failed else "no figure that is predicted")
            unused[reason] = unused.get(reason, 0) + 1
    return Gathered(tuple(samples), unused)


def _of_row(one: Replayed) -> list[Sample]:
    row, case = one.row, one.case
    if case is None or row.failed or one.predicted.logged_gib is None:
        return []
    measured, kind = row.measured, one.predicted.memory_kind
    peak = measured.peak_memory_gib
    step_s = one.measured_step_s if one.predicted.step_time_s is not None else None
    made = []
    common = Sample(
        id=row.id,
        source=row.source.repo_or_paper,
        model=case.model.name,
        case=case,
        live_bytes=one.predicted.logged_gib * GIB,
        context_bytes=None if measured.context_gib is None else measured.context_gib * GIB,
        conditions=one.asked.conditions,
    )
    common = _beside(common, measured.forwards_ahead or 0.0)
    if peak is not None or step_s is not None or measured.context_gib is not None:
        size = None if peak is None else peak * GIB
        made.append(msgspec.structs.replace(common, memory_kind=kind, memory_bytes=size, step_s=step_s))
    if measured.reserved_gib is not None and kind == "allocated" and peak is not None:
        # What the allocator added to live bytes that were measured too: no prediction's error in between.
        size, live = measured.reserved_gib * GIB, peak * GIB
        both = {"memory_kind": "reserved", "memory_bytes": size, "live_bytes": live, "context_bytes": None}
        made.append(msgspec.structs.replace(common, id=f"{row.id} reserved", **both))
    return made


def _beside(sample: Sample, forwards: float) -> Sample:
    """The sample with what its live bytes bring about, the host a number of forwards ahead."""
    case, live = sample.case, sample.live_bytes
    return msgspec.structs.replace(
        sample,
        lasting_bytes=float(lasting_bytes(case, live)),
        apart_bytes=float(bytes_beside(case, live) + block_bytes(case, live) + pending_bytes(case, forwards)),
        communicators=float(more_communicators(case.layout)),
    )


def of_run(folder: Path) -> Sample:
    """A run that succeeded, as its folder records it: the plan by value, live bytes and seconds as measured.

    PlannerError for a folder without plan.json and run.json, a run that failed, and one that measured nothing.
    """
    plan = read_plan(folder / "plan.json")
    with refusing(OSError, "run", folder, "has no run.json", "Give folders that executor run made"):
        raw = read_bytes(folder / "run.json")
    with refusing(NOT_JSON, "run", folder / "run.json", "is not a record of a run"):
        record = msgspec.json.decode(raw, type=RunRecord)
    if record.schema.partition("/")[0] != RUN_SCHEMA.partition("/")[0]:
        raise PlannerError("run", folder / "run.json", f"has schema {record.schema}, not {RUN_SCHEMA}")
    if record.exit_code:
        raise PlannerError("run", folder, f"ended with exit code {record.exit_code}", "Leave it out")
    case = Case.of(plan)
    peaks = [max(phase.total for phase in rank.memory) for rank in record.measured if rank.memory]
    if not peaks and record.step_s is None:
        raise PlannerError("run", folder, "measured neither memory nor time", "Leave it out")
    sample = Sample(
        id=folder.name or str(folder),
        source=OWN_RUNS,
        model=plan.model.name,
        case=case,
        live_bytes=memory_breakdown(case).peak.total,
        memory_kind="allocated" if peaks else None,
        memory_bytes=max(peaks, default=None),
        step_s=record.step_s,
    )
    return _beside(sample, 0.0)


def distinct(samples: Iterable[Sample], key: str) -> list[str]:
    """Values of `model` or `source`, in order."""
    return sorted({str(getattr(one, key)) for one in samples})
