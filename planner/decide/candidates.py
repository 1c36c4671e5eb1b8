"""A layout that fits beside others: what ranks it, and the exact figures for that.

Not here: which layouts are looked at (search.py, strategies.py).
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from planner.ask.question import Question, case_of
from planner.basics.arith import Number
from planner.figures.comm import Traffic
from planner.figures.memory import device_bytes, held_outside, peak_bytes
from planner.figures.steptime import least_step_seconds, step_time, whole_pass_seconds
from planner.parallelism.case import Case
from planner.spec import Layout


class Candidate(NamedTuple):
    """A layout that fits, with what ranks it: seconds a sequence (a bound below when rates are unknown)."""

    layout: Layout
    seconds_per_sequence: float
    device_bytes: float


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
    question: Question, layout: Layout, traffic: list[tuple[Traffic, Number]] | None = None
) -> Number:
    """Seconds a sequence of one layout, its schedule played out; of columns, seconds that no layout goes below.

    `traffic` is what the layout sends in a step, where that is known already.
    """
    return seconds_of_case(question, case_of(question, layout), traffic)


def seconds_of_case(question: Question, case: Case, traffic: list[tuple[Traffic, Number]] | None = None) -> Number:
    """The same of a layout whose case was made already."""
    time = step_time(case, question.calibration, traffic)
    step_s = (math.inf if case.loops_experts else time.comm_s) if time.step_s is None else time.step_s
    return step_s / case.layout.global_batch_size


def least_seconds_of_case(question: Question, case: Case) -> Number:
    """A cheaper bound below `seconds_of_case`, a rounding's width lower; 0 where the device's rates are unknown."""
    step_s = least_step_seconds(case, question.calibration)
    return 0.0 if step_s is None else step_s * (1 - ROUNDING) / case.layout.global_batch_size


ROUNDING = 1e-9
"""Share by which sums of the same parts in another order may differ, and more."""


def floor_seconds(question: Question, layout: Layout) -> float:
    """Seconds a sequence that no batch of the layout goes below: each GPU does its share of the work, nothing else."""
    return whole_pass_seconds(case_of(question, of_same_floor(layout)), question.calibration) / question.cluster.gpus


def of_same_floor(layout: Layout) -> Layout:
    """One layout for all whose `floor_seconds` are the same: schedules and batches are left out of them."""
    return msgspec.structs.replace(
        layout, sequence_parallel=False, virtual_stages=1, pp_schedule="1f1b", micro_batch_size=1, grad_accum=1
    )


def exact_bytes(question: Question, layout: Layout) -> float:
    """Bytes of a device at one layout's peak."""
    case = case_of(question, layout)
    return float(device_bytes(case, peak_bytes(case)))


def floor_bytes(case: Case) -> float:
    """Live bytes outside the model code: no micro-batch needs less, and no walk is needed to know it."""
    return float(max(sum(held.values()) for _, held in held_outside(case)))
