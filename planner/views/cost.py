"""`planner cost` as text: the length of the run, its time, what it takes, and what was not counted.

Not here: any figure (planner.studies.cost).
"""

from __future__ import annotations

import math
from collections.abc import Callable

from planner.basics.display import Element, Table, as_text
from planner.basics.quantities import format_bytes, format_duration
from planner.studies.cost import Cost
from planner.views import plan_only_text, strategy_text
from planner.views.render import (
    NOT_KNOWN,
    count_text,
    headline,
    layout_text,
    percent_text,
    seconds_text,
)
from planner.views.verdict import trust_text


def cost_text(found: Cost, width: int | None = None) -> str:
    """`planner cost` as text."""
    return as_text(cost_view(found), width)


def cost_view(found: Cost) -> list[Element]:
    """One figure a row."""
    best, question = found.best, found.question
    batch = best.case.layout.global_batch_size
    parts: list[Element] = [
        headline(question),
        f"{strategy_text(best)}: {layout_text(best.case.layout)}, global batch {batch}, "
        f"step {seconds_text(best.time.step_s)}, {count_text(best.throughput.tokens_per_s)} tokens/s",
        "",
        Table(("what", "figure"), tuple(_rows(found)), left=2),
        "",
    ]
    parts += [*plan_only_text([best]), *(f"not counted: {line}." for line in found.unknown)]
    if question.job.global_batch_size is None:
        parts.append(f"The global batch of {batch} is the layout's own choice; --global-batch-size fixes it.")
    trust = trust_text(question.calibration, [found.best])
    return [*parts, *([trust] if trust else [])]


def _rows(found: Cost) -> list[tuple[str, str]]:
    trust, rates = found.reliability, found.rates
    rows = [
        ("tokens", f"{found.tokens:,} in {found.steps:,} steps"),
        ("training alone", format_duration(found.training_s) + range_text(found.low_s, found.high_s, format_duration)),
    ]
    seconds = rates.checkpoint_s
    told = NOT_KNOWN if seconds is None else format_duration(seconds) if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
    rows.append(("a checkpoint", f"{format_bytes(found.checkpoint_bytes)}, takes {told}"))
    if trust.mtbf_s is not None:
        rows.append(("time between failures", f"{format_duration(trust.mtbf_s)} (mean, whole cluster)"))
        rows.append(("failures expected", number_text(trust.expected_failures)))
    if trust.checkpoint_interval_s is not None:
        best = trust.best_checkpoint_interval_s
        given = rates.interval_s is not None
        told = "" if best is None else " (Daly's best)" if not given else f" (Daly's best: {format_duration(best)})"
        rows.append(("checkpoint after", f"{format_duration(trust.checkpoint_interval_s)} of training{told}"))
    if found.goodput is not None:
        rows.append(("goodput", percent_text(found.goodput)))
    low, high = found.low, found.high
    currency = "" if found.money is None else ", in the price's currency"
    rows += [
        ("run, wall clock", format_duration(found.run_s) + range_text(low.run_s, high.run_s, format_duration)),
        ("GPU-hours", number_text(found.gpu_hours) + range_text(low.gpu_hours, high.gpu_hours, number_text)),
        ("money", money_text(found.money) + range_text(low.money, high.money, money_text) + currency),
        ("energy", _energy(found)),
    ]
    return rows


def range_text(low: float | None, high: float | None, text: Callable[[float | None], str]) -> str:
    """The figures between which 90 % of measured runs lie, behind the one they belong to; nothing if not known."""
    return "" if low is None or high is None else f" ({text(low)} to {text(high)})"


def money_text(value: float | None) -> str:
    """An amount in the price's currency."""
    return NOT_KNOWN if value is None else f"{value:,.2f}"


def _energy(found: Cost) -> str:
    if found.energy_kwh is None:
        return NOT_KNOWN
    rates = found.rates
    limit = ", the board's limit" if rates.gpu_power_w == found.question.cluster.gpu.power_w else ""
    host = "" if rates.host_power_w is None else f", hosts at {rates.host_power_w:g} W a node"
    pue = "" if rates.pue is None else f", PUE {rates.pue:g}"
    band = range_text(found.low.energy_kwh, found.high.energy_kwh, number_text)
    return f"{number_text(found.energy_kwh)} kWh{band}, GPUs at {rates.gpu_power_w:g} W each{limit}{host}{pue}"


def number_text(value: float | None) -> str:
    """A figure of a run to its unit, or to three digits."""
    if value is None or math.isinf(value):
        return NOT_KNOWN
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"
