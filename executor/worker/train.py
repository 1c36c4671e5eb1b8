"""The training run of one rank: build, train, validate, save. Started by torchrun as `-m executor.worker.train`.

It reads the plan and writes only into the run folder. Not here: what a framework does (engines/) or starting
processes (the launchers).
"""

from __future__ import annotations

import argparse
import math
import os
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from executor import alive, checkpoints
from executor.checkpoints import Policy
from executor.datacheck import check_inputs
from executor.worker import cpu, fake_world, fetching, lastwords, limits, shards, states, timeouts, waits, weights
from executor.worker.checkpointing import Checkpointing
from executor.worker.data import micro_batches, open_rows, order_of, validation_batches
from executor.worker.engines import start_engine
from executor.worker.engines.base import Engine, NotFinite, target_tokens
from executor.worker.mesh import check_mesh, check_world, write_json, write_mesh
from executor.worker.model import build_optimizer, unfilled_model
from executor.worker.progress import Reporter, StepMetrics, memory_in_use, shown
from executor.worker.rows import Rows
from executor.worker.schedule import learning_rate
from executor.worker.seeds import seed_step
from executor.worker.unmetered import Unmetered
from executor.worker.wire import WireCounter
from planner.errors import PlannerError
from planner.plan import Plan, read_plan
from planner.spec import Recipe

_KEPT: list[Engine] = []
"""This rank's engine, until the process ends. A process group that loses its last reference joins gloo's threads while
it holds the interpreter's lock, for which one of them may wait: a rank was seen to hang so on its way out of `run`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one rank; a refusal is one line and its exit code, kept in failed/rank-N.json."""
    options = _options(arguments)
    try:
        run(options)
    except PlannerError as error:
        return _refuse(options.folder, error)
    except BaseException as error:
        if not limits.out_of_memory(error):
            lastwords.write(options.folder, error)
            raise
        rule = "out of device memory: " + (str(error).splitlines() or [type(error).__name__])[0]
        refusal = PlannerError("memory", None, rule, "Shard more, recompute, or lower the micro-batch", exit_code=5)
        return _refuse(options.folder, refusal, out_of_memory=True)
    return 0


def run(options: argparse.Namespace) -> None:
    """Everything this rank does, in order."""
    begin = time.perf_counter()
    folder = str(options.folder)
    alive.begin(options.folder, int(os.environ.get("RANK", "0")))
    timeouts.set_default()
    plan = read_plan(Path(folder) / "plan.json")
    check_inputs(plan, every_line=False)
    _choose_device(plan)
    states.watch(options.folder, dist.distributed_c10d, dist)
    waits.install()
    if options.fake_world:
        fake_world.start(plan)
    engine = start_engine(plan, folder)
    _KEPT.append(engine)
    rank, world_size = engine.world()
    check_world(plan, rank, world_size)
    source = fetching.agreed(options.folder, options.resume, rank) if options.resume is not None else None

    recipe = plan.job.recipe
    rows = open_rows(plan, recipe.data)
    validation = open_rows(plan, recipe.validation_data, "recipe.validation_data") if recipe.validation_data else None
    meter = _meter(plan, rank, engine.device, measure=not options.no_meter)
    if options.memory_limit is not None:
        limits.limit_memory(engine.device, options.memory_limit)
    with meter.load():
        if options.build_on_meta:
            fake_world.prepare_with_zeros(engine)
        else:
            engine.prepare(unfilled_model(plan), lambda model: build_optimizer(model, plan))
    live = engine.mesh()
    write_mesh(plan, live, folder, str(engine.device), engine.model)
    check_mesh(plan, live)
    meter.attach(engine.state_tensors)
    first = _restored(engine, source) if source is not None else 0

    reporter, wire = Reporter(plan, folder, rank, first), WireCounter()
    try:
        saving = Checkpointing(plan, engine, options.folder, _policy(options), reporter)
        with saving.listening():
            _train(plan, engine, rows, validation, meter, reporter, wire, saving, live.data_parallel_rank, first)
    finally:
        reporter.close()
    alive.say(alive.END)
    measured = meter.result()
    if measured is not None:
        step = first + meter.memory_step
        widths = _widths(plan, rows, live.data_parallel_rank, step) if measured.memory else ()
        measured = msgspec.structs.replace(measured, wire=wire.result(), rows=widths)
        write_json(Path(folder) / "measured" / f"rank-{rank}.json", measured)
    if options.save_weights:
        weights.save(plan, engine, options.folder, rank)
    if rank == 0:
        write_json(Path(folder) / "result.json", reporter.result(time.perf_counter() - begin))
    dist.barrier()
    dist.destroy_process_group()


