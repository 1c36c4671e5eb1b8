"""A report for people: tables of predicted beside measured, in a terminal or in plain text.

Not here: what is compared (report.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from executor.folder import badloss
from executor.folder.rundir import Checkpointed
from executor.measure.lines import Line
from executor.measure.report import SMALL_SHARE, MemoryReport, Report
from executor.watch import stragglers
from planner.basics.units import format_bytes, format_seconds, format_volume
from planner.spec.record import Attempt, BadStep

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table


def table(title: str, *columns: str) -> Table:
    """An empty table: names on the left, figures on the right."""
    from rich.table import Table  # rich only where something is drawn

    made = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for index, column in enumerate(columns):
        made.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return made


def render(report: Report, console: Console) -> None:
    """Print the report for people."""
    from rich.text import Text  # rich only where something is drawn

    def say(text: str) -> None:
        console.print(Text(text))  # names come from files: never read as markup

    nodes = f"{report.nodes} node{'s' * (report.nodes > 1)}"
    say(f"{report.model} · {report.engine} · {report.world_size} ranks on {nodes} · {report.status}")
    if report.message:
        say(report.message)
    if report.script is not None:
        if report.step_s.measured is None and report.memory.rank is None:
            say(f"of your own script, {report.script}: nothing of it was measured (docs/launching.md says how)")
            return
        say(f"of your own script, {report.script}, beside what the plan predicts of the built-in trainer")

    memory = report.memory
    where = (
        f"rank {memory.rank} on node {memory.node}, {memory.source}" if memory.rank is not None else "nothing measured"
    )
    made = table(f"Memory ({where})", "phase/term", "predicted", "measured", "error")
    for line in memory.lines:
        _row(made, line, format_bytes)
    made.add_section()
    if memory.load.measured is not None:
        _row(made, msgspec.structs.replace(memory.load, name="while loading, at most"), format_bytes)
    _row(made, msgspec.structs.replace(memory.peak, name=peak_name(memory)), format_bytes)
    console.print(made)
    small = [line for line in memory.small if line.predicted or line.measured]
    if small:
        say(f"  {len(small)} terms under {SMALL_SHARE:.0%} of the peak: {_listed(small, format_bytes)}")

    if memory.allocator_peak_bytes:
        shown = "; ".join(f"{name} {format_bytes(peak)}" for name, peak in memory.allocator_peak_bytes.items())
        say(f"  the device's allocator saw: {shown}")

    traffic = report.traffic
    made = table(f"Collectives of one step, payload (rank {'n/a' if traffic.rank is None else traffic.rank})",
                 "operation/group/unit/phase", "predicted", "measured", "error")  # fmt: skip
    for line in traffic.lines:
        _row(made, line, format_volume)
    made.add_section()
    for line, name in ((traffic.payload, "all payload"), (traffic.wire, "on the wire, per rank")):
        _row(made, msgspec.structs.replace(line, name=name), format_volume)
    console.print(made)
    if traffic.wire_headers is not None and traffic.wire.measured:
        headers, share = traffic.wire_headers, traffic.wire_headers / traffic.wire.measured
        say(f"  measured on the wire with the packets' headers, about {format_volume(headers)} ({share:.2%})")
    if traffic.differing_ranks:
        say(f"  ranks {', '.join(map(str, traffic.differing_ranks))} were given other totals")
    if traffic.control:
        calls, sent = (sum(getattr(call, name) for call in traffic.control) for name in ("count", "payload_bytes"))
        say(f"  {calls:g} control messages under 1 KB, {format_volume(sent)} in all")

    made = table("Step", "", "predicted", "measured", "error")
    name = "median step time, unprobed machine" if report.probed is False else "median step time"
    _row(made, msgspec.structs.replace(report.step_s, name=name), format_seconds)
    console.print(made)
    if report.first_loss is not None:
        say(f"loss {report.first_loss:.4f} → {report.last_loss:.4f} over {report.steps} steps")
    if report.validation:
        (begun, begin), (ended, end) = report.validation[0], report.validation[-1]
        over = f"after step {begun}" if begun == ended else f"→ {end:.4f}, after steps {begun} to {ended}"
        say(f"validation loss {begin:.4f} {over}")
    if report.checkpoints:
        say(checkpoints_text(report.checkpoints))
    for text in bad_steps_text(report.bad_steps):
        say(text)
    for number, one in enumerate(report.attempts, 1):
        say(f"start {number}: {attempt_text(one)}")
    if (report.attempts or report.bad_steps) and report.goodput is not None:
        say(goodput_text(report))
    for slow in report.stragglers:
        say(stragglers.sentence(slow))
    for note in report.notes:
        say(f"note: {note}")
    if report.node_tx_bytes:
        sent = ", ".join(f"node {node} {format_volume(count)}" for node, count in enumerate(report.node_tx_bytes))
        say(f"sent between nodes over the whole run: {sent}")


def checkpoints_text(found: tuple[Checkpointed, ...]) -> str:
    """How many checkpoints were written, and how long training stood still for one; why some were not."""
    whole = [one for one in found if not one.error]
    told = "no checkpoint was written"
    if whole:
        times = (statistics.median(one.pause_s for one in whole), max(one.pause_s for one in whole))
        pause, longest, write = map(format_seconds, (*times, statistics.median(one.write_s for one in whole)))
        many = f"{len(whole)} checkpoint{'s' * (len(whole) > 1)} of {format_bytes(whole[-1].bytes)}"
        told = f"{many}: training paused {pause} for one (median; {longest} at most), complete after {write}"
    failed = [one for one in found if one.error]
    if failed:
        steps = ", ".join(str(one.step) for one in failed[:5]) + ", ..." * (len(failed) > 5)
        told += f"; none after step {steps}: {failed[-1].error}"
    return told


def bad_steps_text(found: tuple[BadStep, ...]) -> list[str]:
    """What became of the steps that were not taken, and what each cost: all that were skipped in one line."""
    skipped = [one for one in found if one.action == badloss.SKIPPED]
    lines = [f"step {one.bad_step} {badloss.text(one)}" for one in found if one.action != badloss.SKIPPED]
    if skipped:
        steps = ", ".join(str(one.bad_step) for one in skipped[:8]) + ", ..." * (len(skipped) > 8)
        many, lost = "s" * (len(skipped) > 1), format_seconds(sum(one.seconds for one in skipped))
        lines.append(f"step{many} {steps} skipped ({lost}), the last as {skipped[-1].why}")
    return lines


def goodput_text(report: Report) -> str:
    """Which share of a run's time, over all its starts, its steps took."""
    assert report.goodput is not None and report.run_s is not None and report.training_s is not None
    whole, steps = format_seconds(report.run_s), format_seconds(report.training_s)
    starts = f" in {len(report.attempts) + 1} starts" if report.attempts else ""
    return f"goodput {report.goodput:.1%}: {steps} of {whole}{starts} went into its steps"


