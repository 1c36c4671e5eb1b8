"""`planner cost` as text: the length of the run, its time, what it takes, and what was not counted.

Not here: any figure (planner.studies.cost).
"""

from __future__ import annotations

import math

from planner.basics.display import Element, Table, as_text
from planner.basics.quantities import format_bytes, format_duration
from planner.studies.cost import Cost
from planner.views import strategy_text
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
    parts += [f"not counted: {line}." for line in found.unknown]
    if question.job.global_batch_size is None:
        parts.append(f"The global batch of {batch} is the layout's own choice; --global-batch-size fixes it.")
    trust = trust_text(question.calibration, [found.best])
    return [*parts, *([trust] if trust else [])]


def _rows(found: Cost) -> list[tuple[str, str]]:
    trust, rates = found.reliability, found.rates
    band = f" ({format_duration(found.low_s)} to {format_duration(found.high_s)})" if found.low_s is not None else ""
    rows = [
        ("tokens", f"{found.tokens:,} in {found.steps:,} steps"),
        ("training alone", f"{format_duration(found.training_s)}{band}"),
    ]
    seconds = rates.checkpoint_s
    told = NOT_KNOWN if seconds is None else format_duration(seconds) if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
    rows.append(("a checkpoint", f"{format_bytes(found.checkpoint_bytes)}, takes {told}"))
    if trust.mtbf_s is not None:
        rows.append(("time between failures", f"{format_duration(trust.mtbf_s)} (mean, whole cluster)"))
        rows.append(("failures expected", _number(trust.expected_failures)))
    if trust.checkpoint_interval_s is not None:
        best = trust.best_checkpoint_interval_s
        given = rates.interval_s is not None
        told = "" if best is None else " (Daly's best)" if not given else f" (Daly's best: {format_duration(best)})"
        rows.append(("checkpoint after", f"{format_duration(trust.checkpoint_interval_s)} of training{told}"))
    if found.goodput is not None:
        rows.append(("goodput", percent_text(found.goodput)))
    rows += [
        ("run, wall clock", format_duration(found.run_s)),
        ("GPU-hours", _number(found.gpu_hours)),
        ("money", NOT_KNOWN if found.money is None else f"{found.money:,.2f} (in the price's currency)"),
        ("energy", _energy(found)),
    ]
    return rows


def _energy(found: Cost) -> str:
    if found.energy_kwh is None:
        return NOT_KNOWN
    rates = found.rates
    limit = ", the board's limit" if rates.gpu_power_w == found.question.cluster.gpu.power_w else ""
    host = "" if rates.host_power_w is None else f", hosts at {rates.host_power_w:g} W a node"
    pue = "" if rates.pue is None else f", PUE {rates.pue:g}"
    return f"{_number(found.energy_kwh)} kWh (GPUs at {rates.gpu_power_w:g} W each{limit}{host}{pue})"


def _number(value: float | None) -> str:
    if value is None or math.isinf(value):
        return NOT_KNOWN
    return f"{value:,.0f}" if value >= 100 else f"{value:,.3g}"
