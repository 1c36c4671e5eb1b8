"""A report for people: tables of predicted beside measured, in plain text.

Not here: what is compared (report.py).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence

import msgspec

from executor.backends.tools import TOOLS
from executor.folder import badloss
from executor.folder.rundir import Checkpointed
from executor.measure.lines import FigureLine
from executor.measure.report import SMALL_SHARE, MemoryReport, Report, TrafficReport
from executor.watch import stragglers
from planner.basics.display import Element, Table, as_text
from planner.basics.quantities import format_bytes, format_seconds, format_volume
from planner.spec.record import Attempt, BadStep

CALLS = "operation/group/unit/phase"
"""What a line of collectives is named by."""
FormatFigure = Callable[[float], str]
MISSING, UNMEASURED = "missing", "not measured"


def titled(title: str, head: Sequence[str], rows: Iterable[tuple[str, ...]]) -> list[Element]:
    """A table under its title."""
    return [title, Table(tuple(head), tuple(rows))]


def comparison(
    title: str, first: str, seen: str, lines: Iterable[FigureLine], form: FormatFigure, absent: str = MISSING
) -> list[Element]:
    """Lines as a table, predicted beside `seen`; `first` names the column of names, `absent` stands for a figure that
    was not seen."""
    rows = [(line.name, *_figures(line, form, absent), error_text(line.error_percent)) for line in lines]
    return titled(title, (first, "predicted", seen, "error"), rows)


def error_text(percent: float | None) -> str:
    """The error of a prediction in percent, or as a factor from twice as much on."""
    return "n/a" if percent is None else f"{percent:+.2f} %" if percent < 100 else f"x {1 + percent / 100:.3g}"


def named(line: FigureLine, name: str) -> FigureLine:
    """The line under a name for people."""
    return msgspec.structs.replace(line, name=name)


def render(report: Report, width: int | None = None) -> str:
    """The report for people."""
    return as_text(report_view(report), width)


def report_view(report: Report) -> list[Element]:
    """State, then memory, collectives and the step, predicted beside measured, then the whole run."""
    ranks = f"{report.world_size} rank{'s' * (report.world_size > 1)}"
    nodes = f"{report.nodes} node{'s' * (report.nodes > 1)}"
    found: list[Element] = [f"{report.model} · {report.engine} · {ranks} on {nodes} · {report.status}"]
    if report.message:
        found.append(report.message)
    if report.script is not None:
        trained = report.script if report.script in TOOLS else f"your own script, {report.script}"
        if report.step_s.measured is None and report.memory.rank is None:
            how = "not measured (see docs/launching.md)"
            return [*found, f"{trained}: {how}"]
        found.append(f"{trained}, compared with the plan's prediction for the built-in trainer")
    name = "median step time, unprobed machine" if report.probed is False else "median step time"
    found += [*_memory(report.memory), *_traffic(report.traffic)]
    found += comparison("Step", "", "measured", [named(report.step_s, name)], format_seconds, UNMEASURED)
    return [*found, *_run(report)]


def _memory(memory: MemoryReport) -> Iterator[Element]:
    where = (
        f"rank {memory.rank} on node {memory.node}, {memory.source}" if memory.rank is not None else "nothing measured"
    )
    sums = [named(memory.load, "while loading, at most")] if memory.load.measured is not None else []
    sums.append(named(memory.peak, peak_name(memory)))
    absent = MISSING if memory.peak.measured is not None else UNMEASURED
    lines = [*memory.lines, *sums]
    yield from comparison(f"Live memory ({where})", "phase/term", "measured", lines, format_bytes, absent)
    small = [line for line in memory.small if line.predicted or line.measured]
    if small:
        shown = "; ".join(f"{line.name} {' / '.join(_figures(line, format_bytes, absent))}" for line in small)
        yield f"  {len(small)} terms under {SMALL_SHARE:.0%} of the peak: {shown}"
    if memory.allocator_peak_bytes:
        shown = "; ".join(f"{name} {format_bytes(peak)}" for name, peak in memory.allocator_peak_bytes.items())
        yield f"  the device's allocator saw: {shown}"


def _traffic(traffic: TrafficReport) -> Iterator[Element]:
    title = f"Collectives of one step, payload (rank {'n/a' if traffic.rank is None else traffic.rank})"
    sums = [named(traffic.payload, "all payload")]
    if traffic.wire.predicted or traffic.wire.measured is not None:  # nothing crosses a network on one node
        sums.append(named(traffic.wire, "on the wire, per rank"))
    absent = MISSING if traffic.payload.measured is not None else UNMEASURED
    yield from comparison(title, CALLS, "measured", [*traffic.lines, *sums], format_volume, absent)
    if traffic.wire_headers is not None and traffic.wire.measured:
        headers, share = traffic.wire_headers, traffic.wire_headers / traffic.wire.measured
        yield f"  measured on the wire with the packets' headers, about {format_volume(headers)} ({share:.2%})"
    if traffic.differing_ranks:
        yield f"  ranks {', '.join(map(str, traffic.differing_ranks))} report other totals"
    if traffic.control:
        calls, sent = (sum(getattr(call, name) for call in traffic.control) for name in ("count", "payload_bytes"))
        yield f"  {calls:g} control messages under 1 KB, {format_volume(sent)} in all"


def _run(report: Report) -> Iterator[str]:
    """Lines about the whole run, below those of a step."""
    if report.first_loss is not None:
        yield f"loss {report.first_loss:.4f} → {report.last_loss:.4f} over {report.steps} steps"
    if report.validation:
        (begun, begin), (ended, end) = report.validation[0], report.validation[-1]
        over = f"after step {begun}" if begun == ended else f"→ {end:.4f}, after steps {begun} to {ended}"
        yield f"validation loss {begin:.4f} {over}"
    if report.checkpoints:
        yield checkpoints_text(report.checkpoints)
    yield from bad_steps_text(report.bad_steps)
    for number, one in enumerate(report.attempts, 1):
        yield f"start {number}: {attempt_text(one)}"
    if (report.attempts or report.bad_steps) and report.goodput is not None:
        yield goodput_text(report)
    yield from map(stragglers.sentence, report.stragglers)
    for note in report.notes:
        yield f"note: {note}"
    if report.launcher == "local/namespaces" and not report.node_tx_bytes:
        yield "sent between nodes over the whole run: not measured"
    if report.node_tx_bytes:
        sent = ", ".join(f"node {node} {format_volume(count)}" for node, count in enumerate(report.node_tx_bytes))
        yield f"sent between nodes over the whole run: {sent}"


def checkpoints_text(found: tuple[Checkpointed, ...]) -> str:
    """Number of checkpoints, the pause of training for one, and why some were not written."""
    whole = [one for one in found if not one.error]
    text = "no checkpoint was written"
    if whole:
        times = (statistics.median(one.pause_s for one in whole), max(one.pause_s for one in whole))
        pause, longest, write = map(format_seconds, (*times, statistics.median(one.write_s for one in whole)))
        many = f"{len(whole)} checkpoint{'s' * (len(whole) > 1)} of {format_bytes(whole[-1].bytes)}"
        text = f"{many}: training paused {pause} for one (median; {longest} at most), complete after {write}"
    failed = [one for one in found if one.error]
    if failed:
        steps = ", ".join(str(one.step) for one in failed[:5]) + ", ..." * (len(failed) > 5)
        text += f"; none after step {steps}: {failed[-1].error}"
    return text


def bad_steps_text(found: tuple[BadStep, ...]) -> list[str]:
    """Outcome and cost of the steps that were not applied; skipped ones share one line."""
    skipped = [one for one in found if one.action == badloss.SKIPPED]
    lines = [f"step {one.bad_step} {badloss.text(one)}" for one in found if one.action != badloss.SKIPPED]
    if skipped:
        steps = ", ".join(str(one.bad_step) for one in skipped[:8]) + ", ..." * (len(skipped) > 8)
        many, lost = "s" * (len(skipped) > 1), format_seconds(sum(one.seconds for one in skipped))
        lines.append(f"step{many} {steps} skipped ({lost}), the last: {skipped[-1].why}")
    return lines


def goodput_text(report: Report) -> str:
    """The share of a run's time, over all its starts, that its steps took."""
    assert report.goodput is not None and report.run_s is not None and report.training_s is not None
    whole, steps = format_seconds(report.run_s), format_seconds(report.training_s)
    starts = f" in {len(report.attempts) + 1} starts" if report.attempts else ""
    return f"goodput {report.goodput:.1%}: {steps} of {whole}{starts} went into its steps"


