"""Ranks without the wait: a process that has imported the frameworks once and forks every rank from itself.

Importing torch, Transformers and DeepSpeed takes a core four to five seconds, more than a tiny model's training, and a
suite starts hundreds of ranks. A forked rank is a process like any other, with its own gloo, memory and exit code. Not
here: torchrun, which test_launch.py, test_measure.py and test_probe.py start for real.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import json
import os
import resource
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2]
LEAST_TIMEOUT_S, TIMEOUT_S_A_RANK = 900, 60  # without a sign of any rank: for ranks that wait for each other for ever
LAST_WORDS_S = 5
PR_SET_PDEATHSIG = 1
CLONE_NEWNET = 0x40000000

# What ranks import on their way, much of it only when it is used (found in the sys.modules of ranks at their end).
MODULES = (
    "accelerate.commands.launch",
    "deepspeed.module_inject.auto_ep_presets",
    "deepspeed.runtime.superoffload.superoffload_stage3",
    "executor.worker.engines.deepspeed",
    "executor.worker.engines.transformers_tp",
    "executor.worker.meter.meter",
    "executor.worker.readback",
    "executor.worker.train",
    "peft.tuners.lora.bnb",
    "torch.distributed.checkpoint.state_dict",
    "transformers.distributed.utils",
    "transformers.models.llama.modeling_llama",
)


class Nursery:
    """The warm process, started at the first call and used by one run at a time. It ends with whoever started it."""

    def __init__(self, modules: Sequence[str] = MODULES) -> None:
        self._modules = modules
        self._process: subprocess.Popen[str] | None = None

    def run(
        self, ranks: Sequence[dict[str, Any]], timeout_s: float | None = None, last_words_s: float = LAST_WORDS_S
    ) -> list[int]:
        """Exit codes of ranks that run side by side; a signal's is negative.

        Each is {"module", whose `main` is called with "arguments"; "environment", which is added; "log", a file}.
        """
        if self._process is None or self._process.poll() is not None:
            self._process = _start(self._modules)
            atexit.register(self.close)
        assert self._process.stdin is not None and self._process.stdout is not None
        limit = timeout_s or max(LEAST_TIMEOUT_S, TIMEOUT_S_A_RANK * len(ranks))
        try:
            self._process.stdin.write(json.dumps([list(ranks), limit, last_words_s]) + "\n")
            self._process.stdin.flush()
            answer = self._process.stdout.readline()
        except BaseException:  # Ctrl-C: an answer that nobody waits for must not be the next run's
            self.close()
            raise
        assert answer, f"the warm process ended with {self._process.wait()}"
        codes: list[int] = json.loads(answer)
        return codes

    def read_back(self, framework: str, path: str, *_: int) -> dict[str, Any]:
        """In place of `executor.backends.common._read_back`: the same reader, in a fork of this process."""
        log = Path(f"{path}.read")
        reader = {"module": "executor.worker.readback", "arguments": [framework, path], "environment": {}}
        (code,) = self.run([reader | {"log": str(log)}])
        assert code == 0, log.read_text()
        answer: dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
        return answer

    def close(self) -> None:
        """End it, and with it whatever rank it still has."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
            self._process = None


def _start(modules: Sequence[str]) -> subprocess.Popen[str]:
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(PROJECT),
        "PYTHONWARNINGS": "ignore",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
    }
    return subprocess.Popen(
        [sys.executable, __file__, str(os.getpid()), *modules],
        cwd=PROJECT,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,  # a Ctrl-C is the tests' own business, which then end it
    )


def _serve(parent: int, modules: Sequence[str]) -> None:
    _die_with(parent)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # DeepSpeed logs to stdout
    for name in modules:
        import_module(name)
    gc.collect()
    gc.freeze()  # or a rank's first collection would copy every page of this process
    for line in sys.stdin:
        answers.write(json.dumps(_side_by_side(*json.loads(line))) + "\n")
        answers.flush()


def _side_by_side(ranks: list[dict[str, Any]], timeout_s: float, last_words_s: float) -> list[int]:
    """As torchrun does: when one rank fails, the others are ended, `last_words_s` later. Those that hang, for
    `timeout_s` after the last sign of any of them, say first where they are; slow ones have as long as they need."""
    begun = time.time()
    alive = {_fork(one): place for place, one in enumerate(ranks)}
    codes = [0] * len(ranks)
    deadline, ending = time.monotonic() + timeout_s, signal.SIGABRT
    while alive:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            code = codes[alive.pop(pid)] = os.waitstatus_to_exitcode(status)
            if code:
                deadline = min(deadline, time.monotonic() + last_words_s)  # for the others' own last words
        elif time.monotonic() > deadline:
            quiet_s = time.time() - max(begun, _last_sign(ranks))
            if ending == signal.SIGABRT and not any(codes) and quiet_s < timeout_s:
                deadline = time.monotonic() + timeout_s - quiet_s
                continue
            for other in alive:
                os.kill(other, ending)
            deadline, ending = time.monotonic() + LAST_WORDS_S, signal.SIGKILL
        else:
            time.sleep(0.02)
    return codes


def _last_sign(ranks: list[dict[str, Any]]) -> float:
    """When a rank last printed something or began a step (executor/folder/alive.py), in seconds since 1970."""
    logs = {Path(rank["log"]) for rank in ranks}
    reports = [report for log in logs for report in log.parent.glob("alive/rank-*")]
    return max((file.stat().st_mtime for file in (*logs, *reports) if file.exists()), default=0.0)


def _fork(rank: dict[str, Any]) -> int:
    # A fork has only the thread that forks: another's locks would stay locked in it.
    assert len(os.listdir("/proc/self/task")) == 1, "the warm process has threads: one of MODULES starts some"
    parent = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        _die_with(parent)
        log = os.open(rank["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        faulthandler.enable(file=log)  # a crash, and the SIGABRT of a rank that hangs, print every thread's stack
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.environ.update(rank["environment"])
        if "NETWORK_NAMESPACE" in rank["environment"]:
            _enter(rank["environment"]["NETWORK_NAMESPACE"])
        if "BALANCED_ROUTER" in rank["environment"]:
            import balanced

            balanced.balance_routers()
        code = import_module(rank["module"]).main(rank["arguments"])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _enter(namespace: str) -> None:
    """Move to a network namespace by its name, as `ip netns exec` does."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}", "rb") as opened:
        if libc.setns(opened.fileno(), CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")


def _die_with(parent: int) -> None:
    """Ask Linux for SIGKILL when the parent dies, however it does."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it died before the request was made
        os._exit(1)


if __name__ == "__main__":
    _serve(int(sys.argv[1]), sys.argv[2:])
