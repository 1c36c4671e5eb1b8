"""A profiler's events of one step as spans of the planner's streams: passes, collectives by name, sends, copies.

Not here: the profiler (profile.py), or what the streams mean (planner.spec.spans).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from planner.spec.spans import COLLECTIVES, COMPUTE, COPIES, INSIDE, MOST_SPANS, SENDS, Span, ordered

STEP, PASS = "meshwright::step", "meshwright::pass "
"""Names of what the trainer marks: the step, and its passes ("forward 2")."""
KINDS = {"forward": "forward", "backward": "backward", "optimizer": "update"}

GLOO = "gloo:"
AS_GLOO = {"reduce_scatter": "all_reduce"}
"""Operations that gloo does by another (torch 2.13, ProcessGroupGloo), under whose name they are recorded."""
NCCL = re.compile(r"nccl\w*?_?(AllReduce|AllGather|ReduceScatter|Broadcast|SendRecv|Reduce)")
NCCL_OPS = {"AllReduce": "all_reduce", "AllGather": "all_gather", "ReduceScatter": "reduce_scatter",
            "Broadcast": "broadcast", "SendRecv": "send", "Reduce": "reduce"}  # fmt: skip
COPY = re.compile(r"Memcpy (HtoD|DtoH)")
POINT_TO_POINT = ("send", "recv")
BETWEEN_PASSES = ("tp", "cp", "ep")
"""Groups whose collectives stand in the way of every pass."""
LEAST_WAIT_S = 20e-6
"""Shorter pauses of a process are its interpreter's."""
JOINED_S = 20e-6
"""Kernels of one pass that are no further apart are one span."""


class Event(NamedTuple):
    """One event of a profiler, in seconds on its clock; on the device, or on a thread of the process."""

    name: str
    start_s: float
    end_s: float
    thread: int = 0
    on_device: bool = False


class NamedCollective(NamedTuple):
    """A collective's group and unit beside its operation, from the step whose traffic was measured."""

    op: str
    group: str
    unit: str


Interval = tuple[float, float]


def spans_of(events: Sequence[Event], calls: Sequence[NamedCollective]) -> tuple[float, list[Span]]:
    """(seconds of the step, its spans since it began). `calls` are the collectives of another steady step in the order
    in which they were made: where as many of an operation were recorded, each bears its group and unit.

    Passes are without what they wait for: on a device, where it computes nothing; in a process, where a collective is
    under way and no operation is.
    """
    step = next(event for event in events if event.name == STEP and not event.on_device)
    events = [event for event in events if step.start_s <= event.start_s < event.end_s <= step.end_s]
    on_device = any(event.on_device for event in events)
    sent = [one for event in events if (one := _sent(event, on_device)) is not None]
    copies = [event for event in events if on_device and event.on_device and COPY.match(event.name)]
    found = _passes(events, step, [event for _, event in sent], on_device)
    waits = _gaps([(span.start_s, span.end_s) for span in found], (step.start_s, step.end_s))
    found += _collectives(sent, calls, waits, {} if on_device else AS_GLOO)
    found += [_copy(event, waits) for event in copies]
    shifted = [
        Span(
            span.stream, span.kind, span.name, span.start_s - step.start_s, span.end_s - step.start_s,
            span.micro_batch, exposed=span.exposed, calls=span.calls,
        )
        for span in found
    ]  # fmt: skip
    return step.end_s - step.start_s, list(ordered(in_lanes(shifted)))


def bounded(spans: Sequence[Span], most: int = MOST_SPANS) -> tuple[tuple[Span, ...], int, float]:
    """The longest spans, as many as a file takes; the number that are left out, and their seconds."""
    if len(spans) <= most:
        return tuple(spans), 0, 0.0
    by_length = sorted(spans, key=lambda span: -span.seconds)
    left = by_length[most:]
    return ordered(by_length[:most]), len(left), sum(span.seconds for span in left)


def in_lanes(spans: Iterable[Span]) -> list[Span]:
    """Spans of each stream in as many lanes as are under way at once."""
    found: list[Span] = []
    free: dict[str, list[float]] = defaultdict(list)
    for span in sorted(spans, key=lambda one: (one.start_s, one.end_s)):
        lanes = free[span.stream]
        lane = next((place for place, end_s in enumerate(lanes) if end_s <= span.start_s), len(lanes))
        lanes[lane : lane + 1] = [span.end_s]
        found.append(
            Span(
                span.stream, span.kind, span.name, span.start_s, span.end_s, span.micro_batch, lane=lane,
                exposed=span.exposed, calls=span.calls,
            )
        )  # fmt: skip
    return found


