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

from executor.datacheck import check_inputs
from executor.worker import cpu, fake_world, lastwords, limits, weights
from executor.worker.data import micro_batches, open_rows, order_of, validation_batches
from executor.worker.engines import start_engine
from executor.worker.engines.base import Engine, NotFinite, target_tokens
from executor.worker.mesh import check_mesh, check_world, write_json, write_mesh
from executor.worker.model import build_optimizer, unfilled_model
from executor.worker.progress import Reporter, StepMetrics, memory_in_use
from executor.worker.rows import Rows
from executor.worker.schedule import learning_rate
from executor.worker.seeds import seed_rank
from executor.worker.unmetered import Unmetered
from executor.worker.wire import WireCounter
from planner.errors import PlannerError
from planner.plan import Plan, read_plan


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
    plan = read_plan(Path(folder) / "plan.json")
    check_inputs(plan, every_line=False)
    _choose_device(plan)
    if options.fake_world:
        fake_world.start(plan)
    engine = start_engine(plan, folder)
    rank, world_size = engine.world()
    check_world(plan, rank, world_size)

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
            splits = plan.layout.engine == "fsdp2" and plan.job.optimizer.name == "sgd"  # no fused SGD of DTensors
            fused = plan.layout.offload_optimizer and not splits
            engine.prepare(unfilled_model(plan), lambda model: build_optimizer(model, plan.job, on_host=fused))
    live = engine.mesh()
    write_mesh(plan, live, folder, str(engine.device), engine.model)
    check_mesh(plan, live)
    meter.attach(engine.state_tensors)

    seed_rank(plan.job.recipe.seed, live.data_parallel_rank)
    reporter, wire = Reporter(plan, folder, rank), WireCounter()
    try:
        _train(plan, engine, rows, validation, meter, reporter, wire, live.data_parallel_rank)
    finally:
        reporter.close()
    measured = meter.result()
    if measured is not None:
        widths = _widths(plan, rows, live.data_parallel_rank, meter.memory_step) if measured.memory else ()
        measured = msgspec.structs.replace(measured, wire=wire.result(), rows=widths)
        write_json(Path(folder) / "measured" / f"rank-{rank}.json", measured)
    if options.save_weights:
        weights.save(plan, engine, options.folder, rank)
    if rank == 0:
        write_json(Path(folder) / "result.json", reporter.result(time.perf_counter() - begin))
    dist.barrier()
    dist.destroy_process_group()


def _train(
    plan: Plan,
    engine: Engine,
    rows: Rows,
    validation: Rows | None,
    meter: Any,
    reporter: Reporter,
    wire: WireCounter,
    data_parallel_rank: int,
) -> None:
    recipe, layout = plan.job.recipe, plan.layout
    order = order_of(plan, rows)
    reporter.opened(rows, validation)
    wire.begin()
    for step in range(recipe.steps):
        batches = micro_batches(rows, order, layout, data_parallel_rank, step)
        # What the loss is the mean of. Every rank knows all rows, so none has to ask the others.
        whole = order.batch(step)
        tokens, targets = int(rows.lengths[whole].sum()), int(rows.targets[whole].sum())
        rate = learning_rate(plan.job.optimizer, recipe, step)
        begin = time.perf_counter()
        with meter.step(step):
            try:
                loss_sum, norm = _optimizer_step(engine, batches, targets, meter, rate)
            except NotFinite as error:
                rule = f"is not finite at step {step + 1}, which was not applied"
                fix = "Lower --lr or warm up longer, or look at this step's data"
                raise PlannerError("grad_norm", error.norm, rule, fix, exit_code=5) from None
            _finish_device_work(engine.device)
        seconds = time.perf_counter() - begin
        dist.all_reduce(loss_sum)
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
        )
        if not math.isfinite(metrics.loss) and not fake_world.started():  # what nobody sent is no number
            raise PlannerError(
                "loss", metrics.loss, f"is not finite at step {step + 1}", "Lower --lr or warm up longer", exit_code=5
            )
        reporter.step(metrics)
        done = step + 1
        if validation is not None and (done == recipe.steps or (recipe.eval_every and done % recipe.eval_every == 0)):
            reporter.validated(done, *_validate(engine, validation, plan, data_parallel_rank))
            wire.begin()


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


def _validate(engine: Engine, rows: Rows, plan: Plan, data_parallel_rank: int) -> tuple[float, int]:
    """Mean loss over all target tokens of the validation data, and how many there are."""
    engine.model.eval()
    total = torch.zeros(2, dtype=torch.float64, device=engine.device)
    for batch in validation_batches(rows, plan.layout, data_parallel_rank):
        placed = engine.share(batch).to(engine.device)
        total += torch.stack(
            [engine.loss_sum(placed).double(), torch.tensor(float(target_tokens(placed))).double().to(engine.device)]
        )
    dist.all_reduce(total)
    engine.model.train()
    return float(total[0] / total[1]), int(total[1]) // (plan.layout.tp * plan.layout.pp)


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
    parser.add_argument("--memory-limit", type=int, metavar="BYTES", help="take no more of the device than this")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is written. The interpreter's own end destroys gloo's threads while they may still run, which aborts a
    # process now and then (seen once: "terminate called without an active exception").
    os._exit(code)
