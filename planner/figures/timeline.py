"""One step on an axis: what each pipeline stage is thought to do when, in streams whose spans never overlap.

Every second is the step time's (steptime.py, pipelinetime.py) and from the passes of its schedule (makespan.py), so
the first stage's last span ends when the step does. The step time knows sums: where in a pass a collective runs is not
known, and its span says of how many calls it is the sum. Not here: any formula, or drawing (views/scene/time.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from planner.engines.common import parallel_calls
from planner.figures.comm import collective_seconds, traffic
from planner.figures.hiding import OverlapWindow, Piece, pieces_of, place_hidden
from planner.figures.host import steps_on_host, update_seconds
from planner.figures.passes import (
    WITHIN,
    DeviceSpeed,
    Passes,
    coefficients,
    device_of,
    loads_of,
    on_stage,
    passes_of,
    waiting_of,
)
from planner.figures.pipelinetime import StepParts, Waits
from planner.figures.steptime import StepTime, optimizer_seconds, scalar, step_parts, step_traffic, waits_of
from planner.figures.work import Load
from planner.parallelism.case import Case, StageClass
from planner.parallelism.makespan import Pass, played
from planner.parallelism.pipeline import rank_of
from planner.spec.calibration import Calibration, Coefficients
from planner.spec.spans import COLLECTIVES, COMPUTE, COPIES, HOST, INSIDE, SENDS, Span, ordered

KINDS = {"F": "forward", "B": "backward", "I": "input_grads", "W": "weight_grads"}
"""What a schedule's pass is called."""
AFTER_UPDATE = ("all_gather", "broadcast")
"""Operations of the optimizer's phase that send what the step has made; others come before it."""
SHORTEST_S = 1e-12
"""Below this a span is what adding up leaves."""


class StageSpans(msgspec.Struct, frozen=True):
    """What the ranks of one pipeline stage do. `unplaced_s` are seconds for which the step time leaves this stage no
    room: it counts collectives and the optimizer's step of the first stage alone."""

    stage: int
    spans: tuple[Span, ...]
    unplaced_s: float = 0.0

    def of(self, stream: str) -> tuple[Span, ...]:
        """The spans of one stream."""
        return tuple(span for span in self.spans if span.stream == stream)

    @property
    def busy_s(self) -> float:
        """Seconds in which it computes."""
        return sum(span.seconds for span in self.spans if span.stream == COMPUTE)


class Timeline(msgspec.Struct, frozen=True):
    """A whole step; `schedule` is None without a pipeline."""

    time: StepTime
    schedule: str | None
    micro_batches: int
    stages: tuple[StageSpans, ...]

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        assert self.time.step_s is not None
        return float(self.time.step_s)


def timeline(case: Case, calibration: Calibration) -> Timeline | None:
    """One layout's step, all its stages; None where the device's rates, and so its seconds, are unknown."""
    time, parts = step_parts(case, calibration)
    if parts is None:
        return None
    known, layout = coefficients(case, calibration), case.layout
    detail = _Detail.of(case, parts, known)
    accum = int(layout.grad_accum)
    if parts.chunks is None:
        only = _only_stage(detail, parts, accum)
        return Timeline(time, None, accum, (only,))
    seconds = parts.chunks
    passes = played(
        layout.pp_schedule, seconds.forward_s, seconds.backward_s, accum, layout.virtual_stages, seconds.send_s
    )
    lead_s, behind_s = (_exposed(pieces_of(parts.waits, accum), phase) for phase in ("forward", "backward"))
    pipeline_s, step_s = float(parts.pipeline_s), float(scalar(time.step_s) or 0.0)
    ends = _Ends(lead_s, pipeline_s, lead_s + pipeline_s + behind_s, step_s)
    by_rank: list[list[Pass]] = [[] for _ in range(layout.pp)]
    for one in passes:
        by_rank[one.rank].append(one)
    made_of = [detail.seconds(chunk) for chunk in case.chunks()]
    stages = case.every_stage()
    spans = (
        _stage(detail, parts, stage, made_of, own, ends, known) for stage, own in zip(stages, by_rank, strict=True)
    )
    return Timeline(time, layout.pp_schedule, accum, tuple(spans))


