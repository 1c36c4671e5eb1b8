"""When a run hangs, by what its ranks said and by the states of their processes; and whom the sentence names.

Processes are real here, the clock is turned by hand. Not here: whole runs (tests/cluster/test_hangs.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from executor.folder import alive
from executor.folder.alive import Said
from executor.system import processes
from executor.watch import hangs
from executor.watch.hangs import Hang, HangWatch, HungRank, allowed_s, blamed, place_of, sentence

HOSTS = ("one", "one", "two", "two")
RANK = (
    "import sys, time; from pathlib import Path; from executor.folder import alive\n"
    "alive.begin(Path(sys.argv[1]), int(sys.argv[2])); alive.say('step', 3)\n"
    "def busy():\n    while True: time.sleep(600)\n"
    "busy()"
)


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Two processes that say that they are at step 3, and go on no more."""
    made = [subprocess.Popen([sys.executable, "-c", RANK, str(tmp_path), str(rank)]) for rank in (0, 1)]
    (tmp_path / "failed").mkdir()
    while not all((said := alive.read(tmp_path, rank)) and said.step == 3 for rank in (0, 1)):
        assert all(one.poll() is None for one in made)
        signal.sigtimedwait([], 0.05)
    yield made
    for one in made:
        one.kill()
        one.wait()


class Clock:
    """Stands still until a test moves it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def said(stage: str, *, count: int = 1, median_s: float = 0.0, rank: int = 0) -> Said:
    return Said(rank=rank, process="1:1", count=count, stage=stage, step=2, median_s=median_s)


def speak(folder: Path, one: Said) -> None:
    (folder / "alive").mkdir(exist_ok=True)
    (folder / "alive" / f"rank-{one.rank}").write_bytes(msgspec.json.encode(one))


@pytest.mark.parametrize(
    ("stage", "median_s", "stall_s", "expected"),
    [
        ("step", 0.0, None, 60.0),
        ("step", 2.0, None, 60.0),
        ("step", 30.0, None, 600.0),
        ("step", 30.0, 10.0, 10.0),
        ("validation", 30.0, 10.0, 10.0),
        ("first step", 0.0, 10.0, 600.0),
        ("checkpoint", 1.0, 90.0, 900.0),
        ("restore", 0.0, None, 600.0),
        ("start", 0.0, 10.0, None),
        ("end", 0.0, 10.0, None),
    ],
)
def test_how_long_a_rank_may_be_silent_depends_on_what_it_does(stage, median_s, stall_s, expected):
    assert allowed_s(said(stage, median_s=median_s), stall_s) == expected


def test_ranks_hang_when_none_of_them_goes_on_and_their_stacks_are_printed(tmp_path, ranks):
    clock = Clock()
    watch = HangWatch(tmp_path, "id", 0, (0, 1), 2, 10.0, clock)
    assert watch.look() is None
    clock.now = 9.0
    assert watch.look() is None
    clock.now = 10.5
    found = watch.look()

    assert found is not None and found.kind == "stuck"
    assert [(one.rank, one.state, one.step, one.silent_s) for one in found.ranks] == [
        (0, "elsewhere", 3, 10.5),
        (1, "elsewhere", 3, 10.5),
    ]
    assert found.ranks[0].place == "busy (<string>:4)"
    hangs.keep(tmp_path, found)
    assert hangs.read(tmp_path) == (found,)
    assert all(one.poll() is None for one in ranks)  # who prints its stacks goes on


def test_ranks_are_looked_at_once_in_a_while_however_often_that_is_asked_for(tmp_path):
    clock = Clock()
    watch = HangWatch(tmp_path, "id", 0, (0,), 1, 10.0, clock)
    speak(tmp_path, said("step"))
    assert watch.look() is None
    found = []
    for clock.now in (10.0, 10.0 + 0.9 * hangs.LOOK_S, 10.0 + hangs.LOOK_S):
        found.append(watch.look() is not None)
    assert found == [True, False, True]


def test_one_rank_that_goes_on_is_no_hang(tmp_path):
    clock = Clock()
    watch = HangWatch(tmp_path, "id", 0, (0, 1), 2, 10.0, clock)
    speak(tmp_path, said("step"))
    for count in range(1, 8):
        speak(tmp_path, said("validation", count=count, rank=1))
        assert watch.look() is None
        clock.now += 8.0


@pytest.mark.parametrize(("stage", "hangs_too"), [("checkpoint", False), ("end", False), ("step", True)])
def test_ranks_that_wait_for_another_nodes_slow_disk_do_not_hang(tmp_path, stage, hangs_too):
    clock = Clock()
    watch = HangWatch(tmp_path, "id", 0, (0,), 2, 10.0, clock)
    speak(tmp_path, said("step"))
    speak(tmp_path, said(stage, rank=1))
    for now in (0.0, 6.0, 12.0, 18.0):
        clock.now = now
        found = watch.look()

    assert (found is not None) == hangs_too


def stop(pid: int) -> None:
    """Stop a process, and return once it is."""
    os.kill(pid, signal.SIGSTOP)
    while hangs.state_of(pid) != "T":
        signal.sigtimedwait([], 0.02)


def test_a_stopped_rank_is_found_after_a_moment_and_a_pause_is_not(tmp_path, ranks):
    clock = Clock()
    watch = HangWatch(tmp_path, "id", 0, (0, 1), 2, None, clock)
    assert watch.look() is None
    stop(ranks[1].pid)
    clock.now = 2.0
    assert watch.look() is None
    os.kill(ranks[1].pid, signal.SIGCONT)
    while hangs.state_of(ranks[1].pid) == "T":
        signal.sigtimedwait([], 0.02)
    clock.now = 8.0
    assert watch.look() is None
    stop(ranks[1].pid)
    clock.now = 10.0
    assert watch.look() is None
    clock.now = 16.0
    found = watch.look()

    assert found is not None and (found.kind, [one.state for one in found.ranks]) == (
        "stopped",
        ["elsewhere", "stopped"],
    )
    text = sentence([found], HOSTS, "run")
    assert text.startswith(
        f"rank 1 on one is stopped at step 3: process {ranks[1].pid} received a signal such as SIGSTOP"
    )


def test_a_rank_that_says_nothing_is_found_by_its_environment(tmp_path):
    env = os.environ | {processes.RUN_ID_VARIABLE: "of-a-script", "RANK": "0"}
    silent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], env=env)
    try:
        while "of-a-script" not in Path(f"/proc/{silent.pid}/environ").read_text():
            signal.sigtimedwait([], 0.02)
        stop(silent.pid)
        clock = Clock()
        watch = HangWatch(tmp_path, "of-a-script", 0, (0,), 1, None, clock)
        assert watch.look() is None
        clock.now = 6.0
        found = watch.look()
        assert found is not None and blamed([found])[0].process == silent.pid
    finally:
        silent.kill()
        silent.wait()


WAITS = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 331 in wait

Current thread 0x00007f00 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 3007 in all_reduce
  File "/x/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/me/executor/worker/train.py", line 150 in _train
"""
BACKWARD = """Current thread 0x00007f00 (most recent call first):
  File "/x/site-packages/torch/autograd/graph.py", line 900 in _engine_run_backward
  File "/home/me/executor/worker/engines/base.py", line 90 in run
"""


