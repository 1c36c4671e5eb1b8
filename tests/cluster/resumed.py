"""A rank that trains as the trainer does, saves its shard after some step, or begins from shards of any layout.

    resumed RUN_FOLDER [--save-after STEP [--back-after STEP]] [--load FOLDER --step STEP]
                       [--ill-rank RANK]

With --back-after it goes back to what it saved, once. Rank --ill-rank RANK cannot say what it holds. It writes
RUN_FOLDER/steps.json: [[step, loss, gradient norm], ...] with every digit. Not here: the trainer, its checkpoints'
protocol and its command line.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from executor.worker.checkpoints import shards
from executor.worker.data.data import micro_batches, open_rows, order_of
from executor.worker.engines import start_engine
from executor.worker.meter.meter import Unmetered
from executor.worker.model.model import build_optimizer, unfilled_model
from executor.worker.model.seeds import seed_step
from executor.worker.world import cpu
from executor.worker.world.schedule import learning_rate
from planner.basics.errors import PlannerError
from planner.spec.plan import read_plan


def main(arguments: Sequence[str]) -> int:
    """Exit code 3 with a sentence on stderr where the shards are refused."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--save-after", type=int)
    parser.add_argument("--back-after", type=int)
    parser.add_argument("--load", type=Path)
    parser.add_argument("--step", type=int, default=0)
    parser.add_argument("--ill-rank", type=int)
    options = parser.parse_args(arguments)
    try:
        _train(options)
    except PlannerError as error:
        print(error.sentence, file=sys.stderr)
        return error.exit_code
    return 0


def ill() -> None:
    """What no code of ours foresees."""
    raise KeyError("exp_avg")


def _train(options: argparse.Namespace) -> None:
    plan = read_plan(options.folder / "plan.json")
    recipe, layout = plan.job.recipe, plan.layout
    cpu.prepare(layout)
    engine = start_engine(plan, str(options.folder))
    rank, _ = engine.world()
    rows = open_rows(plan, recipe.data)
    engine.prepare(unfilled_model(plan), lambda model: build_optimizer(model, plan))
    if rank == options.ill_rank:
        engine.views = ill
    if options.load is not None:
        shards.restore(engine, sorted(options.load.glob("*.safetensors")), options.step)
    data_rank = engine.mesh().data_parallel_rank
    order, found = order_of(plan, rows), []
    shard = options.folder / "shards" / f"rank-{rank}.safetensors"
    step, back = options.step, options.back_after
    while step < recipe.steps:
        batches = micro_batches(rows, order, layout, data_rank, step)
        seed_step(recipe.seed, step, data_rank)
        targets = int(rows.targets[order.batch(step)].sum())
        loss = engine.run(batches, targets, Unmetered())
        norm = engine.step(learning_rate(plan.job.optimizer, recipe, step))
        dist.all_reduce(loss)
        found.append((step, float(loss) / (targets * layout.tp * layout.pp), norm))
        step += 1
        if step == options.save_after and not shard.exists():
            shard.parent.mkdir(exist_ok=True)
            shards.write(shard, engine.views(), {"step": str(step)})
        if step == back:
            step, back = options.save_after, None
            shards.restore(engine, sorted(shard.parent.iterdir()), step)
    if rank == 0:
        (options.folder / "steps.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()
