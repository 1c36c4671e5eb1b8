"""`planner fit` as text: one quantity a row, its layout, and what stops the next value.

Not here: any figure (planner.studies.fit).
"""

from __future__ import annotations

from planner.basics.display import Element, Table, as_text
from planner.studies.fit import FitLimit, FitLimits
from planner.views import plan_only_text, strategy_text
from planner.views.phase import ON_CARD
from planner.views.render import DROPPED, NOT_KNOWN, cells, headline, host_text
from planner.views.verdict import trust_text, verdicts_text

NAMES = {
    "gpus": "fewest GPUs",
    "seq-len": "longest sequence",
    "micro-batch": "largest micro-batch",
    "global-batch": "largest batch in one pass",
}
FIGURES = ("layout", "micro x accum", ON_CARD, "band", "fits", "step", "tokens/s/GPU")


def fit_text(found: FitLimits, width: int | None = None) -> str:
    """`planner fit` as text."""
    return as_text(fit_view(found), width)


def fit_view(found: FitLimits) -> list[Element]:
    """The table, then what stops each."""
    head = ("", "what fits", "strategy", *FIGURES)
    parts: list[Element] = [headline(found.question), "", Table(head, tuple(map(_row, found.found)), 4, DROPPED), ""]
    parts += [f"{NAMES[one.quantity]}: {limit_text(one)}{_offloaded(one)}" for one in found.found]
    parts += [f"{NAMES[quantity]}: not searched, {reason}." for quantity, reason in found.fixed.items()]
    best = [one.best for one in found.found if one.best is not None]
    parts += [*verdicts_text(best), *plan_only_text(best)]
    if trust := trust_text(found.question.calibration, best):
        parts.append(trust)
    gpus = found.question.cluster.gpus
    fewest = next((one.value for one in found.found if one.quantity == "gpus" and one.value is not None), None)
    if fewest is not None and fewest > gpus and any(one.value is None and not one.interrupted for one in found.found):
        parts.append(f"{gpus} GPUs are too few: --gpus {fewest} is the smallest cluster that holds this job.")
    return parts


def _row(one: FitLimit) -> tuple[str, ...]:
    if one.best is None:
        return (NAMES[one.quantity], NOT_KNOWN if one.interrupted else "nothing", *(NOT_KNOWN,) * 8)
    return (NAMES[one.quantity], f"{one.value:,}", strategy_text(one.best), *cells(one.best, FIGURES))


def _offloaded(one: FitLimit) -> str:
    if not one.offloaded or one.best is None:
        return ""
    return f" Nothing fits without offload: states wait in host memory, {host_text(one.best)} of each node."


def limit_text(one: FitLimit) -> str:
    """What stops the next value."""
    value = "" if one.beyond is None else f"at {one.beyond:,}: "
    return f"{value}{one.limit.rstrip('.')}."
