"""Scaling: the best layout at each cluster size, speed-up and efficiency, and where more GPUs stop paying.

Not here: the ranking at one size (recommendation.py), or the table and curve (views/).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import msgspec

from planner.ask.question import Question, warnings
from planner.basics.arith import Number
from planner.basics.display import Displayed
from planner.basics.errors import PlannerError
from planner.basics.formula import formula
from planner.basics.progress import Cancelled
from planner.decide.answers import Constraints, Estimate
from planner.decide.recommendation import recommend
from planner.figures.passes import coefficients
from planner.figures.steptime import scalar
from planner.spec.calibration import as_used
from planner.spec.options import LARGEST_BATCH
from planner.studies.reply import Reply, Resize, ask, summary

SCHEMA = "sweep/1"
ON_DEVICES = Constraints(offload=False)
DEFAULT_WORTH = 0.5
"""An added GPU that brings less than half of what the others bring is better spent on another run: a convention."""


@formula(unit="ratio", source="definition")
def speed_up(tokens_per_s: Number, smallest_tokens_per_s: Number) -> Number:
    """Throughput over that of the smallest size; with a fixed global batch it is the ratio of step times."""
    return tokens_per_s / smallest_tokens_per_s


@formula(
    unit="fraction", source="definition: speed-up over the ratio of sizes, as Amdahl 1967 and Gustafson 1988 use it"
)
def scaling_efficiency(speedup: Number, gpus: Number, smallest_gpus: Number) -> Number:
    """What a GPU brings compared with a GPU of the smallest size."""
    return speedup / (gpus / smallest_gpus)


@formula(unit="fraction", source="definition: relative gain in throughput over relative gain in GPUs")
def marginal_return(tokens_per_s: Number, gpus: Number, before_tokens_per_s: Number, before_gpus: Number) -> Number:
    """What each GPU added by a step brings, as a share of what a GPU brought before the step."""
    return (tokens_per_s / before_tokens_per_s - 1) / (gpus / before_gpus - 1)


class SweepPoint(msgspec.Struct, frozen=True):
    """One size. `best` None: `reason` says why. Ratios are None where no time is known; `marginal` compares with the
    size before it that has a time."""

    gpus: int
    best: Estimate | None
    reason: str = ""
    speedup: float | None = None
    efficiency: float | None = None
    marginal: float | None = None

    @property
    def tokens_per_s(self) -> float | None:
        """Of the whole cluster."""
        return None if self.best is None else scalar(self.best.throughput.tokens_per_s)


class Sweep(Displayed, msgspec.Struct, frozen=True):
    """`scaling` is "strong" (one global batch for all sizes) or "weak" (it grows with the GPUs, `sequences_per_gpu`
    each). More GPUs pay up to `pays_until`; `stops_at` is the first size whose step brings less than `worth`.
    `interrupted`: a watcher ended the search (progress.py), and the sizes not looked at have no layout."""

    question: Question
    scaling: str
    global_batch_size: int | None
    sequences_per_gpu: float | None
    points: tuple[SweepPoint, ...]
    worth: float
    pays_until: int | None
    stops_at: int | None
    interrupted: bool = False


def sweep(
    resize: Resize, sizes: Sequence[int], worth: float = DEFAULT_WORTH, constraints: Constraints = ON_DEVICES
) -> Sweep:
    """Every size in ascending order. Without a global batch the smallest size that fits chooses its batch freely, and
    every larger one keeps that many sequences a GPU. A size that fits only with states in host memory has none: what
    more GPUs bring would be what they spare of the host link."""
    questions = {gpus: resize(gpus) for gpus in sorted(set(sizes))}
    first = next(iter(questions.values()))
    batch = first.job.global_batch_size
    replies: dict[int, Reply] = {}
    share: Fraction | None = None
    for gpus, question in questions.items():
        try:
            if batch is None and share is not None:
                replies[gpus] = _ask_in_proportion(question, share, constraints)
                continue
            reply = replies[gpus] = ask(question, constraints)
        except Cancelled:
            replies[gpus] = Reply(None, "the search was interrupted before it", interrupted=True)
            continue
        if batch is None and reply.best is not None:
            share = Fraction(reply.best.case.layout.global_batch_size, gpus)
    interrupted = any(reply.interrupted for reply in replies.values())
    if interrupted and all(reply.best is None for reply in replies.values()):
        raise Cancelled
    if all(reply.refused for reply in replies.values()):
        recommend(first, 1, constraints)  # no size can be asked about: the first refusal, in its own words
    points = _points(replies)
    pays_until, stops_at = where_it_stops(points, worth)
    return Sweep(
        question=first,
        scaling="weak" if batch is None else "strong",
        global_batch_size=batch,
        sequences_per_gpu=None if share is None else float(share),
        points=points,
        worth=worth,
        pays_until=pays_until,
        stops_at=stops_at,
        interrupted=interrupted,
    )


def _ask_in_proportion(question: Question, share: Fraction, constraints: Constraints) -> Reply:
    batch = share * question.cluster.gpus
    if batch.denominator > 1:
        return Reply(None, f"{float(share):g} sequences a GPU do not make a whole batch here", refused=True)
    if batch > LARGEST_BATCH:
        error = PlannerError("global_batch_size", int(batch), f"is more than {LARGEST_BATCH} sequences")
        return Reply(None, error.sentence, refused=True)
    job = msgspec.structs.replace(question.job, global_batch_size=int(batch))
    return ask(msgspec.structs.replace(question, job=job), constraints)


def _points(replies: dict[int, Reply]) -> tuple[SweepPoint, ...]:
    points: list[SweepPoint] = []
    smallest: tuple[int, float] | None = None
    before: tuple[int, float] | None = None
    for gpus, reply in replies.items():
        point = SweepPoint(gpus, reply.best, reply.reason)
        if (speed := point.tokens_per_s) is not None:
            smallest = smallest or (gpus, speed)
            ratio = speed_up(speed, smallest[1])
            point = msgspec.structs.replace(
                point,
                speedup=ratio,
                efficiency=scaling_efficiency(ratio, gpus, smallest[0]),
                marginal=None if before is None else marginal_return(speed, gpus, before[1], before[0]),
            )
            before = (gpus, speed)
        points.append(point)
    return tuple(points)


def where_it_stops(points: Sequence[SweepPoint], worth: float) -> tuple[int | None, int | None]:
    """(largest size that pays, first that does not): the first step whose added GPUs bring less than `worth` each."""
    pays_until: int | None = None
    for point in points:
        if point.speedup is None:
            continue
        if point.marginal is not None and point.marginal < worth:
            return pays_until, point.gpus
        pays_until = point.gpus
    return pays_until, None


# -- sweep/1 -------------------------------------------------------------------------------------------------------


def as_json(found: Sweep) -> bytes:
    """One object: what was kept fixed, then one point a size."""
    points: list[dict[str, Any]] = [
        {
            "gpus": point.gpus,
            "nodes": None if point.best is None else point.best.case.cluster.nodes,
            "speed_up": point.speedup,
            "efficiency": point.efficiency,
            "marginal_return": point.marginal,
            "reason": point.reason or None,
            "best": None if point.best is None else summary(point.best),
        }
        for point in found.points
    ]
    question = found.question
    return msgspec.json.encode(
        {
            "schema": SCHEMA,
            "model": question.model,
            "cluster": question.cluster.name,
            "gpu": question.cluster.gpu,
            "job": question.job,
            "warnings": warnings(question),
            "calibration": as_used(
                coefficients(point.best.case, question.calibration) for point in found.points if point.best
            ),
            "scaling": found.scaling,
            "global_batch_size": found.global_batch_size,
            "sequences_per_gpu": found.sequences_per_gpu,
            "worth": found.worth,
            "pays_until": found.pays_until,
            "stops_at": found.stops_at,
            "points": points,
            "interrupted": found.interrupted,
        }
    )
