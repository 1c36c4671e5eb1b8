"""Processes of a run that only sleep, for tests of what finds and ends processes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping

from executor.system import processes

DEADLINE_S = 60.0


def sleeper(environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """A sleeping process, once its environment can be read: `Popen` returns when execve closes its pipe, an instant
    before Linux lets /proc/PID/environ show anything."""
    started = subprocess.Popen(["sleep", "600"], env=environment)
    deadline = time.monotonic() + DEADLINE_S
    while not (processes.PROC / str(started.pid) / "environ").read_bytes():
        assert started.poll() is None and time.monotonic() < deadline, "the process never showed its environment"
        time.sleep(0.01)
    return started
