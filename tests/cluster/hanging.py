"""The trainer with a rank that hangs, dies, or is slow, as the environment says.

HOLD="RANK STEP TIMES": this rank never ends this step (from 1), in so many starts of the run. DIE="RANK STEP TIMES": it
kills itself there, once rank 0 has logged the steps before. EVERY="STEPS": such a rank begins no step before the
checkpoint that is due by then is complete, so that none is put off, however slow the disk. SLOW_S: rank 0 takes so long
for its first step, and for all of its first validation, batch by batch. EACH_S: every rank takes so much longer for
each step. DRAG="RANK SECONDS": this rank does. PAUSE="RANK STEP SECONDS": this rank does once. TOLD="RANK STEP FILE":
this rank makes the file and waits for a SIGTERM, where there was no such file yet. Not here: any expectation.
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from executor.folder import alive, checkpoints, rundir
from executor.worker import train
from executor.worker.data.data import validation_batches
from tests.cluster.waiting import until

HOOK = Path(__file__).with_name("hook")
"""On PYTHONPATH it makes ranks of the built-in trainer those of this file."""


def main(arguments: Sequence[str]) -> int:
    """One rank."""
    start_engine, rank = train.start_engine, int(os.environ["RANK"])
    slow_s = float(os.environ.get("SLOW_S", "0")) * (rank == 0)
    each_s = float(os.environ.get("EACH_S", "0"))
    drags, drag_s = (float(word) for word in os.environ.get("DRAG", "-1 0").split())
    pauses, pause_at, pause_s = (float(word) for word in os.environ.get("PAUSE", "-1 -1 0").split())

    def started(plan: Any, folder: str) -> Any:
        engine = start_engine(plan, folder)
        run, loss_sum, begun = engine.run, engine.loss_sum, []

        def slow_run(*given: Any) -> Any:
            said = alive.read(Path(folder), rank)
            step = said.step if said else 0
            befall(Path(folder), rank, step)
            if not begun:
                time.sleep(slow_s)
            begun.append(step)
            time.sleep(each_s + drag_s * (rank == drags) + pause_s * ((rank, step) == (pauses, pause_at)))
            return run(*given)

        def slow_loss(batch: Any) -> Any:
            time.sleep(slow_s / batches[0])
            return loss_sum(batch)

        engine.run, engine.loss_sum = slow_run, slow_loss
        return engine

    batches = [1]

    def counted(*given: Any) -> Any:
        found = list(validation_batches(*given))
        batches[0] = len(found)
        return found

    train.start_engine, train.validation_batches = started, counted  # type: ignore[assignment]
    return train.main(arguments)


def befall(folder: Path, rank: int, step: int) -> None:
    """What is to happen to this rank as it begins this step."""
    who, at_step, *place = os.environ.get("TOLD", "-1 -1").split(maxsplit=2)
    if (int(who), int(at_step)) == (rank, step) and not Path(place[0]).exists():
        Path(place[0]).touch()
        await_end()
    plans = {word: _plan(word) for word in ("HOLD", "DIE") if _plan(word)[0] == rank}
    if plans and (every := int(os.environ.get("EVERY", "0"))) and step > every:
        saved = checkpoints.STEP.format((step - 1) // every * every)
        until((folder / checkpoints.CHECKPOINTS / saved).is_dir, f"the checkpoint {saved}")
    for word, (_, at, times) in plans.items():
        mark = folder / f"{word}-{step}"
        if step != at or (len(mark.read_text()) if mark.exists() else 0) >= times:
            continue
        until(lambda: len(rundir.read_losses(folder)) >= step - 1, "rank 0 to log the steps before")
        with mark.open("a") as file:
            file.write("x")
        if word == "DIE":
            os.kill(os.getpid(), signal.SIGKILL)
        hold()


def in_a_tool(folder: Path) -> None:
    """Let this rank, which another tool will train in, meet its fate as it says that it begins a step."""
    say, rank = alive.say, int(os.environ["RANK"])

    def befallen(stage: str, step: int = 0) -> None:
        if stage in (alive.FIRST_STEP, alive.STEP):
            befall(folder, rank, step)
        say(stage, step)

    alive.say = befallen


def await_end() -> None:
    """Stand still before a step until this rank is told to end, which it then answers as it would have."""
    told: list[int] = []
    before: Any = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *given: (told.append(given[0]), before(*given)))
    until(lambda: bool(told), "a SIGTERM")


def _plan(word: str) -> tuple[int, int, int]:
    rank, step, times = (int(part) for part in os.environ.get(word, "-1 -1 0").split())
    return rank, step, times


def hold() -> None:
    """Never come back."""
    while True:
        time.sleep(3600)


def run(arguments: Sequence[str]) -> None:
    """Be this rank, and end, whatever happens: Python goes on with the trainer after a hook that raises."""
    code = 1
    try:
        code = main(arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    run(sys.argv[1:])
