"""The trainer on batches of which some are bad, and beside it a rank that trains on a list of batches and no others.

    spoiled RUN_FOLDER [the trainer's arguments]       with NAN and INF in the environment
    spoiled RUN_FOLDER --only STEP:BATCH,STEP:BATCH,...

NAN="BATCH ...": the loss of these batches (from 0) is divided by no tokens, so it is not a number. INF="BATCH ...":
their loss is itself, and their gradients are infinite. ALONE="BATCH": rank 1 alone takes the norm of this batch's
gradients for infinite. With --only each step (from 0) is taken on its batch, and RUN_FOLDER/steps.json is [[step, loss,
gradient norm], ...] with every digit. Checkpoints are waited for. Not here: any expectation.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from typing_extensions import override

from executor.worker import train
from executor.worker.checkpoints.checkpointing import Checkpointing
from executor.worker.data.data import micro_batches, open_rows, order_of
from executor.worker.engines import start_engine
from executor.worker.engines.base import NotFinite
from executor.worker.meter.meter import Unmetered
from executor.worker.model.model import build_optimizer, unfilled_model
from executor.worker.model.seeds import seed_step
from executor.worker.world import cpu
from executor.worker.world.schedule import learning_rate
from planner.spec.plan import read_plan


def main(arguments: Sequence[str]) -> int:
    """One rank."""
    if "--only" in arguments:
        pairs = [pair.split(":") for pair in arguments[arguments.index("--only") + 1].split(",")]
        reference(Path(arguments[0]), [(int(step), int(batch)) for step, batch in pairs])
        return 0
    nan, inf = ({int(batch) for batch in os.environ.get(name, "").split()} for name in ("NAN", "INF"))
    begun, batches_of = [-1], train.micro_batches

    def spoil(module: Any, given: Any, output: Any) -> None:
        if begun[0] in inf and isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(lambda gradient: gradient * math.inf)

    def started(plan: Any, folder: str) -> Any:
        engine = start_engine(plan, folder)
        run, prepare, step = engine.run, engine.prepare, engine.step

        def prepared(*given: Any) -> None:
            prepare(*given)
            blocks = [one for one in engine.model.modules() if type(one).__name__.endswith(("MLP", "MoeBlock"))]
            for block in blocks:
                block.register_forward_hook(spoil)

        def spoiled(batches: Any, step_tokens: int, meter: Any) -> Any:
            return run(batches, 0 if begun[0] in nan else step_tokens, meter)

        def stepped(rate: float) -> float:
            norm = step(rate)
            if (os.environ.get("ALONE"), os.environ["RANK"]) == (str(begun[0]), "1"):
                raise NotFinite(math.inf)
            return norm

        engine.run, engine.prepare, engine.step = spoiled, prepared, stepped
        return engine

    def noted(*given: Any) -> Any:
        begun[0] = given[-1]
        return batches_of(*given)

    train.start_engine, train.micro_batches = started, noted  # type: ignore[assignment]
    train.Checkpointing = Patient  # type: ignore[misc]
    return train.main(arguments)


class Patient(Checkpointing):
    """Waits for each checkpoint, so that none is put off on a slow machine."""

    @override
    def step_done(self, done: int, updates: int) -> None:
        super().step_done(done, updates)
        self.finish()


def reference(folder: Path, taken: Sequence[tuple[int, int]]) -> None:
    """Train these steps on these batches."""
    plan = read_plan(folder / "plan.json")
    recipe, layout = plan.job.recipe, plan.layout
    cpu.prepare(layout)
    engine = start_engine(plan, str(folder))
    engine.prepare(unfilled_model(plan), lambda model: build_optimizer(model, plan))
    rows, data_rank = open_rows(plan, recipe.data), engine.mesh().data_parallel_rank
    order, found = order_of(plan, rows), []
    for step, batch in taken:
        batches = micro_batches(rows, order, layout, data_rank, batch)
        seed_step(recipe.seed, step, data_rank)
        targets = int(rows.targets[order.batch(batch)].sum())
        loss = engine.run(batches, targets, Unmetered())
        norm = engine.step(learning_rate(plan.job.optimizer, recipe, step))
        dist.all_reduce(loss)
        found.append((step, float(loss) / (targets * layout.tp * layout.pp), norm))
    if dist.get_rank() == 0:
        (folder / "steps.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(code)
