"""What there is to draw of a step: a thought one, and beside it what ranks of a run recorded, on one axis of seconds.

Not here: characters, shapes or events (cells/time.py, svg/time.py, trace.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import msgspec

from planner.basics.errors import PlannerError
from planner.basics.quantities import format_seconds
from planner.figures.timeline import Timeline
from planner.parallelism.case import Case
from planner.spec.spans import COMPUTE, STREAMS, Profile, Span
from planner.views.render import layout_text, seconds_text

SCHEMA = "timeline/1"
MOST_STAGES = 8
"""Drawn where none are named; of more, as many of the first and of the last."""

TOLD_SHARE = 1e-3
"""Of the step, from which spans without room on a stage are listed."""

MOST_FOLDS = 8
LEAST_CYCLES = 4
"""That a fold leaves out."""
KEPT_CYCLES = 2
"""Of a steady state that is folded."""
MOST_LATER = 64
"""Micro-batches of a period at most."""
ALIKE = 1e-6
"""Of a period, within which two passes are as far apart as two others."""

UPDATES = ("clip", "update")
"""Kinds of spans of the optimizer's step."""
PREDICTED, RECORDED = "predicted", "recorded"


def key_of(span: Span) -> str:
    """Of the part of the step, in `planner explain --json`, that a predicted span belongs to; hidden ones are in the
    raw communication."""
    if span.kind in UPDATES:
        return "estimate.time.optimizer_s"
    if span.stream == COMPUTE:
        return "estimate.time.compute_s"
    return f"estimate.time.{'exposed_comm_s' if span.exposed else 'comm_s'}"


class StreamSpans(msgspec.Struct, frozen=True):
    """One stream of one track. Spans of all its lanes are together, by begin."""

    stream: str
    spans: tuple[Span, ...]


class Track(msgspec.Struct, frozen=True):
    """What one pipeline stage is thought to do, or what one rank of it recorded: `part` says which. `end_s` is when its
    step ends; `unplaced_s` and `left_out_s` are seconds that are in no span (figures/timeline.py, spec/spans.py)."""

    part: str
    name: str
    stage: int
    number: int
    end_s: float
    spans: tuple[Span, ...]
    unplaced_s: float = 0.0
    left_out: int = 0
    left_out_s: float = 0.0

    @property
    def rows(self) -> tuple[StreamSpans, ...]:
        """Its streams that have spans, and compute, in their order."""
        found = []
        for stream in STREAMS:
            spans = sorted((span for span in self.spans if span.stream == stream), key=lambda span: span.start_s)
            if spans or stream == COMPUTE:
                found.append(StreamSpans(stream, tuple(spans)))
        return tuple(found)

    @property
    def busy_share(self) -> float:
        """Of the step, in which it computes."""
        return sum(span.seconds for span in self.spans if span.stream == COMPUTE) / self.end_s if self.end_s else 0.0


class Axis(msgspec.Struct, frozen=True):
    """A step as it is drawn: `told` are sentences above it, `notes` below it."""

    told: tuple[str, ...]
    end_s: float
    tracks: tuple[Track, ...]
    notes: tuple[str, ...] = ()

    @property
    def stages(self) -> tuple[int, ...]:
        """The stages there are."""
        return tuple(sorted({track.stage for track in self.tracks}))


def axis_of(case: Case, found: Timeline, profiles: Sequence[Profile] = ()) -> Axis:
    """A thought step with what was recorded beside it."""
    tracks = [
        Track(PREDICTED, f"stage {one.stage}", one.stage, one.stage, found.step_s, one.spans, one.unplaced_s)
        for one in found.stages
    ]
    tracks += [
        Track(
            RECORDED, f"rank {one.rank}", one.stage, one.rank, one.step_s, one.spans, 0.0, one.left_out, one.left_out_s
        )
        for one in profiles
    ]
    tracks.sort(key=lambda track: (track.stage, track.part != PREDICTED, track.number))
    end_s = max(track.end_s for track in tracks)
    return Axis(_told(case, found, profiles), end_s, tuple(tracks), _notes(tracks, bool(profiles)))


