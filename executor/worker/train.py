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

from executor.folder import alive, badloss, checkpoint_policy
from executor.folder.checkpoints import Complete
from executor.folder.rundir import MEASURED, write_json, write_of_rank
from executor.preflight.datacheck import check_inputs
from executor.worker import fake_world
from executor.worker.checkpoints import fetching, shards
from executor.worker.checkpoints.checkpointing import Checkpointing
from executor.worker.checkpoints.progress import Reporter, StepMetrics, memory_in_use, shown
from executor.worker.data.data import micro_batches, open_rows, order_of, validation_batches
from executor.worker.data.rows import TrainingRows
from executor.worker.engines import start_engine
from executor.worker.engines.base import RankEngine, target_tokens
from executor.worker.guard import Guard
from executor.worker.mesh import check_mesh, check_world, write_mesh
from executor.worker.meter.meter import Meter, Unmetered
from executor.worker.meter.profile import Profiling
from executor.worker.model.model import build_optimizer, unfilled_model
from executor.worker.model.seeds import seed_step
from executor.worker.weights import weights
from executor.worker.world import cpu, lastwords, limits, states, timeouts, waits
from executor.worker.world.schedule import learning_rate
from executor.worker.world.wire import WireCounter
from planner.basics.errors import PlannerError
from planner.spec.plan import Plan, read_plan


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
    rank, world_size = engine.world()
    check_world(plan, rank, world_size)
    source = fetching.agreed(options.folder, options.resume, rank) if options.resume is not None else None

    recipe = plan.job.recipe
    rows = open_rows(plan, recipe.data)
    validation = open_rows(plan, recipe.validation_data, "recipe.validation_data") if recipe.validation_data else None
    meter: Any = Unmetered() if options.no_meter else Meter.here(plan, engine.device)
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
    found = _restored(engine, source) if source is not None else None
    first = found.step if found is not None else 0

    reporter = Reporter(plan, folder, rank, first)
    kept = checkpoint_policy.policy(options.checkpoint_every, options.keep_last, options.keep_every)
    saving = Checkpointing(plan, engine, options.folder, kept, reporter, first)
    updates = found.optimizer_step if found is not None else 0
    asked = badloss.policy(options.on_bad_loss, options.loss_spike, options.spike_window, options.max_skips)
    guard = Guard(engine, options.folder, asked or badloss.STOP, reporter, first=first, updates=updates)
    guard.check(apart=saving.apart)
    profiling = Profiling(plan, options.folder, rank, engine.device, options.profile)
    training = _Training(
        plan, engine, (rows, validation), meter, profiling, reporter, saving, guard, live.data_parallel_rank
    )
    with saving.listening():
        training.run(first)
    alive.say(alive.END)
    measured = meter.result()
    if measured is not None:
        step = guard.batch_of(first + meter.memory_step)
        widths = _widths(plan, rows, live.data_parallel_rank, step) if measured.memory else ()
        measured = msgspec.structs.replace(measured, wire=training.wire.result(), rows=widths)
        write_of_rank(options.folder, MEASURED, rank, measured)
    if options.save_weights:
        weights.save(plan, engine, options.folder, rank)
    if rank == 0:
        write_json(Path(folder) / "result.json", reporter.result(time.perf_counter() - begin))
    dist.barrier()
    dist.destroy_process_group()


def _restored(engine: RankEngine, source: fetching.CheckpointSource) -> Complete:
    """Load a checkpoint into a prepared engine; returns its COMPLETE."""
    alive.say(alive.RESTORE)
    shards.restore(engine, fetching.fetched(source, engine), source.found.optimizer_step)
    return source.found


