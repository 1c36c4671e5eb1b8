"""A step in the Trace Event Format, which Perfetto and chrome://tracing open: complete events in microseconds.

A process is a stage that was predicted or a rank that recorded, a thread one lane of a stream. Source: Trace Event
Format, docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU. Not here: what there is to draw
(scene/time.py).
"""

from __future__ import annotations

from typing import Any

import msgspec

from planner.basics.quantities import MICRO
from planner.spec.spans import STREAMS, Span
from planner.views.scene.time import PREDICTED, Axis, Track

RECORDED_FROM = 1_000_000
"""Process numbers of ranks that recorded; below them are the stages'."""
LANES = 1_000
"""Thread numbers of one stream."""


def trace_of(axis: Axis) -> bytes:
    """The whole file."""
    events: list[dict[str, Any]] = []
    for place, track in enumerate(axis.tracks):
        events += _track(track, place)
    whole = {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"told": list(axis.told), "notes": list(axis.notes)},
    }
    return msgspec.json.encode(whole) + b"\n"


def _track(track: Track, place: int) -> list[dict[str, Any]]:
    process = track.number if track.part == PREDICTED else RECORDED_FROM + track.number
    events = [
        _named("process_name", process, 0, name=f"{track.name}, {track.part}"),
        _named("process_sort_index", process, 0, sort_index=place),
    ]
    for stream, lane in sorted({(span.stream, span.lane) for span in track.spans}, key=_order):
        thread = _thread(stream, lane)
        events.append(_named("thread_name", process, thread, name=stream + (f" {lane + 1}" if lane else "")))
        events.append(_named("thread_sort_index", process, thread, sort_index=thread))
    return events + [_event(span, process) for span in track.spans]


def _order(pair: tuple[str, int]) -> tuple[int, int]:
    return STREAMS.index(pair[0]), pair[1]


def _thread(stream: str, lane: int) -> int:
    return (STREAMS.index(stream) + 1) * LANES + lane


def _named(what: str, process: int, thread: int, **told: str | int) -> dict[str, Any]:
    """A metadata event."""
    return {"name": what, "ph": "M", "pid": process, "tid": thread, "ts": 0, "args": told}


def _event(span: Span, process: int) -> dict[str, Any]:
    told = {name: getattr(span, name) for name in ("micro_batch", "chunk", "calls")}
    args: dict[str, Any] = {name: value for name, value in told.items() if value is not None}
    if span.exposed:
        args["exposed"] = True
    return {
        "name": span.name,
        "cat": span.kind,
        "ph": "X",
        "ts": span.start_s / MICRO,
        "dur": span.seconds / MICRO,
        "pid": process,
        "tid": _thread(span.stream, span.lane),
        "args": args,
    }
