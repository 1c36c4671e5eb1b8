"""Spans of one step, thought or recorded, and profile/rank-N.json: what the ranks of a run recorded of one step.

Both are the same words, so that they stand on one axis. Not here: predicting them (figures/timeline.py), or recording
them (executor.worker.meter.profile).
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec

from planner.basics.errors import PlannerError
from planner.basics.reading import NOT_JSON, read_bytes

SCHEMA = "profile/1"
FOLDER = "profile"
"""Of a run folder."""
FIRST_RECORDED = 6
"""The first step, counted from 1, that a run may record: the trainer's meter looks into those before it."""
MOST_SPANS = 20_000
"""That one rank writes: about 3 MB."""

COMPUTE, COLLECTIVES, INSIDE, SENDS, COPIES, HOST = (
    "compute", "collectives", "in passes", "sends", "copies", "host",
)  # fmt: skip
STREAMS = (COMPUTE, COLLECTIVES, INSIDE, SENDS, COPIES, HOST)
"""Of a stage: its kernels; the engine's collectives; those of tensor, context and expert groups, which stand in the way
of every pass; what it sends to another stage; what crosses the host's link; and what the host itself computes."""


class Span(msgspec.Struct, frozen=True, omit_defaults=True):
    """One piece of work of one stage or rank, in seconds since the step began.

    `lane` counts what is under way at once in a stream: each lane is a stream of its own, whose spans never overlap.
    `exposed` is a predicted collective or copy that is waited for. `calls` says of how many calls it is the sum.
    """

    stream: str
    kind: str
    name: str
    start_s: float
    end_s: float
    micro_batch: int | None = None
    chunk: int | None = None
    lane: int = 0
    exposed: bool = False
    calls: float | None = None

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end_s - self.start_s


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's record of one step, which counts from 1. Spans are of the device where it has a clock of its own
    (`device` cuda), else of the process.

    `stage` is the rank's pipeline stage. `left_out` spans were too many for the file: the shortest ones, `left_out_s`
    seconds together.
    """

    schema: str = SCHEMA
    rank: int
    stage: int
    step: int
    device: str
    step_s: float
    spans: tuple[Span, ...]
    left_out: int = 0
    left_out_s: float = 0.0


def ordered(spans: list[Span]) -> tuple[Span, ...]:
    """Spans by stream, lane and begin."""
    return tuple(sorted(spans, key=lambda span: (STREAMS.index(span.stream), span.lane, span.start_s)))


def read_profiles(folder: Path) -> tuple[Profile, ...]:
    """What the ranks of a run recorded, by rank; empty where nothing was (PlannerError where a file is damaged)."""
    named = [(re.fullmatch(r"rank-(\d+)\.json", path.name), path) for path in (folder / FOLDER).glob("rank-*.json")]
    return tuple(_read(path) for _, path in sorted((int(match[1]), path) for match, path in named if match))


def _read(path: Path) -> Profile:
    fix = "Record it again: executor run --profile"
    try:
        found = msgspec.json.decode(read_bytes(path), type=Profile)
    except (OSError, *NOT_JSON) as error:
        raise PlannerError("profile", path, f"cannot be read ({error})", fix) from None
    if found.schema != SCHEMA:
        raise PlannerError("profile: schema", found.schema, f"this version reads {SCHEMA}", fix)
    if unknown := {span.stream for span in found.spans} - set(STREAMS):
        raise PlannerError("profile: stream", min(unknown), "is none that is known", fix)
    return found
