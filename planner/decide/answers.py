"""What an answer holds: one layout with its figures, and all layouts that a question was answered with.

Not here: how they are found (estimation.py, recommendation.py), or what is said of them (reasons.py, render.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import msgspec

from planner.ask.bounds import Bound
from planner.ask.fits import Verdict
from planner.ask.question import Question
from planner.figures.comm import CommVolume
from planner.figures.memory import MemoryBreakdown
from planner.figures.steptime import StepTime, Throughput
from planner.parallelism.case import Case
from planner.spec.course import told
from planner.spec.job import Method


class Estimate(msgspec.Struct, frozen=True):
    """One layout's answer. `sharding` names the strategy that LoRA runs under, else None.

    `fits`: `fits_probability`, that of the device holding all that it would show, is at least FITS_FROM, or the
    headroom that was asked for is left free, and the hosts hold what is offloaded; `verdict` is the same in a word
    (fits.verdict, under bounds.qualified). Both are None where the device's memory is unknown, and the probability
    where a part of the layout's is not counted. `low_bytes` and `high_bytes` are the memory on the device between which
    nine measurements of ten lie. `probed` says that its time rests on the machine's own speed.
    """

    strategy: str
    sharding: str | None
    case: Case
    memory: MemoryBreakdown
    comm: CommVolume
    time: StepTime
    throughput: Throughput
    fits: bool
    reasons: tuple[str, ...]
    backend: str | None
    refusal: str | None
    verdict: Verdict | Bound | None
    low_bytes: float
    high_bytes: float
    considered: int = 1
    probed: bool = False
    fits_probability: float | None = None

    @property
    def name(self) -> str:
        """The strategy, and what adapters run under."""
        return self.strategy if self.sharding is None else f"{self.strategy} ({self.sharding})"

    @property
    def launchable(self) -> bool:
        """Whether a backend that is installed runs it."""
        return self.refusal is None


def seconds_of(one: Estimate) -> float:
    """Predicted seconds a sequence, which rank layouts; infinite where no time is known."""
    return math.inf if one.time.step_s is None else float(one.time.step_s) / one.case.layout.global_batch_size


def able(shown: Iterable[Estimate], method: Method, *, launching: bool = True) -> list[Estimate]:
    """Those of a method that fit and, where it matters, launch."""
    ready = (one for one in shown if one.fits and (one.launchable or not launching))
    return [one for one in ready if one.case.job.method == method]


def training(one: Estimate) -> str:
    """How long the run of an estimate is, and how it steps."""
    return told(one.case.job, one.case.layout.global_batch_size)


class Answer(msgspec.Struct, frozen=True):
    """Estimates in the order of the strategies; `recommended` is the index of the simplest that ties with the
    fastest that fits and launches, or fits where launching is not asked about.

    `unavailable` says of every strategy that is not among them why. `offload_tried`: nothing fits without offload, so
    layouts with states in host memory were looked at too. `interrupted`: a watcher ended the search (progress.py).
    """

    question: Question
    estimates: tuple[Estimate, ...]
    unavailable: dict[str, str]
    recommended: int | None
    offload_tried: bool = False
    interrupted: bool = False

    @property
    def best(self) -> Estimate | None:
        """The recommended estimate; None where nothing fits and launches."""
        return None if self.recommended is None else self.estimates[self.recommended]

    @property
    def notes(self) -> tuple[str, ...]:
        """What to tell of how the question was read, and of the run on its data."""
        job, best = self.question.job, self.best
        return (*self.question.notes, *([training(best)] if best is not None and job.recipe.data else []))

    @property
    def faster(self) -> Estimate | None:
        """The fastest of the recommended one's method, where a simpler one that ties with it is recommended."""
        best = self.best
        if best is None:
            return None
        fastest = min(able(self.estimates, best.case.job.method, launching=self.question.launching), key=seconds_of)
        return fastest if seconds_of(fastest) < seconds_of(best) else None