class _Training:
    """The steps of a run on one rank, from its data to what is reported of each."""

    def __init__(
        self,
        plan: Plan,
        engine: RankEngine,
        rows: tuple[TrainingRows, TrainingRows | None],
        meter: Any,
        profiling: Profiling,
        reporter: Reporter,
        saving: Checkpointing,
        guard: Guard,
        data_parallel_rank: int,
    ) -> None:
        """`rows` are those of training and of validation."""
        self._plan, self._engine, self._meter, self._reporter = plan, engine, meter, reporter
        self._profiling = profiling
        self._saving, self._guard, self._data_rank = saving, guard, data_parallel_rank
        self._rows, self._validation = rows
        self._order, self.wire = order_of(plan, self._rows), WireCounter()
        self._turn = waits.BusyClock(engine.device)

    def run(self, first: int) -> None:
        """Every step of the run after `first`."""
        self._reporter.opened(self._rows, self._validation)
        self._validate(first)  # it comes after the checkpoint of its step
        self.wire.begin()
        last, done, count = time.perf_counter(), first, 0
        while done < self._plan.job.recipe.steps:
            alive.say(alive.STEP if count else alive.FIRST_STEP, done + 1)
            before, done = done, self._step(done, count)
            if self._profiling.write():
                self.wire.begin()
            now = time.perf_counter()
            if count:
                alive.stepped(now - last)
            last, count = now, count + 1
            if done > before:
                self._saving.step_done(done, self._guard.updates)
            self._validate(done)

    def _step(self, step: int, count: int) -> int:
        """Take a step, the `count`-th of this start of the run, or not; how many steps are done then."""
        self._turn = waits.BusyClock(self._engine.device)
        layout, recipe, batch = self._plan.layout, self._plan.job.recipe, self._guard.batch_of(step)
        batches = micro_batches(self._rows, self._order, layout, self._data_rank, batch)
        # What the loss is the mean of. Every rank knows all rows, so none has to ask the others.
        whole = self._order.batch(batch)
        tokens, targets = int(self._rows.lengths[whole].sum()), int(self._rows.targets[whole].sum())
        rate = learning_rate(self._plan.job.optimizer, recipe, step)
        with self._profiling.around(self._meter, step, count) as meter:
            begin = time.perf_counter()
            seed_step(recipe.seed, step, self._data_rank)
            with meter.step(count):
                loss_sum = self._engine.run(batches, targets, meter)
                loss = self._mean(loss_sum, step, targets) if self._guard.looks_first else None
                with meter.phase("optimizer"):
                    norm, bad = self._guard.step(rate, loss)
                if self._engine.device.type == "cuda":
                    torch.cuda.synchronize(self._engine.device)
            seconds = time.perf_counter() - begin
        if bad is not None:
            made = badloss.line(batch, step, bad, loss, norm, seconds)
            done = self._guard.passed(step, bad, made, self._saving)
            self.wire.begin()
            return done
        assert norm is not None
        if loss is None:
            loss = self._mean(loss_sum, step, targets)
        self.wire.step_ended()
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
            busy_s=shown(self._saving.busy_s, step),
        )
        if not math.isfinite(loss) and not fake_world.started():  # a fake world sends no loss
            raise PlannerError(
                "loss", loss, f"is not finite at step {step + 1}", "Lower --lr or warm up longer", exit_code=5
            )
        self._guard.good(loss)
        self._reporter.step(metrics)
        return step + 1

    def _mean(self, loss_sum: torch.Tensor, step: int, targets: int) -> float:
        """The loss of the whole batch. Ranks of one model report the same sum."""
        layout = self._plan.layout
        return float(self._saving.summed(loss_sum, step + 1, self._turn.busy_s())) / (targets * layout.tp * layout.pp)

    def _validate(self, done: int) -> None:
        """Log the mean loss over all target tokens of the validation data, where that is due after `done` steps."""
        layout, recipe, engine = self._plan.layout, self._plan.job.recipe, self._engine
        due = done == recipe.steps or (recipe.eval_every > 0 and done % recipe.eval_every == 0)
        if self._validation is None or not done or not due:
            return
        engine.model.eval()
        total = torch.zeros(2, dtype=torch.float64, device=engine.device)
        for batch in validation_batches(self._validation, layout, self._data_rank):
            alive.say(alive.VALIDATION, done)
            placed = engine.share(batch).to(engine.device)
            targets = torch.tensor(float(target_tokens(placed)), dtype=torch.float64, device=engine.device)
            total += torch.stack([engine.loss_sum(placed).double(), targets])
        dist.all_reduce(total)
        engine.model.train()
        self._reporter.validated(done, float(total[0] / total[1]), int(total[1]) // (layout.tp * layout.pp))
        self.wire.begin()


def _widths(plan: Plan, rows: TrainingRows, data_parallel_rank: int, step: int) -> tuple[int, ...]:
    """Tokens of a row, padding included, in each of a step's micro-batches on this rank."""
    batches = micro_batches(rows, order_of(plan, rows), plan.layout, data_parallel_rank, step)
    return tuple(batch.inputs.shape[1] for batch in batches)


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
    parser.add_argument("--keep-last", type=int, metavar="K", help="keep N checkpoints (default: 2)")
    parser.add_argument("--keep-every", type=int, metavar="N", help="keep those of steps that N divides, too")
    parser.add_argument("--on-bad-loss", choices=badloss.ACTIONS, help="what a bad loss does to the run")
    parser.add_argument("--loss-spike", type=float, metavar="DEVIATIONS", help="from where on a loss explodes")
    parser.add_argument("--spike-window", type=int, metavar="STEPS", help="over N steps before it")
    parser.add_argument("--max-skips", type=int, metavar="N", help="skip no more steps in a row")
    parser.add_argument("--resume", type=Path, metavar="STEP_FOLDER", help="go on from this checkpoint")
    parser.add_argument("--profile", type=int, metavar="STEP", help="record this step, or the next steady one")
    parser.add_argument("--memory-limit", type=int, metavar="BYTES", help="take no more of the device than this")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Everything is written. The interpreter's own end destroys gloo's threads while they may still run, which aborts a
    # process now and then (seen once: "terminate called without an active exception").
    os._exit(code)
