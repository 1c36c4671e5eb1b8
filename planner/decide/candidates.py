"""A layout that fits beside others: what ranks it, and the exact figures for that.

Not here: which layouts are looked at (search.py, strategies.py).
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import msgspec

from planner.ask.question import Question, case_of, limit_bytes
from planner.basics.arith import Number, maximum
from planner.figures.comm import Traffic
from planner.figures.memory import LinesByStage, device_bytes, held_outside, hosts_hold, of_same_lines
from planner.figures.steptime import (
    KnownPasses,
    LeastLoads,
    StepTime,
    least_loads,
    least_step_seconds,
    step_time,
    step_traffic,
)
from planner.parallelism.case import Case
from planner.spec import Layout


class Candidate(NamedTuple):
    """A layout that fits, with what ranks it: seconds a sequence as predicted, bytes on the device, and the seconds if
    all that is sent were waited for (bounds below where rates are unknown)."""

    layout: Layout
    seconds_per_sequence: float
    device_bytes: float
    serial_seconds: float


def thing_of(layout: Layout) -> Layout:
    """One layout for all that are the same thing to a reader: batch, recomputation and switches are left out."""
    return msgspec.structs.replace(
        layout,
        micro_batch_size=1,
        grad_accum=1,
        recompute="none",
        recompute_modules=(),
        reshard_after_forward=True,
        sync_each_micro_batch=False,
    )


def order_of(candidate: Candidate) -> tuple[float, float]:
    """Faster first, then smaller."""
    return candidate.seconds_per_sequence, candidate.device_bytes


def beats(one: Candidate, other: Candidate) -> bool:
    """Whether a candidate is better than another in time or memory, and worse in neither."""
    return (
        one is not other
        and one.seconds_per_sequence <= other.seconds_per_sequence
        and one.device_bytes <= other.device_bytes
        and order_of(one) != order_of(other)
    )


def seconds_per_sequence(
    question: Question, case: Case, traffic: list[tuple[Traffic, Number]] | None = None
) -> tuple[Number, Number]:
    """(seconds a sequence as predicted, and if all that is sent were waited for): of one layout, its schedule played
    out; of columns, what no layout goes below.

    `traffic` is what the layout sends in a step, where that is known already.
    """
    time, batch = step_time(case, question.calibration, traffic), case.layout.global_batch_size
    if time.step_s is None:
        return time.comm_s / batch, time.comm_s / batch
    return time.step_s / batch, without_overlap(time) / batch


def without_overlap(time: StepTime) -> Number:
    """Seconds of a step of known time if all that is sent were waited for."""
    assert time.step_s is not None and time.exposed_comm_s is not None
    return time.step_s - time.exposed_comm_s + maximum(time.comm_s, time.exposed_comm_s)


def least_seconds(question: Question, case: Case, known: KnownPasses | None = None) -> Number:
    """A cheaper bound below both of `seconds_per_sequence`, a rounding's width lower; 0 where the device's rates are
    unknown."""
    step_s = least_step_seconds(case, question.calibration, known)
    return 0.0 if step_s is None else step_s * (1 - ROUNDING) / case.layout.global_batch_size


ROUNDING = 1e-9
"""Share by which sums of the same parts in another order may differ, and more."""


def passed_seconds(loads: LeastLoads, times: dict[str, int]) -> float:
    """Seconds of passes through units that occur so often."""
    seconds = 0.0
    for unit, some in loads.items():
        for load_s in some:
            seconds += times[unit] * load_s
    return seconds


def last_stage_seconds(case: Case, floor_s: float, loads: LeastLoads) -> float:
    """A bound below the seconds a sequence of a pipeline whose ranks hold one chunk each, a rounding's width lower: one
    micro-batch passes all stages there and back, all others the last one at least; 0 without a pipeline. `floor_s` is
    the layout's `floor_seconds`, `loads` what it adds up."""
    layout = case.layout
    if layout.pp == 1 or layout.pp_schedule not in ("1f1b", "gpipe") or not loads:
        return 0.0
    layers = zip(case.kinds, map(int, case.rank_layers(layout.pp - 1)), strict=True)
    last = passed_seconds(loads, {"embed": 0, **dict(layers), "tail": 1})
    accum = layout.grad_accum
    return layout.pp * (floor_s + (accum - 1) * last / case.cluster.gpus) / accum * (1 - ROUNDING)


