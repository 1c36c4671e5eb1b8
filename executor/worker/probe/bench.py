"""Times one call of a probe, in agreement with the other ranks, and the task that the launcher gives every rank.

Not here: which calls are timed (compute.py, links.py).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from executor.worker.world import words

QUEUED_S = 2e-3
"""A device that works beside its host is given so much before it is waited for: the wait is then no part of a call."""
ProbeRows = list[dict[str, Any]]
"""A table of `rows.json`."""


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """The launcher's request to every rank. `quick` takes few sizes, as a smoke test."""

    kind: str
    nodes: int
    ranks_per_node: int
    quick: bool = False
    budget_s: float = 150.0


class Bench:
    """Times calls while every rank does the same, and agrees with the others on how often.

    A call's figure is the median of its repetitions here, then over ranks: the pace of the machine as it was, not the
    best it could do.
    """

    def __init__(self, task: Task, device: torch.device) -> None:
        self.task, self.device = task, device
        self._began = time.monotonic()

    def spent(self) -> float:
        """The part of the time budget that is gone, the same on every rank."""
        return self.agreed((time.monotonic() - self._began) / self.task.budget_s, max)

    def agreed(self, value: float, choose: Callable[[list[float]], float]) -> float:
        """One number for all ranks."""
        return choose(words.gathered(value, float))

    def seconds(self, call: Callable[[], Any], share_s: float = 0.3) -> float:
        """Median seconds of one call, repeated for about `share_s` seconds, and 5 to 200 times."""
        queued, count = self._repeats(call, share_s, most=200)
        return self.agreed(statistics.median(self._once(call, queued) for _ in range(count)), statistics.median)

    def slowest(self, call: Callable[[], Any], share_s: float = 0.3) -> float:
        """Median seconds, over 3 to 60 repetitions, of a call that ranks make together: each takes as long as on its
        slowest rank."""
        queued, count = self._repeats(call, share_s, most=60, least=3)
        mine = torch.tensor([self._once(call, queued) for _ in range(count)], dtype=torch.float64, device=self.device)
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        return float(mine.median())

    def _repeats(self, call: Callable[[], Any], share_s: float, most: int, least: int = 5) -> tuple[int, int]:
        """(calls in a row before the device is waited for, repetitions), the same on every rank; all begin together."""
        self._once(call)  # first calls make plans and pages
        once_s = self.agreed(self._once(call), max)
        queued = 1 if self.device.type == "cpu" else max(1, round(QUEUED_S / once_s))
        count = int(min(max(share_s / (once_s * queued), least), most))
        dist.barrier()
        return queued, count

    def _once(self, call: Callable[[], Any], queued: int = 1) -> float:
        began = time.perf_counter()
        for _ in range(queued):
            call()
        self.finish()
        return (time.perf_counter() - began) / queued

    def finish(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
