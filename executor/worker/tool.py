"""Another tool on one rank: its own training program, run as its launcher would run it, on inputs of the run folder.

Watched at its first optimizer step as a script is, and measured and heard of through Transformers' Trainer, on which
these tools stand (trainer.py). Started by torchrun as `-m executor.worker.tool RUN_FOLDER TOOL [--resume CHECKPOINT]`.
Not here: the inputs (toolinputs.py), or what each tool is (executor/backends/tools.py).
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

from executor.backends.tools import INPUTS, TOOLS
from executor.folder import alive
from executor.worker import script, toolinputs, trainer
from executor.worker.world import timeouts
from planner.spec.plan import read_plan

ALONE = {
    "HF_HUB_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    "AXOLOTL_DO_NOT_TRACK": "1",
}
"""The tool fetches nothing and reports to no service."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool; an exception is recorded and re-raised, so that Python prints it."""
    folder, word, *rest = sys.argv[1:] if arguments is None else arguments
    checkpoint = rest[rest.index("--resume") + 1] if "--resume" in rest else None
    tool, run = TOOLS[word], Path(folder).absolute()
    watch = script.FirstStepCheck(run, word, "--with")
    with script.watched(watch):
        alive.begin(run, int(os.environ.get("RANK", "0")))
        timeouts.set_default()
        node = os.environ.get("GROUP_RANK", "0")
        os.environ.update(ALONE | {"HF_DATASETS_CACHE": str(run / f".{INPUTS}-cache-{node}")})
        toolinputs.ready(watch.plan, run, arrow=tool.arrow)
        resumed = [one.format(checkpoint=checkpoint) for one in tool.resumed] if checkpoint else []
        sys.argv = [tool.module, *tool.arguments, *resumed]
        os.chdir(run)
        sys.path[0] = str(run)
        script.after_import(trainer.MODULE, trainer.WatchedTrainer(read_plan(run / "plan.json"), run).watch)
        runpy.run_module(tool.module, run_name="__main__", alter_sys=True)
        alive.say(alive.END)
    return 0


if __name__ == "__main__":
    sys.exit(main())
