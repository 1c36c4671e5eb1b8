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

from executor.hosts.checks.check import HERE
from executor.hosts.ssh import HostReply
from planner.basics.errors import PlannerError

ANSWER = """
import json, sys
from executor.hosts.checks.host import answer
print(json.dumps(answer(json.load(sys.stdin))))
"""


class Inside:
    """Hosts by node; `before` goes before a node's command line, as a fault of that host."""

    def __init__(self, hosts: Sequence[TestHost], before: dict[int, Sequence[str]] | None = None) -> None:
        self.hosts, self.before = hosts, before or {}

    def ask(self, requests: dict[int, dict[str, Any]], timeout_s: float) -> Iterator[HostReply]:
        with ThreadPoolExecutor(len(requests)) as pool:
            asked = [pool.submit(self._one, node, request, timeout_s) for node, request in requests.items()]
            for one in as_completed(asked):
                yield one.result()

    def _one(self, node: int, request: dict[str, Any], timeout_s: float) -> HostReply:
        words = [*self.before.get(node, ()), sys.executable, "-c", ANSWER]
        done = subprocess.run(
            self.hosts[node].words("OMP_NUM_THREADS=1", *words),
            input=json.dumps(request),
            capture_output=True,
            text=True,
            timeout=timeout_s + 30,
            check=False,
        )
        if done.returncode:
            return HostReply(node, HERE, error=PlannerError("host", None, done.stderr.strip()[-300:], exit_code=3))
        return HostReply(node, HERE, json.loads(done.stdout))
