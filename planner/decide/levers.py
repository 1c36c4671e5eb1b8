"""What would make a phase of a layout smaller: the same question with one option a step away, and what it saves.

Every option of a layout or job is tried, a number at half and twice its value, a word at all others; a group of twice
the ranks takes them from another. The options' records say which there are. Not here: which bytes are there
(phases.py), or the best of all layouts (search.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import permutations
from typing import Any

import msgspec
from msgspec.structs import replace

from planner.ask.launchable import launches
from planner.ask.question import Question, limit_bytes, with_adapters
from planner.basics.quantities import format_bytes, format_seconds
from planner.decide.answers import Estimate
from planner.engines import engine_of
from planner.figures.comm import CommVolume, comm_volume
from planner.figures.memory import MemoryBreakdown, memory_breakdown
from planner.figures.steptime import StepTime, Throughput, scalar, step_time, throughput
from planner.parallelism.case import Case
from planner.parallelism.rule import broken
from planner.parallelism.rules import JOB
from planner.spec import Cluster, Layout, TrainingJob
from planner.spec.calibration import Calibration
from planner.spec.options import TABLE, Option, reads


class Seen(msgspec.Struct, frozen=True):
    """What a rule looks at: `one` is the recommended layout, or the one that needs least memory when none fits."""

    question: Question
    one: Estimate
    others: tuple[Estimate, ...]

    @property
    def layout(self) -> Layout:
        """Of the one."""
        return self.one.case.layout

    @property
    def usable_bytes(self) -> float:
        """Device memory that its prediction may be for it to fit; infinite where unknown."""
        return limit_bytes(self.question, self.one.case)


class WhatIf(msgspec.Struct, frozen=True):
    """The prediction of a layout that is not among the answers."""

    case: Case
    memory: MemoryBreakdown
    comm: CommVolume
    time: StepTime
    throughput: Throughput


def what_if(seen: Seen, cluster: Cluster | None = None, /, **changes: object) -> WhatIf | None:
    """The layout with these fields changed, on this or another cluster; None where a rule forbids it."""
    old = seen.one.case
    layout = msgspec.structs.replace(old.layout, **changes)
    runtime = old.runtime if layout.engine == old.layout.engine else seen.question.runtime(layout.engine)
    case = Case(old.model, old.job, layout, cluster or old.cluster, runtime)
    if broken(case, engine_of(layout.engine).rules) is not None:
        return None
    return predicted(case, seen.question.calibration)


def predicted(case: Case, known: Calibration) -> WhatIf:
    """All figures of one layout."""
    time = step_time(case, known)
    return WhatIf(case, memory_breakdown(case), comm_volume(case), time, throughput(case, time))


# -- words ---------------------------------------------------------------------------------------------------------


def of_memory(one: Estimate) -> str:
    """What a layout needs of a device's memory."""
    return f"{format_bytes(one.memory.device_bytes)} on a card of {format_bytes(one.case.cluster.gpu.memory_bytes)}"


def fits(seen: Seen, other: WhatIf) -> bool:
    """On the devices, as is said of the answers, and on the hosts as far as is known."""
    usable = limit_bytes(seen.question, other.case)
    return other.memory.device_bytes <= usable and other.memory.host_fits is not False


def needed(seen: Seen, other: WhatIf) -> str:
    """What a layout would need, and whether it is there."""
    memory, usable = other.memory, limit_bytes(seen.question, other.case)
    told = f"{format_bytes(memory.device_bytes)} on the card would be needed"
    if math.isinf(usable):
        return told
    if memory.device_bytes > usable:
        return f"{told}, more than the {format_bytes(usable)} that may be used"
    return f"{told}, which fits" if fits(seen, other) else f"{told}, and more host memory than there is"


def batch_apart(layout: Layout, other: Layout) -> str:
    """How a layout's micro-batch differs from another's; nothing where it does not."""
    here, there = layout.micro_batch_size, other.micro_batch_size
    return "" if here == there else f", with {here} sequence{'s' if here > 1 else ''} a pass instead of {there}"


def largest_term(memory: MemoryBreakdown) -> tuple[str, float]:
    """The term that most of the peak is, and its bytes."""
    return max(memory.peak.terms.items(), key=lambda pair: pair[1])


def speed_ratio(new: Throughput, old: Throughput) -> float | None:
    """Tokens/s of one over the other's; None where one is unknown."""
    if new.tokens_per_s is None or not old.tokens_per_s:
        return None
    return float(new.tokens_per_s) / float(old.tokens_per_s)


def seconds(value: object) -> str:
    """A duration of one layout."""
    return format_seconds(scalar(value))  # type: ignore[arg-type]  # a number of one layout, or None


# -- What if -----------------------------------------------------------------------------------------------------------

PEAK = "peak"
"""The fullest phase, whichever it is."""

SPLITS = ("dp_replicate", "dp_shard", "tp", "cp", "pp")
"""Groups whose product is the number of ranks."""

LEAST = 0.001
"""Share of a phase that a lever saves at least."""


