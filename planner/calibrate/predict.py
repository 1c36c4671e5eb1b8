"""What the planner says of a measured row: peak memory by kind, step time, tokens/s, whether it fits.

Rows that hold the same memory share their walk, so thousands take seconds. Not here: the question (asked.py), how
far off a prediction is (score.py), or what the terms of a peak are (memory.py: asked only of rows that are shown).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import msgspec

from planner.ask.fits import Verdict, fit_probability, usable_bytes, verdict
from planner.basics.errors import one_line
from planner.basics.quantities import GIB
from planner.calibrate.asked import CannotPredict, RowQuestion
from planner.calibrate.collective import bus_bandwidth_gbps
from planner.calibrate.largest import largest_micro_batch, largest_seq_len
from planner.calibrate.rows import OWN_SOURCE, Measured, Row, Source, Unread
from planner.figures.allocator import needed_bytes, pending_bytes
from planner.figures.memory import device_bytes, memory_breakdown, memory_lines, of_same_lines, peak_at, reserved_bytes
from planner.figures.passes import coefficients
from planner.figures.steptime import scalar, throughput
from planner.parallelism.case import Case
from planner.spec import Layout
from planner.spec.calibration import Calibration
from planner.spec.plan import PhaseMemory


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One row's prediction; None is unknown. `peak_memory_gib` is of the kind and the pipeline stage that the row
    measured (`memory_kind`, `memory_stage`), `logged_gib` the live bytes there, the other kinds are of the fullest
    stage. `fits`, `verdict` and `fits_probability` are what `planner estimate` would say where no headroom is asked
    for, and None where the card's memory is unknown; `needed_probability` is that of the card holding what is needed
    when memory is short. The largest that fits, of those that were measured, use all of it.
    """

    allocated_gib: float | None = None
    logged_gib: float | None = None
    reserved_gib: float | None = None
    device_gib: float | None = None
    peak_memory_gib: float | None = None
    memory_kind: str | None = None
    step_time_s: float | None = None
    tokens_per_s_per_gpu: float | None = None
    fits: bool | None = None
    verdict: Verdict | None = None
    fits_probability: float | None = None
    needed_probability: float | None = None
    busbw_gbps: float | None = None
    largest_micro_batch: float | None = None
    largest_seq_len: float | None = None


class Replayed(msgspec.Struct, frozen=True):
    """A row with its prediction, or with the reason why there is none (`skipped`)."""

    asked: RowQuestion
    predicted: Figures
    skipped: str | None = None

    @property
    def row(self) -> Row:
        """What was measured."""
        return self.asked.row

    @property
    def case(self) -> Case | None:
        """What was predicted, of a training step."""
        return None if self.skipped else self.asked.case

    @property
    def assumptions(self) -> tuple[str, ...]:
        """What a prediction rests on that the row leaves open."""
        return () if self.skipped else self.asked.assumptions

    @property
    def measured_step_s(self) -> float | None:
        """Seconds of an optimizer step: as measured, or from tokens/s and the batch that was predicted."""
        measured = self.row.measured
        if measured.step_time_s is not None:
            return measured.step_time_s
        if measured.tokens_per_s_per_gpu is None or self.case is None:
            return None
        layout = self.case.layout
        tokens = layout.global_batch_size * self.case.job.seq_len
        return tokens / (measured.tokens_per_s_per_gpu * layout.world_size)


Walks = dict[tuple[object, ...], list[tuple[float, float]]]
"""Memory lines by what they depend on."""


def replay(rows: Iterable[RowQuestion | Unread], calibration: Calibration) -> list[Replayed]:
    """Every row, in order; a line that is not a row has its refusal for a reason."""
    walks: Walks = {}
    return [_unread(row) if isinstance(row, Unread) else _replayed(row, calibration, walks) for row in rows]


def _unread(one: Unread) -> Replayed:
    place = f"{one.file}:{one.line}"
    row = Row(id=place, source=Source(repo_or_paper=place), measured=Measured(), file=one.file)
    return Replayed(RowQuestion(row=row), Figures(), f"is not a row: {one.refusal}")


def _replayed(asked: RowQuestion, calibration: Calibration, walks: Walks) -> Replayed:
    if asked.row.collective is not None:
        try:
            return Replayed(asked, Figures(busbw_gbps=bus_bandwidth_gbps(asked, calibration)))
        except CannotPredict as error:
            return Replayed(asked, Figures(), one_line(str(error)))
    if not measures_anything(asked.row):
        return Replayed(asked, Figures(), "nothing was measured")
    if asked.case is None:
        return Replayed(asked, Figures(), one_line(asked.refusal or "no question"))
    case = calibrated(msgspec.structs.replace(asked.case, loaded_here=_loaded_here(asked.row)), calibration)
    figures = _figures(case, asked, calibration, walks)
    return Replayed(msgspec.structs.replace(asked, case=case), figures)


