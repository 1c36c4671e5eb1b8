"""What a reason looks at: the answer's layout, the same prediction for one a step away, and words for both.

Not here: any reason (reasons.py), or any figure's formula.
"""

from __future__ import annotations

import math

import msgspec

from planner.ask.question import Question, limit_bytes
from planner.basics.units import format_bytes, format_seconds
from planner.decide.answers import Estimate
from planner.engines import engine_of
from planner.figures.comm import CommVolume, comm_volume
from planner.figures.memory import MemoryBreakdown, memory_breakdown
from planner.figures.steptime import StepTime, Throughput, scalar, step_time, throughput
from planner.parallelism.case import Case
from planner.parallelism.rules import broken
from planner.spec import Cluster, Layout
from planner.spec.calibration import Calibration


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