# -- passes --------------------------------------------------------------------------------------------------------


class _Detail(msgspec.Struct, frozen=True):
    """What passes are made of, unit by unit: all their seconds, those that compute, those of them that compute again,
    and all that their groups send meanwhile."""

    case: Case
    device: DeviceSpeed
    units: dict[str, Passes]
    busy: dict[str, Passes]
    again: dict[str, Passes]
    sent: dict[str, Passes]
    axes: str

    @classmethod
    def of(cls, case: Case, parts: StepParts, known: Coefficients) -> _Detail:
        device = device_of(case, parts.work, known)
        assert device is not None
        again = {}
        for unit, one in parts.work.items():
            without = passes_of(loads_of(msgspec.structs.replace(one, again=Load()), device), device)
            again[unit] = Passes(0.0, parts.busy[unit].backward_s - without.backward_s)
        calls = traffic(case.unsplit, [call for call in parallel_calls(case.unsplit) if call.axis in WITHIN])
        axes = ", ".join(axis for axis in WITHIN if any(one.axis == axis and one.ranks > 1 for one in calls))
        return cls(case, device, parts.units, parts.busy, again, waiting_of(case, known), axes)

    def seconds(self, stage: StageClass) -> tuple[Passes, ...]:
        """Of one micro-batch on one chunk of layers: all, computing, computing again, and sending meanwhile."""
        here = self.case.at(stage)
        return tuple(on_stage(here, units) for units in (self.units, self.busy, self.again, self.sent))

    def spans(self, seconds: tuple[Passes, ...], one: Pass, shift_s: float) -> Iterable[Span]:
        """A pass: what it computes again, what it computes, and what it waits for."""
        whole, busy, again, sent = (float(passes[one.kind != "F"]) for passes in seconds)
        part = (one.end_s - one.start_s) / whole if whole else 0.0
        computed = busy * part
        # Recomputation comes before input gradients; where those are shorter, the rest is among the weight gradients.
        first = busy * (1 - part) if one.kind == "W" else 0.0
        repeated = min(max(again - first, 0.0), computed)
        begin, end = one.start_s + shift_s, one.end_s + shift_s
        middle, done = begin + repeated, begin + computed
        number, chunk, named = one.micro_batch, one.chunk, KINDS[one.kind].replace("_", " ")
        yield Span(COMPUTE, "recompute", f"recompute {number}", begin, middle, number, chunk)
        yield Span(COMPUTE, KINDS[one.kind], f"{named} {number}", middle, done, number, chunk)
        hidden = max(sent * part - (end - done), 0.0)
        yield Span(INSIDE, "collective", self.axes, done - hidden, done, number, chunk)
        yield Span(INSIDE, "collective", self.axes, done, end, number, chunk, exposed=True)


def _only_stage(detail: _Detail, parts: StepParts, accum: int) -> StageSpans:
    """Without a pipeline: micro-batches one after the other, each with its part of what is waited for."""
    pieces, made_of = pieces_of(parts.waits, accum), detail.seconds(parts.first.here)
    own = made_of[0]
    found: list[Span] = []
    passes: list[Pass] = []
    now = 0.0
    for number in range(accum):
        now = _wait(found, pieces, "forward", now, number)
        for kind, seconds in (("F", float(own.forward_s)), ("B", float(own.backward_s))):
            passes.append(Pass(0, kind, number, 0, 0, 0.0, now, now + seconds))
            found += detail.spans(made_of, passes[-1], 0.0)
            now += seconds
        now = _wait(found, pieces, "backward", now, number)
    _update(found, detail, parts.first, pieces, now)
    hidden, unplaced_s = _beside(passes, pieces, 0.0)
    return _finished(0, found + hidden, unplaced_s)


