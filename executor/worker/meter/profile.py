"""One steady step of a rank under torch's profiler: what it computed, sent and copied when, in profile/rank-N.json.

Ranks begin the step together, and go on together when all have written, so that no other step is longer for it. Not
here: how events become spans (spans.py), or drawing them (`planner timeline --beside`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from executor.folder.rundir import write_of_rank
from executor.worker.meter.spans import PASS, STEP, Event, NamedCollective, bounded, spans_of
from executor.worker.meter.traffic import CollectiveCall, group_name
from planner.basics.quantities import MICRO
from planner.parallelism.case import coordinates
from planner.spec.plan import Plan
from planner.spec.spans import FIRST_RECORDED, FOLDER, Profile


class Profiling:
    """Records one step of a start: `asked`, which counts from 1, or the first steady one after it; none where it is
    None. All ranks decide alike."""

    def __init__(self, plan: Plan, folder: Path, rank: int, device: torch.device, asked: int | None) -> None:
        self._plan, self._folder, self._rank, self._device, self._asked = plan, folder, rank, device, asked
        self._recorded: tuple[profile, int, list[CollectiveCall]] | None = None

    @contextmanager
    def around(self, meter: Any, step: int, count: int) -> Iterator[Any]:
        """Around the `count`-th step of this start, which `step` steps of the run come before: the meter to use in it,
        which is the given one where nothing is recorded."""
        if self._asked is None or step + 1 < self._asked or count + 1 < FIRST_RECORDED:
            yield meter
            return
        self._asked = None
        activities = [ProfilerActivity.CPU]
        if self._device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        with profile(activities=activities) as recorded:
            dist.barrier()
            yield Recording(meter)
        self._recorded = recorded, step + 1, getattr(meter, "calls", [])

    def write(self) -> bool:
        """Write the recording of the previous step, if there is one; whether there was. All ranks call it, after they
        report the step."""
        if self._recorded is None:
            return False
        (recorded, step, calls), self._recorded, layout = self._recorded, None, self._plan.layout
        named = [NamedCollective(call.op, group_name(layout, call.ranks, call.op), call.unit) for call in calls]
        step_s, spans = spans_of(events_of(recorded), named)
        kept, left_out, left_out_s = bounded(spans)
        found = Profile(
            rank=self._rank, stage=coordinates(layout, self._rank)["pp"], step=step, device=self._device.type,
            step_s=step_s, spans=kept, left_out=left_out, left_out_s=left_out_s,
        )  # fmt: skip
        write_of_rank(self._folder, FOLDER, self._rank, found)
        dist.barrier()
        return True


class Recording:
    """A meter that marks the step and its passes for the profiler, too."""

    def __init__(self, meter: Any) -> None:
        self._meter = meter
        self._seen: Counter[str] = Counter()

    @contextmanager
    def step(self, index: int) -> Iterator[None]:
        """Around the step, whose time is none of a steady one."""
        with self._meter.step(index, timed=False), record_function(STEP):
            yield

    @contextmanager
    def phase(self, name: str, *, passes: bool = True) -> Iterator[None]:
        """As the meter's; passes are counted, so that each bears its micro-batch's number."""
        kind = name.partition(".")[0]
        with ExitStack() as stack:
            stack.enter_context(self._meter.phase(name, passes=passes))
            if passes:
                stack.enter_context(record_function(f"{PASS}{kind} {self._seen[kind]}"))
                self._seen[kind] += 1
            yield


def events_of(recorded: profile) -> list[Event]:
    """The profiler's events, in seconds."""
    return [
        Event(
            event.name,
            event.time_range.start * MICRO,
            event.time_range.end * MICRO,
            int(event.thread),
            event.device_type.name != "CPU",
        )
        for event in recorded.events() or ()
    ]
