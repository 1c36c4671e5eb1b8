"""Bytes that the interfaces of this rank's node sent in each step, where only the run uses them.

Read from the counters of the process's own network namespace. Not here: what ranks gave their collectives (traffic.py).
"""

from __future__ import annotations

import os
from pathlib import Path

from executor.system.processes import said
from planner.spec.record import Wire

VARIABLE = "MESHWRIGHT_COUNTED"
"""Set by the launcher: the interfaces' names, separated by commas."""
COUNTERS = Path("/proc/self/net/dev")
SENT_BYTES, SENT_PACKETS = 8, 9
"""Columns of a line of /proc/net/dev (Linux, proc(5)) after the interface's name."""
FIRST_STEP = 2
"""Before it, DDP orders its buckets anew and ZeRO-3 finds out what to fetch when."""


class WireCounter:
    """Counts for the first rank of each node; for the others, and where no interface is the run's own, nothing."""

    def __init__(self) -> None:
        names = os.environ.get(VARIABLE, "")
        first = os.environ.get("LOCAL_RANK", "0") == "0"
        self._interfaces = tuple(filter(None, names.split(","))) if first else ()
        self._seen = (0, 0)
        self._steps: list[tuple[int, int]] = []
        self._passed = 0

    def begin(self) -> None:
        """Bytes sent so far belong to no step."""
        if self._interfaces:
            self._seen = self._read() or self._give_up()

    def step_ended(self) -> None:
        """All ranks have ended a step: what was sent since then is that step's."""
        if not self._interfaces:
            return
        before = self._seen
        if (now := self._read()) is None:
            self._give_up()
            return
        if self._passed >= FIRST_STEP:
            self._steps.append((now[0] - before[0], now[1] - before[1]))
        self._passed += 1
        self._seen = now

    def result(self) -> Wire | None:
        """The counts, or None where there are none."""
        if not self._steps:
            return None
        sent, packets = (tuple(float(one) for one in column) for column in zip(*self._steps, strict=True))
        ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return Wire(interfaces=self._interfaces, ranks=ranks, step_bytes=sent, step_packets=packets)

    def _give_up(self) -> tuple[int, int]:
        """Count no more: what cannot be read once says nothing of any step."""
        self._interfaces, self._steps = (), []
        return 0, 0

    def _read(self) -> tuple[int, int] | None:
        """(bytes, packets) that the interfaces have sent; None where that of one cannot be read."""
        lines = dict(line.split(":", 1) for line in said(COUNTERS).splitlines() if ":" in line)
        counts = {name.strip(): counted.split() for name, counted in lines.items()}
        try:
            rows = [counts[name] for name in self._interfaces]
            return sum(int(row[SENT_BYTES]) for row in rows), sum(int(row[SENT_PACKETS]) for row in rows)
        except (KeyError, IndexError, ValueError):
            return None
