"""What an answer holds: one layout with its figures, and all layouts that a question was answered with.

Not here: how they are found (estimation.py, recommendation.py), or what is said of them (reasons.py, render.py).
"""

from __future__ import annotations

import math

import msgspec

from planner.ask.fits import Bound, Verdict
from planner.ask.question import Question
from planner.basics.display import Displayed
from planner.decide.candidates import Candidate, without_overlap
from planner.decide.star import TIE
from planner.figures.comm import CommVolume
from planner.figures.memory import MemoryBreakdown
from planner.figures.steptime import StepTime, Throughput
from planner.parallelism.case import Case
from planner.spec.lengths import told


class Estimate(Displayed, msgspec.Struct, frozen=True):
    """One layout's answer. `sharding` names the strategy that LoRA runs under, else None.

    `fits`: `fits_probability`, that of the device holding all that it would show, is at least FITS_FROM, or the
    headroom that was asked for is left free, and the hosts hold what is offloaded; `verdict` is the same in a word
    (fits.verdict, under bounds.qualified). Both are None where the device's memory is unknown, and the probability
    where a part of the layout's is not counted. `low_bytes` and `high_bytes` are the memory on the device between which
    90 % of measured runs lie. `probed` says that its time rests on the machine's own speed.
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


def serial_seconds_of(one: Estimate) -> float:
    """Predicted seconds a sequence if nothing overlapped; infinite where no time is known."""
    known = one.time.step_s is not None
    return float(without_overlap(one.time)) / one.case.layout.global_batch_size if known else math.inf


def training(one: Estimate) -> str:
    """How long the run of an estimate is, and how it steps."""
    return told(one.case.job, one.case.layout.global_batch_size)


class Constraints(msgspec.Struct, frozen=True, kw_only=True):
    """What a recommendation must keep to, apart from the question itself.

    `backend` must launch it; with `any_runtime` nothing need. `offload`: where nothing fits, states may wait in host
    memory. A run of `tokens`, or of `samples` sequences, must take `deadline_s` at most. Layouts that take at most the
    share `tie` longer than the best are near it (star.py); 0 recommends the fastest.
    """

    backend: str | None = None
    any_runtime: bool = False
    offload: bool = True
    deadline_s: float | None = None
    tokens: int | None = None
    samples: int | None = None
    tie: float = TIE

    def sequences(self, question: Question) -> int | None:
        """Sequences of the whole run."""
        return self.samples if self.tokens is None else math.ceil(self.tokens / question.job.seq_len)

    def slowest(self, question: Question) -> float | None:
        """Most seconds a sequence may take."""
        sequences = self.sequences(question)
        return None if self.deadline_s is None or sequences is None else self.deadline_s / sequences


FREE = Constraints()


class Answer(Displayed, msgspec.Struct, frozen=True, kw_only=True):
    """The layouts that a question was answered with; `recommended` is the star's place (star.py) among `estimates`.

    `planner estimate` has one of each strategy, in the strategies' order, and the star where it is of none; `planner
    recommend` the star, then the fastest of other things (candidates.thing_of). Where nothing fits, launches and is in
    time, `recommended` is None and the first is the nearest to it.

    `unavailable` has a sentence for each strategy that has no layout. `fastest` is the layout of the least predicted
    time, where that is not the star. Of `considered` layouts, `rejected` counts those that a rule or memory turned
    away, by reason, `evaluated` those walked one by one, and `pruned` those that could not win by their bounds.
    `front` are layouts of the Pareto front of time against memory. `run_s` is what the run would take at the first
    layout, where a deadline is set. `offload_tried`: nothing fits without offload, so layouts with states in host
    memory were looked at too. `unlaunched`: no layout of the space is launched from here, and those shown are the best
    of these. `stray`: those shown fit only with tensor parallel groups over nodes. `interrupted`: a watcher ended the
    search (progress.py), with `unseen` layouts not looked at to the end.
    """

    question: Question
    estimates: tuple[Estimate, ...]
    recommended: int | None
    unavailable: dict[str, str] = {}
    fastest: Estimate | None = None
    constraints: Constraints = FREE
    considered: int = 0
    rejected: dict[str, int] = {}
    evaluated: int = 0
    pruned: int = 0
    front: tuple[Candidate, ...] = ()
    run_s: float | None = None
    offload_tried: bool = False
    unlaunched: bool = False
    stray: bool = False
    interrupted: bool = False
    unseen: int = 0

    @property
    def best(self) -> Estimate | None:
        """The recommended estimate; None where nothing fits, launches and is in time."""
        return None if self.recommended is None else self.estimates[self.recommended]

    @property
    def notes(self) -> tuple[str, ...]:
        """How the question was read, and how long the run is on its data."""
        job, best = self.question.job, self.best
        return (*self.question.notes, *([training(best)] if best is not None and job.recipe.data else []))

    @property
    def slower(self) -> float:
        """Share by which the star takes longer than the fastest, as predicted."""
        return (
            0.0 if self.fastest is None or self.best is None else seconds_of(self.best) / seconds_of(self.fastest) - 1
        )

    @property
    def missed(self) -> bool:
        """Whether even the fastest layout misses the deadline."""
        deadline_s = self.constraints.deadline_s
        return deadline_s is not None and self.run_s is not None and self.run_s > deadline_s
