"""Claims about waiting for gloo's own threads. What real runs measure by it: tests/cluster/test_prediction.py."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from executor.worker.meter import transport

NAMES_OF_REAL_THREADS = """
import os, time
import torch, torch.distributed as dist
from executor.worker.meter import transport

os.environ["GLOO_SOCKET_IFNAME"] = "lo"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.all_reduce(torch.ones(8))
until = time.monotonic() + 60
while transport.threads_run() and time.monotonic() < until:
    time.sleep(0.01)
print(*[(task / "comm").read_text() for task in transport.TASKS.iterdir()])
print(transport.threads_run())
"""


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """What each look at the threads found: the first five find one running."""
    found: list[bool] = []
    states: Iterator[bool] = iter([True] * 5 + [False] * 20)

    def look() -> bool:
        found.append(next(states))
        return found[-1]

    monkeypatch.setattr(transport, "threads_run", look)
    return found


def test_gloo_threads_bear_the_name_that_is_looked_for_and_sleep_when_idle() -> None:
    done = subprocess.run([sys.executable, "-c", NAMES_OF_REAL_THREADS], capture_output=True, text=True, timeout=120)

    assert transport.THREAD_NAME in done.stdout, done.stderr[-2000:]
    assert done.stdout.split()[-1] == "False"


@pytest.mark.skipif(sys.platform != "linux", reason="threads' states are read from /proc")
def test_what_is_held_for_good_is_given_up_once_the_threads_sleep(looks: list[bool]) -> None:
    transport.settle(lambda: True)

    assert looks == [True] * 5 + [False] * transport.QUIET_LOOKS


@pytest.mark.skipif(sys.platform != "linux", reason="threads' states are read from /proc")
def test_nothing_is_waited_for_once_it_is_let_go(looks: list[bool]) -> None:
    transport.settle(lambda: len(looks) < 2)

    assert looks == [True, True]