def _loaded_here(row: Row) -> bool:
    """Whether a row's peak is of a run whose model this project's trainer loaded: what others' software does before it
    trains is its own, and not predicted."""
    phases = row.measured.phases_gib
    return "load" in phases if phases else row.source.repo_or_paper == OWN_SOURCE


def measures_anything(row: Row) -> bool:
    """Whether there is a figure, or a failure, to hold a prediction against."""
    one = row.measured
    figures = (one.peak_memory_gib, one.reserved_gib, one.device_gib, one.tokens_per_s_per_gpu, one.step_time_s)
    return row.failed or one.largest or any(figure is not None for figure in figures)


def calibrated(case: Case, calibration: Calibration) -> Case:
    """The case with the allocator that the calibration knows for its runtime and device."""
    gpu = case.cluster.gpu
    allocator = calibration.of(case.runtime.name, gpu.name, gpu.kind).allocator
    runtime = msgspec.structs.replace(case.runtime, allocator=allocator)
    return msgspec.structs.replace(case, runtime=runtime)


def _figures(case: Case, asked: RowQuestion, calibration: Calibration, walks: Walks) -> Figures:
    gpu, kind = case.cluster.gpu, asked.memory_kind
    allocated = _allocated(case, walks)
    fullest = _by_kind(case, allocated)
    on_first = asked.row.measured.memory_stage == "first"
    logged = _logged(case, asked, _allocated(case, walks, first_stage=True) if on_first else allocated)
    device, needed = fullest["device"], float(needed_bytes(case, allocated))
    time = asked.conditions.step_time(case, calibration)
    speed = throughput(case, time)
    bands = coefficients(case, calibration).bands
    edges = partial(_device_bytes, walks=walks)
    measured = asked.row.measured
    return Figures(
        allocated_gib=allocated / GIB,
        logged_gib=logged["allocated"] / GIB,
        reserved_gib=fullest["reserved"] / GIB,
        device_gib=device / GIB,
        peak_memory_gib=None if kind is None else logged[kind] / GIB,
        memory_kind=kind,
        step_time_s=scalar(time.step_s),
        tokens_per_s_per_gpu=scalar(speed.tokens_per_s_per_gpu),
        fits=None if gpu.memory_bytes is None else device <= usable_bytes(gpu.memory_bytes, bands),
        verdict=verdict(device, bands, gpu.memory_bytes),
        fits_probability=fit_probability(device, bands, gpu.memory_bytes),
        needed_probability=fit_probability(needed, bands, gpu.memory_bytes),
        largest_micro_batch=None if measured.largest_micro_batch is None else largest_micro_batch(case, edges),
        largest_seq_len=None if measured.largest_seq_len is None else largest_seq_len(case, edges),
    )


def _device_bytes(case: Case, walks: Walks) -> float:
    return _by_kind(case, _allocated(case, walks))["device"]


def _by_kind(case: Case, allocated: float) -> dict[str, float]:
    """Bytes by the kinds that rows measure, of a number of live ones."""
    return {
        "allocated": allocated,
        "reserved": float(reserved_bytes(case, allocated)),
        "device": float(device_bytes(case, allocated)),
    }


def _logged(case: Case, asked: RowQuestion, allocated: float) -> dict[str, float]:
    """The same as the row's source read them: with blocks that were pending, as many as the device has room for."""
    found = _by_kind(case, allocated)
    found["device"] -= float(pending_bytes(case))
    pending = float(pending_bytes(case, asked.row.measured.forwards_ahead or 0.0))
    if (capacity := case.cluster.gpu.memory_bytes) is not None:
        pending = min(pending, max(capacity - found["device"], 0.0))
    return found | {kind: found[kind] + pending for kind in ("reserved", "device")}


def _allocated(case: Case, walks: Walks, *, first_stage: bool = False) -> float:
    """Live bytes at the peak of the fullest stage, or of the first; layouts with equal memory lines are walked once."""
    layout: Layout = of_same_lines(case.layout)
    key = (case.model, case.job, layout, case.runtime, case.loaded_here, first_stage)
    if key not in walks:
        walks[key] = memory_lines(msgspec.structs.replace(case, layout=layout), first_stage=first_stage)
    return peak_at(walks[key], case.layout.micro_batch_size)


def terms_of(one: Replayed) -> PhaseMemory | None:
    """The fullest phase with its terms in bytes, of one row that is shown."""
    return None if one.case is None else memory_breakdown(one.case).peak
