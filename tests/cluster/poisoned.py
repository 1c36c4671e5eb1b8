"""One rank that takes a good optimizer step and then one whose gradients are not numbers, and says what became of the
weights. Not here: what a test expects of it.

The second step divides its loss by no tokens at all, which every engine takes for what it is: a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from executor.folder.rundir import write_of_rank
from executor.worker.data.data import micro_batches, open_rows, order_of
from executor.worker.engines import start_engine
from executor.worker.engines.base import NotFinite, RankEngine
from executor.worker.meter.meter import Unmetered
from executor.worker.model.model import build_optimizer, unfilled_model
from executor.worker.world import cpu
from planner.spec.plan import read_plan


def main(arguments: Sequence[str]) -> int:
    """One rank: poisoned/rank-N.json of what happened."""
    folder = Path(arguments[0])
    plan = read_plan(folder / "plan.json")
    cpu.prepare(plan.layout)
    engine = start_engine(plan, str(folder))
    rows = open_rows(plan, plan.job.recipe.data)
    engine.prepare(unfilled_model(plan), lambda model: build_optimizer(model, plan))
    order, mine = order_of(plan, rows), engine.mesh().data_parallel_rank

    def run(step: int, tokens: int) -> None:
        engine.run(micro_batches(rows, order, plan.layout, mine, step), tokens, Unmetered())

    begun = weights(engine)
    run(0, plan.layout.global_batch_size * plan.job.seq_len)
    norm = engine.step(1e-2)
    stepped = weights(engine)
    run(1, 0)
    raised = ""
    try:
        engine.step(1e-2)
    except NotFinite as error:
        raised = str(error.norm)
    found = {"norm": norm, "moved": not same(begun, stepped), "raised": raised, "kept": same(stepped, weights(engine))}
    write_of_rank(folder, "poisoned", dist.get_rank(), found)
    dist.barrier()
    dist.destroy_process_group()
    return 0


def weights(engine: RankEngine) -> dict[str, torch.Tensor]:
    """Copies of what this rank sees of the weights."""
    return {name: weight.detach().clone() for name, weight in engine.weights()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    """Bit for bit."""
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