def test_a_stack_says_whether_a_rank_waits_for_others():
    assert place_of(WAITS) == ("waiting", "all_reduce, called from _train (train.py:150)")
    assert place_of(BACKWARD) == ("backward", "run (base.py:90)")
    assert place_of("") == ("silent", "")


@pytest.mark.parametrize("place", hangs.DISTRIBUTED)
def test_who_waits_is_whoever_called_what_waits_through_however_many_of_its_functions(place: str):
    file = f"/x/site-packages{place}" if place.endswith(".py") else f"/x/site-packages{place}comm.py"
    frames = [(file, 1, "wait"), (file, 2, "_barrier"), ("/home/me/executor/worker/world/waits.py", 3, "timed"),
              ("/x/site-packages/torch/nn/linear.py", 4, "forward"), ("/home/me/train.py", 5, "_train"),
              ("/home/me/main.py", 6, "main")]  # fmt: skip
    lines = [f'  File "{file}", line {line} in {name}' for file, line, name in frames]
    stack = "\n".join(["Current thread 0x00007f00 (most recent call first):", *lines, ""])

    assert place_of(stack) == ("waiting", "barrier, called from _train (train.py:5)")
    assert place_of("\n".join([lines[-1], "", stack])) == place_of(stack)
    inside = "\n".join(["Current thread 0x00007f00 (most recent call first):", *lines[3:], ""])
    assert place_of(inside) == ("elsewhere", "forward (linear.py:4)")


def hung(rank: int, state: str, step: int = 5, place: str = "f (x.py:1)") -> HungRank:
    return HungRank(rank=rank, state=state, place=place, stage="step", step=step, silent_s=61.0)


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ([hung(0, "waiting"), hung(1, "elsewhere"), hung(2, "waiting")], [1]),
        ([hung(0, "waiting"), hung(1, "waiting", 4)], [1]),
        ([hung(0, "waiting"), hung(1, "waiting")], []),
        ([hung(0, "elsewhere"), hung(1, "elsewhere")], []),
        ([hung(0, "backward"), hung(1, "elsewhere"), hung(2, "stopped")], [2]),
    ],
)
def test_who_is_blamed(ranks, expected):
    found = [Hang(node=0, kind="stuck", after_s=60.0, ranks=tuple(ranks))]

    assert [one.rank for one in blamed(found)] == expected


def test_the_sentence_puts_together_what_all_nodes_saw():
    found = [
        Hang(node=0, kind="stuck", after_s=61.0, ranks=(hung(0, "waiting"), hung(1, "waiting"))),
        Hang(
            node=1, kind="stuck", after_s=61.0, ranks=(hung(2, "elsewhere", place="hold (y.py:7)"), hung(3, "waiting"))
        ),
    ]

    assert sentence(found, HOSTS, "run") == (
        "rank 2 on two is stuck in hold (y.py:7) at step 5, silent for 61 s; ranks [0, 1, 3] wait in f (x.py:1). "
        "Stacks of all ranks: run/alive/rank-*.stacks"
    )
    nobody = [Hang(node=0, kind="stuck", after_s=61.0, ranks=(hung(0, "waiting"), hung(1, "waiting")))]
    assert sentence(nobody, HOSTS, "run").startswith(
        "no rank has made progress for 61 s, and none is behind: check the network between them; ranks [0, 1] wait in f"
    )