class Lever(msgspec.Struct, frozen=True):
    """A layout or job that differs in one option, and in those that follow from it, and needs less in a phase.

    `options` are names and values as a command line takes them. `saved_bytes` and `phase_bytes` are of the phase,
    `device_bytes` of the whole step. `speed_ratio` is its tokens/s over those of now, None where one is unknown;
    `same_training` says that job and sequences a step are as before.
    """

    options: dict[str, str]
    saved_bytes: float
    phase_bytes: float
    device_bytes: float
    fits: bool
    speed_ratio: float | None
    same_training: bool
    launchable: bool


def levers(question: Question, case: Case, phase: str) -> Iterator[Lever]:
    """Every legal change of one option that makes a phase smaller, in the order of the options."""
    now = predicted(case, question.calibration)
    before = phase_bytes(now.memory, phase)
    seen = {(case.job, case.layout)}
    for options, job, layout in changes(case):
        if (job, layout) in seen:
            continue
        seen.add((job, layout))
        other = Case(case.model, job, layout, case.cluster, case.runtime)
        if broken(other, (*JOB, *engine_of(layout.engine).rules)) is not None:
            continue
        after = phase_bytes(memory_breakdown(other), phase)
        if before - after < LEAST * before:
            continue
        then = predicted(other, question.calibration)
        yield Lever(
            options=options,
            saved_bytes=before - after,
            phase_bytes=after,
            device_bytes=then.memory.device_bytes,
            fits=then.memory.device_bytes <= limit_bytes(question, other) and then.memory.host_fits is not False,
            speed_ratio=speed_ratio(then.throughput, now.throughput),
            same_training=job == case.job and layout.global_batch_size == case.layout.global_batch_size,
            launchable=launches(other),
        )


def phase_bytes(memory: MemoryBreakdown, phase: str) -> float:
    """Live bytes at the fullest moment of a phase on any stage, or of the step; 0 where there is no such phase."""
    if phase == PEAK:
        return memory.peak.total
    return max((one.total for stage in memory.stages for one in stage.phases if one.phase == phase), default=0.0)


Change = tuple[dict[str, str], TrainingJob, Layout]
"""(options of a command line, job, layout)."""


def changes(case: Case) -> Iterator[Change]:
    """Jobs and layouts that one option is a step away from."""
    for option in TABLE:
        if option.name in SPLITS or not reads(case.layout.engine, option.name):
            continue
        if option.part in ("layout", "job", "optimizer"):
            yield from _of_option(case, option)
    yield from _regrouped(case)


def _of_option(case: Case, option: Option) -> Iterator[Change]:
    field = option.field or option.name
    layout, job = case.layout, case.job
    holder: Any = {"layout": layout, "job": job, "optimizer": job.optimizer}[option.part]
    for value in _steps(option, getattr(holder, field)):
        options = {option.name: _typed(value)}
        if option.name == "micro_batch_size":  # the batch stays
            accum = layout.micro_batch_size * layout.grad_accum // value
            yield options | {"grad_accum": str(accum)}, job, replace(layout, micro_batch_size=value, grad_accum=accum)
        elif option.part == "layout":
            yield options, job, replace(layout, **{field: value})
        elif option.part == "job":
            yield options, _other_job(case, field, value), layout
        else:
            yield options, replace(job, optimizer=replace(job.optimizer, **{field: value})), layout


def _other_job(case: Case, field: str, value: Any) -> TrainingJob:
    """The job with one field changed; adapters and the base's format come with a method."""
    if field == "method" and value != "full":
        return with_adapters(case.model, case.job, value)
    return replace(case.job, **{field: value})


def _steps(option: Option, value: Any) -> tuple[Any, ...]:
    """Values of an option a step from this one."""
    if option.kind in ("switch", "flag"):
        return (not value,)
    if option.kind == "choice":
        return tuple(other for other in option.choices if other != value)
    if option.kind == "whole" and isinstance(value, int):
        near = (value - 1, value + 1) if option.high <= 3 else (value // 2, value * 2)  # a stage, or a size
        return tuple(other for other in near if option.low <= other <= option.high)
    return ()


def _regrouped(case: Case) -> Iterator[Change]:
    """A group of twice the ranks, which another of the groups gives, with the sequences of a step kept."""
    layout = case.layout
    for more, less in permutations(SPLITS, 2):
        if getattr(layout, less) % 2:
            continue
        names = {more: getattr(layout, more) * 2, less: getattr(layout, less) // 2}
        other = replace(layout, **names)
        if layout.tp == 1 and other.tp > 1:  # as the option means it where nothing else is said
            other = replace(other, sequence_parallel=layout.facts.sequence_parallel)
        options = {name: str(value) for name, value in names.items()}
        accum, odd = divmod(layout.global_batch_size, other.data_parallel * other.micro_batch_size)
        if not odd and accum:
            kept = {} if accum == layout.grad_accum else {"grad_accum": str(accum)}
            yield options | kept, case.job, replace(other, grad_accum=accum)


def _typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
