"""`executor report --save`: what a run measured beside its prediction, as one page to send.

Not here: what is compared (report.py), the tables (report_text.py), or how a page is written (planner/views/page.py).
"""

from __future__ import annotations

from collections.abc import Callable

from executor.measure.lines import FigureLine
from executor.measure.report import MemoryReport, Report
from executor.measure.report_text import error_text, report_view
from planner.basics.quantities import format_bytes, format_seconds, format_volume
from planner.spec.plan import Plan, encode_plan
from planner.views.page import Fact, Section, page_of
from planner.views.scene import Lane, stacked
from planner.views.scene.difference import Difference
from planner.views.scene.memory import kind_of
from planner.views.svg import lanes, map

SIDES = ("predicted", "measured")


def report_page(report: Report, plan: Plan, command: str) -> bytes:
    """The page of a report on the run of a plan."""
    state, *told = report_view(report)
    figures: tuple[tuple[str, str, FigureLine, Callable[[float | None], str]], ...] = (
        ("peak of live memory", "memory.peak", report.memory.peak, format_bytes),
        ("collectives of a step", "traffic.payload", report.traffic.payload, format_volume),
        ("a step", "step_s", report.step_s, format_seconds),
    )
    facts = [
        Fact(f"{name}, {side}", form(value), f"{key}.{side}", value)
        for name, key, line, form in figures
        for side in SIDES
        if (value := getattr(line, side)) is not None
    ]
    errors = [f"{name}: {error_text(line.error_percent)}" for name, _, line, _ in figures]
    phase = report.memory.predicted_phase or report.memory.measured_phase
    both = tuple(lane for side in SIDES if (lane := _lane(report.memory, phase, side)).rectangles)
    memory = lanes.memory_difference_svg(Difference(both, (), None)) if both else None
    sections = [
        Section("Predicted and measured", [f"Error of the prediction: {', '.join(errors)}."], facts),
        Section(f"Live memory in {phase}", pictures=() if memory is None else (memory,)),
        Section("Line by line", told),
        Section("Where the ranks were", pictures=(map.svg_of(plan),), spare=True),
        Section("The plan: save it as plan.json", source=encode_plan(plan).decode(), folded=True, spare=True),
    ]
    return page_of(str(state), (), sections, command)


def _lane(memory: MemoryReport, phase: str | None, side: str) -> Lane:
    """The terms of one phase, as one side has them."""
    found = []
    for line in (*memory.lines, *memory.small):
        where, _, term = line.name.rpartition("/")
        if where == phase:
            found.append((kind_of(term), getattr(line, side) or 0.0, f"memory.lines.{line.name}"))
    return stacked(side, found)
