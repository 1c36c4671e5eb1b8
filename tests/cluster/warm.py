"""Ranks without the wait: a process that has imported the frameworks once and forks every rank from itself.

Importing torch, Transformers and DeepSpeed takes a core four to five seconds, more than a tiny model's training, and a
suite starts hundreds of ranks. A forked rank is a process like any other, with its own gloo, memory and exit code. Not
here: torchrun, which test_launch.py and test_worker.py start for real.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2]
RANK_TIMEOUT_S = 240


class Nursery:
    """The warm process, started at the first call of `run` and used by one run at a time."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run(self, ranks: Sequence[dict[str, Any]]) -> list[int]:
        """Exit codes of ranks, each {"environment", "arguments" of the trainer, "log" file}, run side by side."""
        if self._process is None or self._process.poll() is not None:
            self._process = _start()
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(list(ranks)) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the warm process ended with {self._process.wait()}"
        return json.loads(answer)


def _start() -> subprocess.Popen[str]:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(PROJECT),
        "PYTHONWARNINGS": "ignore",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.Popen(
        [sys.executable, __file__],
        cwd=PROJECT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def _serve() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed logs to stdout
    import accelerate
    import deepspeed
    import peft
    import transformers.models.llama.modeling_llama  # noqa: F401

    import executor.worker.meter
    import executor.worker.train  # noqa: F401

    del accelerate, deepspeed, peft
    for line in sys.stdin:
        answers.write(json.dumps(_side_by_side(json.loads(line))) + "\n")
        answers.flush()


def _side_by_side(ranks: list[dict[str, Any]]) -> list[int]:
    """As torchrun does: when one rank fails, the others are ended."""
    alive = {_fork(one): place for place, one in enumerate(ranks)}
    codes = [0] * len(ranks)
    deadline = time.monotonic() + RANK_TIMEOUT_S
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            code = codes[alive.pop(pid)] = os.waitstatus_to_exitcode(status)
            if code:
                deadline = min(deadline, time.monotonic() + 5)  # for the others' own last words
        elif time.monotonic() > deadline:
            for other in alive:
                os.kill(other, signal.SIGKILL)
            deadline = float("inf")
        else:
            time.sleep(0.02)
    return codes


def _fork(rank: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        log = os.open(rank["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.update(rank["environment"])
        from executor.worker import train

        code = train.main(rank["arguments"])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