def attempt_text(one: Attempt) -> str:
    """How a start of a run ended, from where the next went on, and what that cost."""
    again = one.steps - one.resumed_from
    lost = f"{again} step{'s' * (again != 1)} trained again ({format_seconds(one.repeated_s)})"
    down = "n/a" if one.down_s is None else format_seconds(one.down_s)
    why = f" ({one.message.rstrip('.')})" if one.message else ""
    where = f" on {one.nodes} nodes" if one.nodes > 1 else ""
    ended, went_on = f"{one.status}{where} after step {one.steps}{why}", f"went on after step {one.resumed_from}"
    return f"{ended}; {went_on}: {lost}, {down} until the next step"


def _row(made: Table, line: Line, form: Callable[[float], str]) -> None:
    from rich.text import Text

    shown = ["missing" if value is None else form(value) for value in (line.predicted, line.measured)]
    error = "n/a" if line.error_percent is None else f"{line.error_percent:+.2f} %"
    made.add_row(*(Text(cell) for cell in (line.name, *shown, error)))


def _listed(lines: list[Line], form: Callable[[float], str]) -> str:
    def figure(value: float | None) -> str:
        return "missing" if value is None else form(value)

    return "; ".join(f"{line.name} {figure(line.predicted)} / {figure(line.measured)}" for line in lines)


def peak_name(memory: MemoryReport) -> str:
    """The peak's line in words: in which phase it is predicted, and in which it was found."""
    if (
        memory.predicted_phase == memory.measured_phase
        or memory.measured_phase is None
        or memory.predicted_phase is None
    ):
        return f"PEAK in {memory.predicted_phase or memory.measured_phase or 'n/a'}"
    return f"PEAK predicted in {memory.predicted_phase}, measured in {memory.measured_phase}"