class _Ends(msgspec.Struct, frozen=True):
    """How long the first stage waits before its first forward, when all passes are done since that, and when its
    optimizer's phase begins and the step ends."""

    lead_s: float
    pipeline_s: float
    update_s: float
    step_s: float


def _stage(
    detail: _Detail,
    parts: StepParts,
    stage: StageClass,
    made_of: Sequence[tuple[Passes, ...]],
    passes: Sequence[Pass],
    ends: _Ends,
    known: Coefficients,
) -> StageSpans:
    """One stage of a pipeline. The step time adds up what the first one waits for before, and after, all passes; the
    others wait while the first one does not need them."""
    case = detail.case.at(stage)
    first = stage.place == parts.first.here.place
    accum = int(case.layout.grad_accum)
    pieces = pieces_of(parts.waits if first else _own_waits(case, parts, known), accum)
    found = [span for one in passes for span in detail.spans(made_of[one.stage], one, ends.lead_s)]
    found += _sends(case, parts, passes, ends.lead_s)
    lead: list[Span] = []
    begun = passes[0].start_s + ends.lead_s
    begin = begun - _exposed(pieces, "forward")
    _wait(lead, pieces, "forward", max(begin, 0.0))
    closing: list[Span] = []
    done = ends.lead_s + (ends.pipeline_s if first else passes[-1].end_s)
    done = _wait(closing, pieces, "backward", done)
    updating: list[Span] = []
    updating_s = _update(updating, detail, case, pieces, 0.0)
    at = done if first else max(done, min(ends.update_s, ends.step_s - updating_s))
    closing += [msgspec.structs.replace(one, start_s=one.start_s + at, end_s=one.end_s + at) for one in updating]
    hidden, unplaced_s = _beside(passes, pieces, ends.lead_s)
    if first:
        return _finished(int(stage.place), [*lead, *found, *hidden, *closing], unplaced_s)
    unplaced_s += max(at + updating_s - ends.step_s, 0.0) + max(-begin, 0.0)
    kept = [*_until(lead, begun), *found, *hidden, *_until(closing, ends.step_s)]
    return _finished(int(stage.place), kept, unplaced_s)


def _until(spans: Iterable[Span], end_s: float) -> list[Span]:
    """Spans as far as they come before a moment."""
    return [msgspec.structs.replace(one, end_s=min(one.end_s, end_s)) for one in spans if one.start_s < end_s]


def _own_waits(case: Case, parts: StepParts, known: Coefficients) -> Waits:
    """What a stage behind the first waits for, by the same functions that count the first one's."""
    calls = step_traffic(case)
    seconds = [collective_seconds(call, case.cluster.levels, known) for call, _ in calls]
    found = waits_of(case, on_stage(case, parts.units), calls, seconds, known)
    assert found is not None, "the host's link was known for the first stage"
    return found


def _sends(case: Case, parts: StepParts, passes: Iterable[Pass], shift_s: float) -> list[Span]:
    """What leaves for another rank: activations after a forward, gradients after what makes them. Sends that are under
    way at once take a lane each: the step time lets each go at its own pace."""
    assert parts.chunks is not None
    layout, send_s = case.layout, parts.chunks.send_s
    places = layout.pp * layout.virtual_stages
    free: list[float] = []
    found = []
    for one in passes:
        target = one.stage + 1 if one.kind == "F" else one.stage - 1
        outside = not 0 <= target < places
        if one.kind == "W" or outside or rank_of(layout.pp_schedule, layout.pp, target) == one.rank or not send_s:
            continue
        begin = one.end_s + shift_s
        lane = next((place for place, end in enumerate(free) if end <= begin), len(free))
        free[lane : lane + 1] = [begin + send_s]
        what = "activations" if one.kind == "F" else "gradients"
        to = rank_of(layout.pp_schedule, layout.pp, target)
        named = f"{what} {one.micro_batch} to stage {to}"
        found.append(Span(SENDS, "send", named, begin, begin + send_s, one.micro_batch, one.chunk, lane, calls=1))
    return found