def _passes(events: Sequence[Event], step: Event, sent: Sequence[Event], on_device: bool) -> list[Span]:
    """Each pass as the pieces in which something is computed."""
    marked = [event for event in events if event.name.startswith(PASS) and event.on_device == on_device]
    marked = marked or [event for event in events if event.name.startswith(PASS)]
    if on_device:
        kernels = [event for event in events if event.on_device and _computes(event)]
        busy = _union([(event.start_s, event.end_s) for event in kernels], JOINED_S)
    else:
        working = [event for event in events if event.thread == step.thread and event.name.startswith("aten::")]
        busy = _union([(event.start_s, event.end_s) for event in working], 0.0)
    under_way = _union([(event.start_s, event.end_s) for event in sent], 0.0)
    found = []
    for event in sorted(marked, key=lambda one: one.start_s):
        kind, _, number = event.name.removeprefix(PASS).partition(" ")
        whole = (event.start_s, event.end_s)
        pieces = _within(busy, whole)
        if not on_device:  # an interpreter between two operations works as well, as long as it waits for no other rank
            idle = [gap for gap in _gaps(pieces, whole) if gap[1] - gap[0] >= LEAST_WAIT_S]
            waited = [piece for gap in idle for piece in _within(under_way, gap) if piece[1] - piece[0] >= LEAST_WAIT_S]
            pieces = _gaps(waited, whole)
        batch = None if kind == "optimizer" else int(number)
        name = f"{kind} {number}" if batch is not None else "optimizer step"
        found += [Span(COMPUTE, KINDS[kind], name, start_s, end_s, batch) for start_s, end_s in pieces]
    return found


def _computes(event: Event) -> bool:
    marked = event.name.startswith(("meshwright::", "FSDP::", "Optimizer.", "ProfilerStep", "nccl:", "DistributedData"))
    return not (marked or NCCL.search(event.name) or COPY.match(event.name))


def _sent(event: Event, on_device: bool) -> tuple[str, Event] | None:
    """The operation of a collective, as gloo or NCCL's kernels name it."""
    if on_device:
        found = NCCL.search(event.name) if event.on_device and not event.name.startswith("nccl:") else None
        return None if found is None else (NCCL_OPS[found[1]], event)
    return (event.name.removeprefix(GLOO), event) if event.name.startswith(GLOO) else None


def _collectives(
    sent: Sequence[tuple[str, Event]],
    calls: Sequence[NamedCollective],
    waits: Sequence[Interval],
    done_by: dict[str, str],
) -> list[Span]:
    by_op: dict[str, list[Event]] = defaultdict(list)
    for op, event in sent:
        by_op[op].append(event)
    known: dict[str, list[NamedCollective]] = defaultdict(list)
    for made in calls:
        known[done_by.get(made.op, made.op)].append(made)
    found = []
    for op, events in by_op.items():
        same = len(known[op]) == len(events)
        for place, event in enumerate(sorted(events, key=lambda one: one.start_s)):
            call = known[op][place] if same else None
            name = op if call is None else f"{call.op} {call.group} {call.unit}"
            stream = SENDS if op in POINT_TO_POINT else COLLECTIVES
            if stream == COLLECTIVES and call is not None and call.group in BETWEEN_PASSES:
                stream = INSIDE
            found.append(
                Span(
                    stream, "collective" if stream != SENDS else op, name, event.start_s, event.end_s,
                    exposed=_waited(event, waits), calls=1.0,
                )
            )  # fmt: skip
    return found


def _copy(event: Event, waits: Sequence[Interval]) -> Span:
    way = "out" if "DtoH" in event.name else "in"
    name = f"host link, {way}"
    return Span(COPIES, "copy", name, event.start_s, event.end_s, exposed=_waited(event, waits))


def _waited(event: Event, waits: Sequence[Interval]) -> bool:
    """Whether most of it has no compute beside."""
    alone = sum(end_s - start_s for start_s, end_s in _within(waits, (event.start_s, event.end_s)))
    return alone > (event.end_s - event.start_s) / 2


def _union(intervals: Iterable[Interval], joined_s: float) -> list[Interval]:
    """Intervals that overlap, or are no further apart than `joined_s`, as one."""
    found: list[Interval] = []
    for start_s, end_s in sorted(intervals):
        if found and start_s <= found[-1][1] + joined_s:
            found[-1] = (found[-1][0], max(found[-1][1], end_s))
        else:
            found.append((start_s, end_s))
    return found


def _within(intervals: Iterable[Interval], whole: Interval) -> list[Interval]:
    """The parts of intervals inside of one."""
    cut = [(max(start_s, whole[0]), min(end_s, whole[1])) for start_s, end_s in intervals]
    return [(start_s, end_s) for start_s, end_s in cut if end_s > start_s]


def _gaps(intervals: Iterable[Interval], whole: Interval) -> list[Interval]:
    """The remaining parts of an interval."""
    found: list[Interval] = []
    now = whole[0]
    for start_s, end_s in _union(_within(intervals, whole), 0.0):
        if start_s > now:
            found.append((now, start_s))
        now = max(now, end_s)
    return [*found, (now, whole[1])] if now < whole[1] else found
