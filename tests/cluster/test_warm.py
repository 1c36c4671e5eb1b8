"""The warm process of the other tests: how ranks that it forks end, and that none outlives the tests.

Not here: training in them (test_equivalence.py), or the project's own launcher (test_launch.py).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from warm import Nursery

FOLDER = Path(__file__).parent
NURSERY = Nursery(())  # without a framework


def rank(log: Path, *behaviour: str, after: Path | None = None) -> dict[str, object]:
    environment = {"AFTER": str(after)} if after else {}
    return {"module": "ill", "arguments": list(behaviour), "environment": environment, "log": str(log)}


@pytest.mark.parametrize(
    ("behaviour", "code", "words"),
    [
        (("exit", "3"), 3, "will exit"),
        (("raise",), 1, "ValueError: the trouble is here"),
        (("crash",), -signal.SIGSEGV, "Fatal Python error: Segmentation fault"),
    ],
)
def test_a_rank_that_fails_ends_the_others_and_both_say_where_they_were(
    tmp_path: Path, behaviour: tuple[str, ...], code: int, words: str
) -> None:
    ill, other = tmp_path / "ill.log", tmp_path / "other.log"

    other.touch()
    codes = NURSERY.run([rank(ill, *behaviour, after=other), rank(other, "hang")], last_words_s=0.5)

    assert codes == [code, -signal.SIGABRT]
    assert words in ill.read_text()
    assert "in main" in other.read_text()
    assert NURSERY.run([rank(ill, "exit", "0")]) == [0]


def test_ranks_that_hang_are_ended_and_say_where(tmp_path: Path) -> None:
    codes = NURSERY.run([rank(tmp_path / "log", "hang")], timeout_s=2.0)

    assert codes == [-signal.SIGABRT]
    assert "ill.py" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("seen", "lasts_s", "code"), [(600.0, 4, 0), (-600.0, 60, -signal.SIGABRT)])
def test_ranks_that_give_signs_are_waited_for_however_slow_they_are(
    tmp_path: Path, seen: float, lasts_s: int, code: int
) -> None:
    sign = tmp_path / "alive" / "rank-0"
    sign.parent.mkdir()
    sign.touch()
    os.utime(sign, (time.time() + seen,) * 2)  # of a step that begins while the rank is there, or of a run long over

    assert NURSERY.run([rank(tmp_path / "log", "last", str(lasts_s))], timeout_s=1.0) == [code]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_rank_outlives_the_tests(tmp_path: Path, number: int) -> None:
    log = tmp_path / "log"
    # A shell's background job ignores SIGINT, and so would this process if the tests are one.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    program = f"{heard}\nfrom warm import Nursery\nNursery(()).run([{rank(log, 'hang')!r}])"
    tests = subprocess.Popen([sys.executable, "-c", program], cwd=FOLDER, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 300
    while not log.exists() or "will hang" not in log.read_text():
        assert tests.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    forked = int(log.read_text().split()[1])

    os.kill(tests.pid, number)
    tests.wait(timeout=300)

    while Path(f"/proc/{forked}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