def of_same_floor(layout: Layout) -> Layout:
    """One layout for all whose `floor_seconds` are the same: sizes, schedules, batches, and switches that no unit's
    work depends on (work.work_categories) are left out of them."""
    return msgspec.structs.replace(
        layout, dp_replicate=1, dp_shard=1, cp=1, tp=1, pp=1, ep=1, sequence_parallel=False, virtual_stages=1,
        pp_schedule="1f1b", micro_batch_size=1, grad_accum=1, reshard_after_forward=True, sync_each_micro_batch=False,
        cp_method="ring",
    )  # fmt: skip


def floor_bytes(case: Case) -> float:
    """Live bytes outside the model code: no micro-batch needs less, and no walk is needed to know it."""
    return float(max(sum(held.values()) for _, held in held_outside(case)))


def of_same_weights(layout: Layout) -> Layout:
    """One layout for all whose ranks hold the same of a unit's weights: batches, what runs again, and when gathered
    weights are given back and gradients are reduced are left out."""
    return msgspec.structs.replace(
        layout, micro_batch_size=1, grad_accum=1, recompute="none", recompute_modules=(), reshard_after_forward=True,
        sync_each_micro_batch=False,
    )  # fmt: skip


class LayoutFigures:
    """Exact figures of a question's single layouts, each worked out once for all searches of it.

    `known` are those of the same question where only its strategy differs. `surely`: only what the device holds at the
    upper end of its band, and hosts of known memory, counts as fitting.
    """

    def __init__(self, question: Question, known: LayoutFigures | None = None) -> None:
        self.question, self.surely = question, False
        self._seconds: dict[Layout, tuple[float, float]] = known._seconds if known else {}
        self._traffic: dict[Layout, list[tuple[Traffic, Number]]] = known._traffic if known else {}
        self._lines: dict[Layout, LinesByStage] = known._lines if known else {}
        self._passes: KnownPasses = known._passes if known else {}
        self._units: dict[Layout, dict[Hashable, Any]] = known._units if known else {}
        self._floors: dict[Layout, float] = known._floors if known else {}
        self._loads: dict[Layout, LeastLoads] = known._loads if known else {}

    def case(self, layout: Layout) -> Case:
        """The question about a layout. Layouts that share a unit's weights alike work out its figures once."""
        case = case_of(self.question, layout)
        case.__dict__["of_every_stage"] = self._units.setdefault(of_same_weights(layout), {})
        return case

    def limit(self, case: Case) -> float:
        """Bytes that a layout may be predicted to show on the device."""
        return limit_bytes(self.question, case, surely=self.surely)

    def hosts_hold(self, case: Case) -> bool:
        """Whether the hosts hold what a layout offloads, as far as is known."""
        held = hosts_hold(case)
        return held is True or (held is None and not self.surely)

    def seconds(self, layout: Layout) -> tuple[float, float]:
        """Seconds a sequence: as predicted, and if nothing overlapped."""
        if layout not in self._seconds:
            case, traffic = self.case(layout), None
            if layout.tp == layout.pp == layout.cp == layout.ep == 1:
                # What data-parallel ranks send depends on neither the micro-batch's size nor recomputation.
                alike = msgspec.structs.replace(layout, micro_batch_size=1, recompute="none", recompute_modules=())
                if alike not in self._traffic:
                    self._traffic[alike] = step_traffic(self.case(alike))
                traffic = self._traffic[alike]
            predicted, serial = seconds_per_sequence(self.question, case, traffic)
            self._seconds[layout] = float(predicted), float(serial)
        return self._seconds[layout]

    def floor_seconds(self, layout: Layout) -> float:
        """Seconds a sequence that no batch of the layout goes below: each GPU does its share of the work, nothing
        else."""
        key = of_same_floor(layout)
        if key not in self._floors:
            case = self.case(key)
            self._loads[key] = least_loads(case, self.question.calibration)
            self._floors[key] = passed_seconds(self._loads[key], case.whole_repeats) / self.question.cluster.gpus
        return self._floors[key]

    def least_seconds(self, layout: Layout, enough: float = math.inf) -> float:
        """A cheap bound below `seconds`; where a cheaper one is above `enough`, that one."""
        case = self.case(layout)
        staged = last_stage_seconds(case, self.floor_seconds(layout), self._loads[of_same_floor(layout)])
        return staged if staged > enough else float(least_seconds(self.question, case, self._passes))

    def bytes(self, layout: Layout, enough: float = math.inf) -> float:
        """Bytes of a device at the layout's peak; where a stage has more than `enough`, those of the first such stage
        that was looked at."""
        key, case = of_same_lines(layout), self.case(layout)
        if key not in self._lines:
            self._lines[key] = LinesByStage(self.case(key))
        live = size = 0.0
        for peak in self._lines[key].peaks(layout.micro_batch_size):
            if peak > live:
                live, size = peak, float(device_bytes(case, peak))
            if size > enough:
                break
        return size