def _restored(engine: Engine, source: fetching.Source) -> int:
    """Load a checkpoint into a prepared engine; how many steps of the run are done."""
    alive.say(alive.RESTORE)
    shards.restore(engine, fetching.fetched(source, engine), source.found.optimizer_step)
    return source.found.step


def _train(
    plan: Plan,
    engine: Engine,
    rows: Rows,
    validation: Rows | None,
    meter: Any,
    reporter: Reporter,
    wire: WireCounter,
    saving: Checkpointing,
    data_parallel_rank: int,
    first: int,
) -> None:
    recipe, layout = plan.job.recipe, plan.layout
    order = order_of(plan, rows)
    reporter.opened(rows, validation)
    if validation is not None and first and _due(recipe, first):  # it comes after the checkpoint of its step
        reporter.validated(first, *_validate(engine, validation, plan, data_parallel_rank, first))
    wire.begin()
    last = time.perf_counter()
    for step in range(first, recipe.steps):
        alive.say(alive.FIRST_STEP if step == first else alive.STEP, step + 1)
        turn = waits.Turn(engine.device)
        batches = micro_batches(rows, order, layout, data_parallel_rank, step)
        # What the loss is the mean of. Every rank knows all rows, so none has to ask the others.
        whole = order.batch(step)
        tokens, targets = int(rows.lengths[whole].sum()), int(rows.targets[whole].sum())
        rate = learning_rate(plan.job.optimizer, recipe, step)
        begin = time.perf_counter()
        seed_step(recipe.seed, step, data_parallel_rank)
        with meter.step(step - first):
            try:
                loss_sum, norm = _optimizer_step(engine, batches, targets, meter, rate)
            except NotFinite as error:
                rule = f"is not finite at step {step + 1}, which was not applied"
                fix = "Lower --lr or warm up longer, or look at this step's data"
                raise PlannerError("grad_norm", error.norm, rule, fix, exit_code=5) from None
            _finish_device_work(engine.device)
        seconds = time.perf_counter() - begin
        loss_sum = saving.summed(loss_sum, step + 1, turn.busy_s())
        wire.step_ended()
        loss = float(loss_sum) / (targets * layout.tp * layout.pp)  # ranks of one model report the same sum
        metrics = StepMetrics(
            step=step,
            loss=loss,
            grad_norm=norm,
            lr=rate,
            tokens=tokens,
            target_tokens=targets,
            step_s=seconds,
            time=time.time(),
            memory_bytes=memory_in_use(),
            busy_s=shown(saving.busy_s, step),
        )
        if not math.isfinite(metrics.loss) and not fake_world.started():  # what nobody sent is no number
            raise PlannerError(
                "loss", metrics.loss, f"is not finite at step {step + 1}", "Lower --lr or warm up longer", exit_code=5
            )
        reporter.step(metrics)
        now = time.perf_counter()
        if step > first:
            alive.stepped(now - last)
        last, done = now, step + 1
        saving.step_done(done)
        if validation is not None and _due(recipe, done):
            reporter.validated(done, *_validate(engine, validation, plan, data_parallel_rank, done))
            wire.begin()


def _due(recipe: Recipe, done: int) -> bool:
    """Whether the validation data are looked at after so many steps."""
    return done == recipe.steps or (recipe.eval_every > 0 and done % recipe.eval_every == 0)