def attempt_text(one: Attempt) -> str:
    """End of a start of a run, the step from which the next one resumed, and the cost."""
    again = one.steps - one.resumed_from
    lost = f"{again} step{'s' * (again != 1)} trained again ({format_seconds(one.repeated_s)})"
    down = "n/a" if one.down_s is None else format_seconds(one.down_s)
    why = f" ({one.message.rstrip('.')})" if one.message else ""
    where = f" on {one.nodes} nodes" if one.nodes > 1 else ""
    ended, went_on = f"{one.status}{where} after step {one.steps}{why}", f"resumed after step {one.resumed_from}"
    return f"{ended}; {went_on}: {lost}, {down} until the next step"


def _figures(line: FigureLine, form: FormatFigure, absent: str = MISSING) -> tuple[str, str]:
    """(predicted, measured) for people."""
    predicted = MISSING if line.predicted is None else form(line.predicted)
    return predicted, absent if line.measured is None else form(line.measured)


def peak_name(memory: MemoryReport) -> str:
    """The peak's line in words: in which phase it is predicted, and in which it was found."""
    predicted, measured = memory.predicted_phase, memory.measured_phase
    if predicted and measured and predicted != measured:
        return f"PEAK predicted in {predicted}, measured in {measured}"
    return f"PEAK in {predicted or measured or 'n/a'}"
