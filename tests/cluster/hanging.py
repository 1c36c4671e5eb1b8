"""The trainer with a rank that hangs, or is slow, as the environment says.

HOLD="RANK STEP": this rank never ends this step (from 1). DIE="RANK STEP TIMES SAVED": this rank kills itself there, in
so many starts of the run, once rank 0 has logged the steps before and the checkpoint of step SAVED is complete.
SLOW_S: rank 0 takes so long for its first step, and for all of its first validation, batch by batch. Not here: any
expectation.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from executor import alive, checkpoints, rundir
from executor.worker import train
from executor.worker.data import validation_batches
from tests.cluster.waiting import until


def main(arguments: Sequence[str]) -> int:
    """One rank."""
    start_engine, rank = train.start_engine, int(os.environ["RANK"])
    held, at = (int(word) for word in os.environ.get("HOLD", "-1 -1").split())
    dies, then, times, saved = (int(word) for word in os.environ.get("DIE", "-1 -1 0 0").split())
    slow_s = float(os.environ.get("SLOW_S", "0")) * (rank == 0)

    def started(plan: Any, folder: str) -> Any:
        engine = start_engine(plan, folder)
        run, loss_sum, begun = engine.run, engine.loss_sum, []
        deaths = Path(folder) / "deaths"

        def slow_run(*given: Any) -> Any:
            said = alive.read(Path(folder), rank)
            step = said.step if said else 0
            if (rank, step) == (dies, then) and len(deaths.read_text() if deaths.exists() else "") < times:
                until(
                    lambda: (
                        len(rundir.read_losses(Path(folder))) >= then - 1
                        and (Path(folder) / checkpoints.CHECKPOINTS / checkpoints.STEP.format(saved)).is_dir()
                    ),
                    "rank 0 to log and save the steps before",
                )
                with deaths.open("a") as file:
                    file.write("x")
                os.kill(os.getpid(), signal.SIGKILL)
            if (rank, step) == (held, at):
                hold()
            if not begun:
                time.sleep(slow_s)
            begun.append(step)
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


def hold() -> None:
    """Never come back."""
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