def _widths(plan: Plan, rows: Rows, data_parallel_rank: int, step: int) -> tuple[int, ...]:
    """Tokens of a row, padding included, in each of a step's micro-batches on this rank."""
    batches = micro_batches(rows, order_of(plan, rows), plan.layout, data_parallel_rank, step)
    return tuple(batch.inputs.shape[1] for batch in batches)


def _optimizer_step(
    engine: Engine, batches: Any, step_tokens: int, meter: Any, rate: float
) -> tuple[torch.Tensor, float]:
    """(this rank's summed loss, global gradient norm) of one optimizer step over so many target tokens in all."""
    loss_sum = engine.run(batches, step_tokens, meter)
    with meter.phase("optimizer"):
        norm = engine.step(rate)
    return loss_sum, norm


def _validate(engine: Engine, rows: Rows, plan: Plan, data_parallel_rank: int, done: int) -> tuple[float, int]:
    """Mean loss over all target tokens of the validation data, and how many there are."""
    engine.model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for batch in validation_batches(rows, plan.layout, data_parallel_rank):
        alive.say(alive.VALIDATION, done)
        placed = engine.share(batch).to(engine.device)
        total += torch.stack(
            [engine.loss_sum(placed).double(), torch.tensor(float(target_tokens(placed))).double().to(engine.device)]
        )
    dist.all_reduce(total)
    engine.model.train()
    return float(total[0] / total[1]), int(total[1]) // (plan.layout.tp * plan.layout.pp)


def _policy(options: argparse.Namespace) -> Policy | None:
    return checkpoints.policy(options.checkpoint_every, options.keep_last, options.keep_every)


def _choose_device(plan: Plan) -> None:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if plan.cluster.gpu.kind == "cpu":
        cpu.prepare(plan.layout)
    elif local_rank >= torch.cuda.device_count():
        raise PlannerError(
            "device",
            f"{torch.cuda.device_count()} visible",
            f"local rank {local_rank} has none, the plan is for {plan.cluster.gpu.name}",
            "Check the driver and CUDA_VISIBLE_DEVICES on this node",
            exit_code=4,
        )
    else:
        torch.cuda.set_device(local_rank)


def _meter(plan: Plan, rank: int, device: torch.device, *, measure: bool) -> Any:
    if not measure:
        return Unmetered()
    from executor.worker.meter import Meter

    node, local_rank = int(os.environ.get("GROUP_RANK", "0")), int(os.environ.get("LOCAL_RANK", "0"))
    return Meter(plan, rank, node, local_rank, device)


def _finish_device_work(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _refuse(folder: Path, error: PlannerError, *, out_of_memory: bool = False) -> int:
    lastwords.write(folder, error, out_of_memory=out_of_memory)
    print(f"{socket.gethostname()} rank {os.environ.get('RANK', '0')}: {error.sentence}", file=sys.stderr, flush=True)
    return lastwords.said(error).exit_code


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="executor.worker.train", description="Train one rank of a run folder's plan.")
    parser.add_argument("folder", type=Path, metavar="RUN_FOLDER")
    parser.add_argument("--save-weights", action="store_true", help="write weights/, a Transformers folder, at the end")
    parser.add_argument("--no-meter", action="store_true", help="train without measuring memory and traffic")
    parser.add_argument("--fake-world", action="store_true", help="be rank 0 of a world that only pretends the others")
    parser.add_argument("--build-on-meta", action="store_true", help="in a fake world: zeros in place of numbers")
    parser.add_argument("--checkpoint-every", metavar="STEPS|TIME|signal", help="write checkpoints: 20, 10m, signal")
    parser.add_argument("--keep-last", type=int, metavar="K", help="keep so many checkpoints (default: 2)")
    parser.add_argument("--keep-every", type=int, metavar="N", help="keep those of steps that N divides, too")
    parser.add_argument("--resume", type=Path, metavar="STEP_FOLDER", help="go on from this checkpoint")
    parser.add_argument("--memory-limit", type=int, metavar="BYTES", help="take no more of the device than this")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is written. The interpreter's own end destroys gloo's threads while they may still run, which aborts a
    # process now and then (seen once: "terminate called without an active exception").
    os._exit(code)
