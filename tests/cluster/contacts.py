"""A contact with hosts to test on that needs no ssh: each question is a new process on the host.

Not here: the hosts (hosts.py), or what is asked (executor.hosts.checks).
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from hosts import TestHost

from executor.hosts.checks.check import Here
from planner.basics.errors import PlannerError


class Inside:
    """Hosts by node; `before` goes before a node's command line, as a fault of that host."""

    def __init__(self, hosts: Sequence[TestHost], before: dict[int, Sequence[str]] | None = None) -> None:
        self.hosts, self.before = hosts, before or {}

    def ask(self, requests: dict[int, dict[str, Any]], timeout_s: float) -> Iterator[Here]:
        with ThreadPoolExecutor(len(requests)) as pool:
            asked = [pool.submit(self._one, node, request, timeout_s) for node, request in requests.items()]
            for one in as_completed(asked):
                yield one.result()

    def _one(self, node: int, request: dict[str, Any], timeout_s: float) -> Here:
        words = [*self.before.get(node, ()), sys.executable, "-m", "executor.hosts.checks.host"]
        done = subprocess.run(
            self.hosts[node].words("OMP_NUM_THREADS=1", *words),
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=timeout_s + 30,
            check=False,
        )
        if done.returncode:
            return Here(node, None, PlannerError("host", None, done.stderr.strip()[-300:], exit_code=3))
        return Here(node, json.loads(done.stdout))