class Fold(msgspec.Struct, frozen=True):
    """`cycles` of a steady state that are left out at `at_s`, each `period_s` long."""

    at_s: float
    cycles: int
    period_s: float


class FoldedAxis(msgspec.Struct, frozen=True):
    """An axis without most of its steady states."""

    axis: Axis
    folds: tuple[Fold, ...]


def folded(axis: Axis) -> FoldedAxis:
    """The axis with each steady state of a pipeline's passes cut down to two cycles. A recorded step stays whole: its
    passes never repeat exactly."""
    folds: tuple[Fold, ...] = ()
    while len(folds) < MOST_FOLDS and all(track.part == PREDICTED for track in axis.tracks):
        fold = _fold_of(axis)
        if fold is None:
            break
        left_s = fold.cycles * fold.period_s
        moved = (msgspec.structs.replace(one, at_s=one.at_s - left_s) if one.at_s > fold.at_s else one for one in folds)
        folds = tuple(sorted((*moved, fold), key=lambda one: one.at_s))
        axis = _without(axis, fold.at_s, left_s)
    return FoldedAxis(axis, folds)


def _fold_of(axis: Axis) -> Fold | None:
    """The longest stretch in which every track repeats, without its first and last cycle; None where there is none."""
    passes = [tuple(span for span in track.spans if span.stream == COMPUTE) for track in axis.tracks]
    best: Fold | None = None
    for period_s, later in {pair for some in passes for pair in _periods(some)}:
        apart = [at for some in passes for at in _breaks(some, period_s, later)]
        begin_s, end_s = _longest_between(sorted({0.0, axis.end_s, *apart}))
        cycles = int((end_s - begin_s) / period_s + ALIKE) - KEPT_CYCLES
        if cycles >= LEAST_CYCLES and (best is None or cycles * period_s > best.cycles * best.period_s):
            best = Fold(begin_s + period_s, cycles, period_s)
    return best


def _without(axis: Axis, at_s: float, left_s: float) -> Axis:
    tracks = tuple(
        msgspec.structs.replace(
            track, end_s=track.end_s - left_s, spans=tuple(_cut(track.spans, at_s, at_s + left_s, left_s))
        )
        for track in axis.tracks
    )
    return msgspec.structs.replace(axis, end_s=axis.end_s - left_s, tracks=tracks)


def _name(span: Span, later: int = 0) -> tuple[str, int | None, int]:
    return span.kind, span.chunk, (span.micro_batch or 0) + later


def _periods(passes: Sequence[Span]) -> Iterator[tuple[float, int]]:
    """(seconds, micro-batches) that a cycle may have: for each kind of pass, from the one in the middle to the first
    later one that is as far from it as their neighbours are from each other."""
    kinds: dict[tuple[str, int | None], list[Span]] = {}
    for span in passes:
        kinds.setdefault((span.kind, span.chunk), []).append(span)
    for same in kinds.values():
        middle = len(same) // 2
        for later in range(1, min(len(same) - middle - 1, MOST_LATER)):
            period_s = same[middle + later].start_s - same[middle].start_s
            next_s = same[middle + later + 1].start_s - same[middle + 1].start_s
            if period_s > 0 and abs(next_s - period_s) <= ALIKE * period_s:
                yield period_s, later
                break


def _breaks(passes: Sequence[Span], period_s: float, later: int) -> list[float]:
    """Where passes begin that do not come again a period later with a later micro-batch."""
    there = {_name(span): span for span in passes}
    found = []
    for span in passes:
        again = there.get(_name(span, later))
        if again is None or abs(again.start_s - span.start_s - period_s) > ALIKE * period_s:
            found.append(span.start_s)
    return found


def _longest_between(edges: Sequence[float]) -> tuple[float, float]:
    return max(pairwise(edges), key=lambda pair: pair[1] - pair[0])


def _cut(spans: Sequence[Span], from_s: float, to_s: float, left_s: float) -> Iterator[Span]:
    """The spans without those that begin in a stretch; what comes after it comes so much earlier."""
    for span in spans:
        if not from_s <= span.start_s < to_s:
            begin_s, end_s = (at - left_s if at >= to_s else at for at in (span.start_s, span.end_s))
            yield msgspec.structs.replace(span, start_s=begin_s, end_s=end_s)