# -- what is waited for, and what is not ---------------------------------------------------------------------------


def _exposed(pieces: Iterable[Piece], phase: str) -> float:
    """Seconds that a whole phase waits."""
    return sum(piece.exposed_s for piece in pieces if piece.phase == phase)


def _wait(found: list[Span], pieces: Iterable[Piece], phase: str, now: float, number: int | None = None) -> float:
    """Add what a phase waits for from `now` on, for one micro-batch or for all; when it is over."""
    for piece in pieces:
        if piece.phase != phase or (number is not None and number not in piece.on):
            continue
        parts = 1 if number is None else len(piece.on)
        end = now + piece.exposed_s / parts
        found.append(_span(piece, now, end, number, exposed=True))
        now = end
    return now


def _span(piece: Piece, start_s: float, end_s: float, number: int | None, *, exposed: bool) -> Span:
    calls = None if piece.calls is None else piece.calls / (1 if number is None else len(piece.on))
    stream, kind = (COPIES, "copy") if piece.copies else (COLLECTIVES, "collective")
    return Span(stream, kind, piece.name, start_s, end_s, number, exposed=exposed, calls=calls)


def _beside(passes: Iterable[Pass], pieces: Sequence[Piece], shift_s: float) -> tuple[list[Span], float]:
    """What hides beside passes, and the seconds that do not fit beside those of this stage."""
    found: list[Span] = []
    unplaced_s = 0.0
    for phase, kinds in (("forward", "F"), ("backward", "BIW")):
        for copies in (False, True):
            hiding = [piece for piece in pieces if piece.phase == phase and piece.copies == copies]
            windows = [
                OverlapWindow(one.micro_batch, one.start_s + shift_s, one.end_s + shift_s)
                for one in passes
                if one.kind in kinds
            ]
            placed, left_s = place_hidden(windows, hiding)
            unplaced_s += left_s
            found += [_span(piece, *when, number, exposed=False) for piece, number, when in placed]
    return found, unplaced_s


def _update(found: list[Span], detail: _Detail, case: Case, pieces: Sequence[Piece], now: float) -> float:
    """Add the optimizer's phase of a stage from `now` on; when it is over."""
    last = [piece for piece in pieces if piece.phase == "optimizer"]
    behind = [piece for piece in last if piece.op in AFTER_UPDATE]
    now = _wait(found, [piece for piece in last if piece not in behind], "optimizer", now)
    if steps_on_host(case):
        seconds = float(update_seconds(case) or 0.0)
        found.append(Span(HOST, "update", "optimizer step on the host", now, now + seconds))
        return _wait(found, behind, "optimizer", now + seconds)
    seconds = float(optimizer_seconds(case, detail.device))
    recipe = msgspec.structs.replace(case.job.recipe, max_grad_norm=0.0)
    unclipped = msgspec.structs.replace(case, job=msgspec.structs.replace(case.job, recipe=recipe))
    clip_s = seconds - float(optimizer_seconds(unclipped, detail.device))
    found.append(Span(COMPUTE, "clip", "gradient clipping", now, now + clip_s))
    found.append(Span(COMPUTE, "update", "optimizer step", now + clip_s, now + seconds))
    return _wait(found, behind, "optimizer", now + seconds)


def _finished(stage: int, found: Iterable[Span], unplaced_s: float) -> StageSpans:
    """The spans that take any time, by stream and begin."""
    spans = ordered([span for span in found if span.seconds > SHORTEST_S])
    return StageSpans(stage, spans, unplaced_s if unplaced_s > SHORTEST_S else 0.0)
