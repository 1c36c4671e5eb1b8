"""Ranks that write checkpoints and nothing else, for tests that kill them at a boundary of the protocol (boundaries.c).

Run as a program it reads jobs, one JSON object a line, and forks the ranks of each from itself: torch is imported once.
Not here: what must hold after a kill (test_kill_points.py), or training.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
NUMBERS = 3000
WORLD = 2
LATER_S = 0.15
"""How long the other ranks go on where they are not killed at once."""


def build_library(folder: Path) -> Path:
    """boundaries.c, compiled."""
    library = folder / "boundaries.so"
    command = ["cc", "-O1", "-shared", "-fPIC", str(HERE / "boundaries.c"), "-o", str(library), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return library


@dataclass
class Writers:
    """The process from which ranks are forked."""

    library: Path
    _process: Any = None

    def __enter__(self) -> Writers:
        environment = os.environ | {
            "LD_PRELOAD": str(self.library), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "",
            "PYTHONPATH": os.pathsep.join([str(PROJECT), str(HERE), str(PROJECT / "tests" / "executor")]),
        }  # fmt: skip
        command = [sys.executable, __file__]
        self._process = subprocess.Popen(command, env=environment, stdin=-1, stdout=-1, text=True, cwd=PROJECT)
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def do(self, **job: Any) -> dict[str, Any]:
        """Have a job done."""
        self._process.stdin.write(json.dumps(job) + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert "error" not in answer, answer["error"]
        return answer

    def write(self, run: Path, steps: list[int], **options: Any) -> dict[str, Any]:
        """Checkpoints of these steps by WORLD ranks. With `kill_at` the rank that reaches that boundary is killed, and
        the others `at_once` or a little later. With `store`, a file's name, each rank has run/host-RANK for itself.
        {"complete": steps rank 0 was told are complete, "killed": whether,
        "boundaries": how many there were}."""
        return self.do(kind="write", run=str(run), steps=steps, **options)

    def load(self, *folders: Path) -> dict[str, Any]:
        """The numbers of a checkpoint, of hosts' folders: {"step": the step whose numbers they all are, or None}."""
        return self.do(kind="load", folders=[str(one) for one in folders])


def serve() -> None:
    """Do what is asked."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        job = json.loads(line)
        try:
            said = written(job) if job["kind"] == "write" else loaded([Path(one) for one in job["folders"]])
        except Exception:
            said = {"error": traceback.format_exc()}
        answers.write(json.dumps(said) + "\n")
        answers.flush()


def written(job: dict[str, Any]) -> dict[str, Any]:
    """Fork the ranks, and see to their end."""
    shared = mmap.mmap(-1, 4096)
    words = (ctypes.c_long * 128).from_buffer(
        shared
    )  # 0: boundaries; 2, 3: folders begun; 8: all; 16 and on: ranks done; 64: complete
    before = os.environ.copy()
    os.environ["BOUNDARIES_UNDER"] = job["run"]
    if "log" in job:
        os.environ["BOUNDARIES_LOG"] = job["log"]
    ranks = {}
    for rank in range(WORLD):
        if (pid := os.fork()) == 0:
            os._exit(_rank(rank, job, words))
        ranks[pid] = rank
    killed = False
    while ranks:
        pid, status = os.wait()
        code = os.waitstatus_to_exitcode(status)
        del ranks[pid]
        if code == -signal.SIGKILL and not killed:
            killed = True
            if not job.get("at_once", True):
                time.sleep(LATER_S)
            for other in ranks:
                os.kill(other, signal.SIGKILL)
        elif code != -signal.SIGKILL and code:
            raise RuntimeError(f"a rank ended with {code}")
    os.environ.clear()
    os.environ.update(before)
    complete = [step for place, step in enumerate(job["steps"]) if words[64 + place]]
    return {"complete": complete, "killed": killed, "boundaries": words[0]}


def _rank(rank: int, job: dict[str, Any], words: Any) -> int:
    try:
        arm = ctypes.CDLL(None).boundaries_arm
        arm.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_int]
        arm(ctypes.addressof(words), job.get("kill_at", -1), int(job.get("half", False)))
        run, leaders, store = Path(job["run"]), (0,) * WORLD, None
        if "store" in job:
            run, leaders, store = run / f"host-{rank}", tuple(range(WORLD)), FileStore(job["store"], WORLD)
        if leaders[rank] == rank:
            checkpoints.begin(run)
            words[2 + rank] = 1
        while not all(words[2 + leader] for leader in leaders):
            time.sleep(0.001)
        if rank == 0:
            words[8] = 1
        while not words[8]:
            time.sleep(0.001)
        policy = CheckpointSchedule(every="20", keep_last=job.get("keep_last", 1))
        saver = Saver(PLAN, run, RunFolders(job.get("attempt", "a"), rank, leaders, store), policy)
        saver_module.POLL_S = folders.LOOK_S = 0.002
        for place, step in enumerate(job["steps"]):
            saver.save(step, step, views(rank, step))
            saver.wait()
            for one in saver.news():
                if one.error:
                    raise RuntimeError(one.error)
                words[64 + place] = 1
            words[16 + 2 * place + rank] = 1
            while not all(words[16 + 2 * place + other] for other in range(WORLD)):
                time.sleep(0.001)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def views(rank: int, step: int) -> list[Any]:
    """What a rank holds after a step: half of one weight, all of another, each with a moment; numbers of this step."""
    found, half = [], NUMBERS // 2
    for kind, offset in (("weight", 0.0), ("exp_avg", 0.5)):
        whole = torch.arange(NUMBERS, dtype=torch.float32) + step * 10000 + offset
        mine = (rank * half, (rank + 1) * half)
        shape, box = (NUMBERS,), ((0, NUMBERS),)
        found.append(StateView("sharded", kind, shape, box, mine, whole[slice(*mine)].clone()))
        found.append(StateView("held", kind, shape, box, (0, NUMBERS), whole.clone(), (rank, WORLD)))
    return found


def loaded(places: list[Path]) -> dict[str, Any]:
    """Load as both ranks do, and say of which step all numbers are."""
    names = checkpoints.complete(places[0]).files
    paths = [next(one / name for one in places if (one / name).exists()) for name in names]
    steps = set()
    for rank in range(WORLD):
        empty = views(rank, 0)
        for view in empty:
            view.tensor.zero_()
        shards.load(paths, empty)
        step = round(float(empty[1].tensor[0]) / 10000)
        whole = all(torch.equal(one.tensor, other.tensor) for one, other in zip(empty, views(rank, step), strict=True))
        steps.add(step if whole else None)
    return {"step": steps.pop() if len(steps) == 1 else None}


if __name__ == "__main__":
    import torch
    from test_rundir import make_plan
    from torch.distributed import FileStore

    from executor.folder import checkpoints
    from executor.folder.checkpoint_policy import CheckpointSchedule
    from executor.worker.checkpoints import folders, shards
    from executor.worker.checkpoints import saver as saver_module
    from executor.worker.checkpoints.folders import RunFolders
    from executor.worker.checkpoints.saver import Saver
    from executor.worker.model.pieces import StateView
    from planner.spec import Layout

    torch.set_num_threads(1)
    PLAN = make_plan(Layout(engine="ddp", dp_replicate=WORLD))
    serve()
