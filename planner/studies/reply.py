"""One question asked of the recommendation, with whatever came back as a value: the best layout, or why there is none.

What asks many times (fit.py, sweep.py, cost.py) stands on this. Not here: the ranking (recommendation.py, search.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from planner.ask.question import Question
from planner.basics.errors import PlannerError
from planner.basics.quantities import format_duration
from planner.decide.answers import FREE, Answer, Constraints, Estimate
from planner.decide.recommendation import recommend
from planner.figures.steptime import scalar

Resize = Callable[[int | None], Question]
"""The same question on that many GPUs; None: on the cluster's own size."""


class Reply(msgspec.Struct, frozen=True):
    """`best` fits and launches; without one `reason` says why. `refused`: there was no layout to look at, or none that
    is launched from here (`unlaunched`), so memory is not what stands in the way. `interrupted`: the best so far."""

    best: Estimate | None
    reason: str = ""
    refused: bool = False
    unlaunched: bool = False
    interrupted: bool = False


def ask(question: Question, constraints: Constraints = FREE) -> Reply:
    """The recommended layout of a question; a refusal is an answer too. Raises Cancelled where a watcher ended the
    search before a layout was found (progress.py)."""
    try:
        return reply_of(recommend(question, 1, constraints))
    except PlannerError as error:
        return Reply(None, error.sentence, refused=True)


def reply_of(found: Answer) -> Reply:
    """The first layout, or why it is none."""
    shown, place = found.estimates, found.recommended
    if place is not None:
        return Reply(shown[place], interrupted=found.interrupted)
    if shown:
        nearest = shown[0]
        if found.unlaunched:
            return Reply(None, f"cannot be launched: {nearest.refusal}", refused=True, unlaunched=True)
        if found.stray:
            return Reply(None, f"fits only with tensor parallel groups over nodes (tp={nearest.case.layout.tp})")
        launch = [f"cannot be launched: {nearest.refusal}"] if nearest.refusal and nearest.fits else []
        late = [f"the run would take {format_duration(found.run_s)}"] if found.missed else []
        return Reply(None, "; ".join([*nearest.reasons, *launch, *late]))
    counts = sorted(found.rejected.items(), key=lambda pair: -pair[1])
    told = "; ".join(f"{name}: {count} layouts" for name, count in counts[:3])
    return Reply(None, told or "the options given leave no layout", refused=not counts)


def summary(one: Estimate) -> dict[str, Any]:
    """One layout in a line of JSON: names and units as in estimate/1."""
    return {
        "strategy": one.strategy,
        "method": one.case.job.method,
        "layout": msgspec.structs.asdict(one.case.layout),
        "runtime": one.case.runtime.name,
        "version": one.case.runtime.version,
        "global_batch_size": one.case.layout.global_batch_size,
        "verdict": one.verdict,
        "device_bytes": one.memory.device_bytes,
        "device_low_bytes": one.low_bytes,
        "device_high_bytes": one.high_bytes,
        "peak_phase": one.memory.peak.phase,
        "step_s": scalar(one.time.step_s),
        "tokens_per_s": scalar(one.throughput.tokens_per_s),
        "tokens_per_s_per_gpu": scalar(one.throughput.tokens_per_s_per_gpu),
        "mfu": scalar(one.throughput.mfu),
        "launch_refusal": one.refusal,
    }
