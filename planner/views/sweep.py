"""`planner sweep` as text: one cluster size a row, and where more GPUs stop paying.

Not here: any figure (planner.studies.sweep).
"""

from __future__ import annotations

from planner.ask.question import warnings
from planner.basics.display import Element, Table, as_text
from planner.studies.sweep import Sweep, SweepPoint
from planner.views import plan_only_text, strategy_text
from planner.views.render import NOT_KNOWN, cells, count_text, network_text, percent_text, seconds_text
from planner.views.verdict import trust_text

PLACED = ("layout", "micro x accum")
DROPPED = ("added", "speed-up", "micro x accum", "batch")
"""What a narrow terminal does without, in this order."""
ABOVE = 1.0005
"""An efficiency from which it is printed as more than 100 %."""


def sweep_text(found: Sweep, width: int | None = None) -> str:
    """`planner sweep` as text."""
    return as_text(sweep_view(found), width)


def sweep_view(found: Sweep) -> list[Element]:
    """What is kept fixed, the table, and the verdict with its criterion."""
    question = found.question
    job = question.job
    head = ("GPUs", "strategy", *PLACED, "batch", "step", "tokens/s", "speed-up", "efficiency", "added")
    parts: list[Element] = [
        f"{question.model.name}, {job.precision}, {job.optimizer.name}, {job.seq_len} tokens, "
        f"on {question.cluster.gpu.name} ({question.cluster.name}{network_text(question).replace(', ', '; ', 1)})",
        *(f"warning: {told}." for told in warnings(question)),
        scaling_sentence(found),
        "",
        Table(head, tuple(_row(point) for point in found.points), left=3, drop=DROPPED),
    ]
    parts += [f"at {point.gpus}: {point.reason.rstrip('.')}." for point in found.points if point.best is None]
    best = [point.best for point in found.points if point.best]
    trust = trust_text(question.calibration, best)
    told = [*above_proportion(found), verdict(found), *plan_only_text(best), *([trust] if trust else [])]
    return [*parts, "", *told]


def scaling_sentence(found: Sweep) -> str:
    """Strong or weak, said plainly."""
    if found.scaling == "strong":
        return f"Strong scaling: every size makes the same global batch of {found.global_batch_size} sequences a step."
    if found.sequences_per_gpu is None:
        return "Weak scaling: no global batch is given, so it would grow with the GPUs."
    return (
        f"Weak scaling: sequences a GPU and step stay {found.sequences_per_gpu:g}, as in the smallest size "
        "with a layout, so the global batch grows with the GPUs; --global-batch-size fixes it."
    )


def above_proportion(found: Sweep) -> list[str]:
    """Why a GPU of a larger cluster brings more than one of the smallest: what the memory it adds allows."""
    measured = [point for point in found.points if point.best is not None and point.efficiency is not None]
    over = next((point for point in measured if (point.efficiency or 0) > ABOVE), None)
    if over is None or over.best is None or measured[0].best is None:
        return []
    first, there = measured[0].best.case.layout, over.best.case.layout
    causes = []
    if there.micro_batch_size > first.micro_batch_size:
        causes.append(f"micro-batches of {there.micro_batch_size} sequences instead of {first.micro_batch_size}")
    if (first.recompute, there.recompute) != ("none", "none") and first.recompute != there.recompute:
        causes.append(f"recompute={there.recompute} instead of {first.recompute}")
    updates = [float(point.best.time.optimizer_s or 0.0) for point in (measured[0], over) if point.best is not None]
    if updates[1] < updates[0]:
        causes.append(f"an optimizer's step of {seconds_text(updates[1])} instead of {seconds_text(updates[0])}")
    if not causes:
        return [f"Above 100 %: the layout at {over.gpus} GPUs is another one than at {measured[0].gpus}."]
    return [f"Above 100 %: at {over.gpus} GPUs each holds a smaller share, which allows {' and '.join(causes)}."]


def verdict(found: Sweep) -> str:
    """Where it stops paying, with the criterion."""
    rule = f"a step up pays while each added GPU brings at least {found.worth:.0%} of what each GPU brought before it"
    if found.pays_until is None:
        return "No size has a known speed."
    if found.stops_at is None:
        return f"More GPUs pay up to {found.pays_until}, the largest size with a known speed ({rule})."
    point = next(point for point in found.points if point.gpus == found.stops_at)
    return (
        f"More GPUs pay up to {found.pays_until}: at {found.stops_at}, each added one brings "
        f"{percent_text(point.marginal)} of what each brought before ({rule})."
    )


def _row(point: SweepPoint) -> tuple[str, ...]:
    if point.best is None:
        return (str(point.gpus), "none", *("",) * 8)
    return (
        str(point.gpus),
        strategy_text(point.best),
        *cells(point.best, PLACED),
        str(point.best.case.layout.global_batch_size),
        seconds_text(point.best.time.step_s),
        count_text(point.tokens_per_s),
        NOT_KNOWN if point.speedup is None else f"{point.speedup:.2f}x",
        percent_text(point.efficiency),
        "" if point.marginal is None else percent_text(point.marginal),
    )