def _told(case: Case, found: Timeline, profiles: Sequence[Profile]) -> tuple[str, ...]:
    time, layout = found.time, case.layout
    micro = "1 micro-batch" if found.micro_batches == 1 else f"{found.micro_batches} micro-batches"
    parts = [
        f"compute {seconds_text(time.compute_s)}",
        f"communication waited for {seconds_text(time.exposed_comm_s)}",
        f"optimizer {seconds_text(time.optimizer_s)}",
    ]
    if case.pipelined:
        parts.insert(2, f"bubble {seconds_text(time.bubble_s)}")
    lines = [
        f"{case.model.name} on {layout.world_size} x {case.cluster.gpu.name}, {case.runtime.name} "
        f"({case.runtime.described}): {layout_text(layout)}",
        f"A step of {micro} is predicted to take {format_seconds(found.step_s)}"
        f"{' on the first stage' if case.pipelined else ''}: {', '.join(parts)}.",
    ]
    if profiles:
        steps = sorted({one.step for one in profiles})
        longest = max(one.step_s for one in profiles)
        ratio = longest / found.step_s
        lines.append(
            f"Step {' and '.join(map(str, steps))} of the run took {format_seconds(longest)} while it was recorded: "
            f"{ratio:.2f} x the prediction."
        )
    return tuple(lines)


def _notes(tracks: Sequence[Track], recorded: bool) -> tuple[str, ...]:
    notes = []
    worst = max(tracks, key=lambda track: track.unplaced_s)
    if worst.unplaced_s > TOLD_SHARE * worst.end_s:
        notes.append(
            "The step time counts what the first stage alone waits for and updates beside the passes: "
            f"{worst.name} has {format_seconds(worst.unplaced_s)} more than there is room for, which are not drawn."
        )
    if any(track.part == PREDICTED and row.stream != COMPUTE for track in tracks for row in track.rows):
        notes.append(
            "Collectives and copies are sums: the prediction knows how long they take and how much is waited for, not "
            "when in a pass each runs."
        )
    if recorded:
        notes.append("A recorded step is longer than others for its being recorded; gaps in its passes are waits.")
    left = [track for track in tracks if track.left_out]
    if left:
        count, seconds = sum(track.left_out for track in left), sum(track.left_out_s for track in left)
        notes.append(f"{count} recorded spans, the shortest, are in no file: {format_seconds(seconds)} in all.")
    return tuple(notes)


def chosen(axis: Axis, asked: tuple[int, ...] | None) -> tuple[Axis, tuple[int, ...]]:
    """The axis with these stages alone, or with a few of many, of each the first rank that recorded; and the stages
    that are left out (PlannerError for one that does not exist)."""
    there = axis.stages
    if asked is not None and (wrong := [stage for stage in asked if stage not in there]):
        there_are = f"they are 0 to {there[-1]}" if there[-1] else "without a pipeline there is 0 alone"
        raise PlannerError("stages", wrong[0], f"is not a stage: {there_are}", f"Try {min(wrong[0], there[-1])}")
    kept = asked
    if kept is None:
        half = MOST_STAGES // 2
        kept = there if len(there) <= MOST_STAGES else (*there[:half], *there[-half:])
    tracks, seen = [], set()
    for track in axis.tracks:
        if track.stage in kept and (track.part, track.stage) not in seen:
            seen.add((track.part, track.stage))
            tracks.append(track)
    return msgspec.structs.replace(axis, tracks=tuple(tracks)), tuple(stage for stage in there if stage not in kept)


def as_json_object(case: Case, found: Timeline, profiles: Sequence[Profile] = ()) -> dict[str, Any]:
    """The spans of every stage, and what was recorded, in seconds."""
    return {
        "schema": SCHEMA,
        "time": found.time,
        "layout": case.layout,
        "schedule": found.schedule,
        "micro_batches": found.micro_batches,
        "stages": found.stages,
        "recorded": list(profiles),
    }
